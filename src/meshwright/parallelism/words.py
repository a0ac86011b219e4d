"""Shardings in symbols and in words, sizes and labels, for everything that shows a tensor."""

import re
from collections.abc import Mapping, Sequence
from math import prod

DIM_NAMES = {
    "B": "batch",
    "S": "sequence",
    "D": "hidden",
    "F": "feed-forward",
    "N": "heads",
    "H": "head dim",
    "V": "vocabulary",
    "E": "experts",
    "L": "layers",
    "R": "image rows",
    "C": "image columns",
}
_BITS = re.compile(r"\d+")
_WRAPPED = re.compile(r"(?:jvp|transpose|vmap|jit|pjit)\((.*)\)")
_UNSAID = ("", "rematted_computation", "checkpoint")
_LEVELS = {
    "selective": "attention and elementwise work recomputed",
    "alternate": "every second product recomputed",
    "full": "layers recomputed",
    "offload": "layers recomputed from inputs that are kept on the host",
}
_OF_DTYPE = {"bool": 8, "complex64": 64, "complex128": 128}


def symbols(shape: Sequence[int], letters: Sequence[str], spec: Sequence[Sequence[str]]) -> str:
    """A sharding in the field's notation.

    >>> symbols((8, 4), ("B", ""), (("x", "y"), ()))
    'B_xy 4'
    """
    named = (letter or str(size) for letter, size in zip(letters, shape, strict=True))
    dims = (name + ("_" + "".join(axes) if axes else "") for name, axes in zip(named, spec, strict=True))
    return " ".join(dims) or "scalar"


def sharding_words(
    shape: Sequence[int], letters: Sequence[str], spec: Sequence[Sequence[str]], mesh: Mapping[str, int]
) -> str:
    """A sharding in words.

    >>> sharding_words((8, 4), ("B", "D"), (("x",), ()), {"x": 2})
    'batch split over x (2 parts)'
    """
    parts = [
        f"{DIM_NAMES.get(letter) or f'dim {d} ({size})'} split over {' and '.join(axes)} "
        f"({prod(mesh[a] for a in axes)} parts)"
        for d, (size, letter, axes) in enumerate(zip(shape, letters, spec, strict=True))
        if axes
    ]
    return ", ".join(parts) or ("a scalar" if not shape else "whole on every device")


def bytes_on_device(shape: Sequence[int], dtype: str, spec: Sequence[Sequence[str]], mesh: Mapping[str, int]) -> int:
    """Bytes of one device's part of a tensor."""
    parts = prod(mesh[axis] for axes in spec for axis in axes)
    return prod(shape) * _bits(dtype) // 8 // parts


def _bits(dtype: str) -> int:
    if dtype in _OF_DTYPE:
        return _OF_DTYPE[dtype]
    digits = _BITS.search(dtype)
    return int(digits[0]) if digits else 64  # typed random keys


def label_words(label: str) -> str:
    """An operation's label without the parts that JAX's transformations added to it.

    >>> label_words("transpose(jvp(jvp()))/rematted_computation/mlp/dot_general")
    'mlp/dot_general'
    """
    parts = []
    for part in label.split("/"):
        while wrapped := _WRAPPED.fullmatch(part):
            part = wrapped[1]
        parts += [part] if part not in _UNSAID else []
    return "/".join(parts)


def recomputed_words(policy: str) -> str:
    """What a policy of recomputation computes again; empty where it is nothing, or as it was written.

    >>> recomputed_words("full:1/2")
    '1/2 of the layers recomputed'
    >>> recomputed_words("keep 3 17:7/8, selective:1/8 | none")
    'all but some results of layers recomputed'
    """
    parts = {tuple(part.strip().split(":")) for kind in policy.split("|") for part in kind.split(",")}
    levels = {level for level, *_ in parts} - {"none", "as written"}
    if not levels:
        return ""
    (level, share), *others = sorted(
        (level, *share) if share else (level, "") for level, *share in parts if level in levels
    )
    if others or level not in _LEVELS:
        away = ", some kept on the host" if any("offload" in level for level in levels) else ""
        return f"all but some results of layers recomputed{away}"
    if share:
        return f"{share} of the layers recomputed" if level == "full" else f"{_LEVELS[level]} in {share} of the layers"
    return _LEVELS[level]
