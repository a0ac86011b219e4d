"""What a drawn step takes its operands from: the values made so far, awkward positions, and a random key."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from tests.generator.values import ROUNDED, Value, alike, exact_up_to, tamed

# Positions that must be clamped, wrapped or dropped, among some that need not be.
POSITIONS = (-1000, -7, -1, 0, 1, 3, 5, 1 << 30)
_ROUNDED_STEPS = 3  # rounding grows from step to step: after so many a value is left alone


class Pool:
    """The values that a step may read.

    Attributes:
        values: All that were made so far, the arguments first.
        positions: `POSITIONS`, as an argument of the program: nothing is known of them when it is planned.
        key: A random key, likewise.
        cuts_first: Whether convolutions cut their images off before they pad them; see `Drawn.on_one_device`.
        rng: Draws for the step at hand.
    """

    def __init__(self, values: list[Value], positions: Any, key: Any, cuts_first: bool = False):
        self.values = values
        self.positions = positions
        self.key = key
        self.cuts_first = cuts_first
        self.rng = np.random.default_rng(0)

    def pick(self, fits: Callable[[Value], bool] = lambda v: True) -> Value:
        """One of those that fit; the first argument brought into shape is the caller's if there is none."""
        found = [v for v in self.values if v.trust < ROUNDED + _ROUNDED_STEPS and fits(v)]
        if not found:
            raise NothingFits
        return found[int(self.rng.integers(len(found)))]

    def exact(self, fits: Callable[[Value], bool] = lambda v: True) -> Value:
        """One that rounding has not touched, for what jumps."""
        return self.pick(lambda v: v.is_exact and fits(v))

    def alike(self, value: Value) -> Value:
        """One of the same shape and dtype; itself, if need be."""
        found = [v for v in alike(self.values, value) if v.is_exact or not value.is_exact]
        return found[int(self.rng.integers(len(found)))] if found else value

    def position(self) -> Any:
        """A position that is known only when the program runs."""
        return self.positions[int(self.rng.integers(len(POSITIONS)))]

    def positions_in(self, count: int, size: int) -> Any:
        """Several positions, most of them inside a dim of a size and all different; the first is awkward."""
        inside = jnp.arange(count) * 5 % max(size, 1)
        moved = inside + self.positions[3 + int(self.rng.integers(4))]  # by 0 to 5
        return jnp.where(jnp.arange(count) == 0, self.position(), moved)

    def dim(self, value: Value) -> int:
        return int(self.rng.integers(value.ndim))

    def one_of(self, *things: Any) -> Any:
        return things[int(self.rng.integers(len(things)))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)


class NothingFits(Exception):
    """There is no value that the drawn step could work on."""


def for_products(x: Value, count: int) -> tuple[Value, float, bool]:
    """A value small enough that sums of so many products of two such are exact; their limit; whether they are."""
    if not x.is_float:
        return x, float("inf"), True
    bound = exact_up_to(x.dtype)
    cap = max(1.0, float(np.floor((bound / max(count, 1)) ** 0.5)))
    small = tamed(x, cap)
    return small, count * min(small.limit, cap) ** 2, count * cap * cap <= bound


def for_sums(x: Value, count: int) -> tuple[Value, bool]:
    """A value small enough that sums of so many are exact, and whether they are."""
    if not x.is_float:
        return x, True
    cap = max(1.0, exact_up_to(x.dtype) // max(count, 1))
    return tamed(x, cap), cap * count <= exact_up_to(x.dtype)
