"""The axes of the matrix, and arrays of cells in which every pair (or triple) of their members occurs."""

from importlib.util import find_spec
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

PRECISIONS = ("float32", "bf16 parameters", "bf16 compute", "float16 scaled", "fp8 products", "int8 with LoRA")
PROGRAMS = (
    *("embedding", "tied embedding", "scan", "checkpoint", "dropout", "convolution", "MoE one-hot", "MoE ragged"),
    *("encoder-decoder", "two optimizers", "EMA"),
)
FRAMEWORKS = ("plain", "linen", "nnx", "equinox", "haiku")
MODES = (*("spmd", "microbatches", "gpipe", "1f1b", "interleaved", "zb-h1", "restored", "verify", "rehearse", "cache"),)
NEEDED = {"linen": "flax", "nnx": "flax", "equinox": "equinox", "haiku": "haiku"}  # what a framework is imported from
VARIANTS = 12  # of each mode: methods, meshes, sizes of microbatches


class Cell(NamedTuple):
    """One combination; `variant` chooses among the meshes and methods of its mode."""

    precision: str
    program: str
    framework: str
    mode: str
    variant: int = 0

    def __str__(self) -> str:
        return "/".join(map(str, self))

    @classmethod
    def of(cls, text: str) -> "Cell":
        """The cell of a text as `str` writes it."""
        *names, variant = text.split("/")
        axes = (PRECISIONS, PROGRAMS, FRAMEWORKS, MODES)
        if len(names) != len(axes) or not variant.isdigit():
            raise ValueError(f"{text!r} is no cell; write precision/program/framework/mode/variant")
        for name, members in zip(names, axes, strict=True):
            if name not in members:
                raise ValueError(f"{name!r} of {text!r} is none of {', '.join(members)}")
        return cls(*names, int(variant))


def present_frameworks() -> tuple[str, ...]:
    """Those whose packages are installed."""
    return tuple(name for name in FRAMEWORKS if find_spec(NEEDED.get(name, "jax")) is not None)


def covering(seed: int, strength: int = 2, frameworks: tuple[str, ...] = FRAMEWORKS) -> list[Cell]:
    """Cells in which any `strength` members of different axes occur together; each seed gives others.

    Greedy: a cell begins with one combination that no cell has yet, and the other axes take, in a random order, the
    member that covers most with those chosen before. Of several such cells the best is kept.
    """
    rng = np.random.default_rng(seed)
    axes = (PRECISIONS, PROGRAMS, frameworks, MODES)
    places = list(combinations(range(len(axes)), strength))
    missing = {(at, names) for at in places for names in product(*(axes[i] for i in at))}
    cells = []
    while missing:
        left = sorted(missing)
        drawn = [_completed(left[rng.integers(len(left))], axes, places, missing, rng) for _ in range(8)]
        best = max(drawn, key=lambda names: len(_covered(names, places, missing)))
        missing -= _covered(best, places, missing)
        cells.append(Cell(*best, int(rng.integers(VARIANTS))))
    return cells


def _completed(start, axes, places, missing, rng) -> tuple[str, ...]:
    names: list[str | None] = [None] * len(axes)
    for axis, name in zip(*start, strict=True):
        names[axis] = name
    for axis in rng.permutation(len(axes)):
        if names[axis] is None:
            members = list(rng.permutation(axes[axis]))
            gains = [len(_covered([*names[:axis], m, *names[axis + 1 :]], places, missing)) for m in members]
            names[axis] = str(members[int(np.argmax(gains))])
    return tuple(str(name) for name in names)


def _covered(names, places, missing) -> set:
    """The combinations that a cell, perhaps not chosen whole yet, has and no other cell does."""
    return {(at, tuple(names[i] for i in at)) for at in places} & missing
