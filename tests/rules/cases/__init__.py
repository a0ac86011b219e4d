"""The cases of the contract test, one file for each family of rules."""

from collections.abc import Callable
from importlib import import_module

import numpy as np

from meshwright.rules.registry import FAMILIES

from ..contract import Case

Builder = Callable[["Sizes"], Case]


class Sizes:
    """Draws sizes and data; the same seed gives the same case."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.choices = (2, 4, 6) if seed == 0 else (1, 2, 3, 4, 6)
        self.drawn = False

    def __call__(self) -> int:
        self.drawn = True
        return int(self.rng.choice(self.choices))

    def shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self() for _ in range(rank))

    def floats(self, *shape: int) -> np.ndarray:
        """Small integers as floats, so that sums are exact in any order."""
        return self.rng.integers(-4, 5, shape).astype(np.float32)

    def unit(self, *shape: int) -> np.ndarray:
        """Floats strictly between 0 and 1."""
        return self.rng.uniform(0.05, 0.95, shape).astype(np.float32)

    def ints(self, *shape: int, high: int = 9, low: int = 0) -> np.ndarray:
        return self.rng.integers(low, high, shape).astype(np.int32)

    def words(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 2**32, shape).astype(np.uint32)

    def bools(self, *shape: int) -> np.ndarray:
        return self.rng.integers(0, 2, shape).astype(bool)


def cases_of(group: str) -> list[tuple[str, Builder]]:
    """Every ``(primitive, builder)`` of every family: ``CASES`` tried in full, ``ALIKE`` those that share a rule."""
    modules = [import_module(f"{__name__}.{family}") for family in FAMILIES]
    return [pair for module in modules for pair in getattr(module, group, [])]


def draws_sizes(build: Builder) -> bool:
    """Whether another seed makes a case of another shape."""
    sizes = Sizes(0)
    build(sizes)
    return sizes.drawn
