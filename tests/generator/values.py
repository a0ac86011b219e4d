"""Values of drawn programs: arrays with what is known of them, so that results can be compared as strictly as is fair.

Nearly all numbers are small whole ones, for which sums and products are exact in any order: whatever is made of them
must come out the same to the bit, however it is split. Among them are NaN, infinities and −0.0.
"""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# How strictly a value is compared. Sums may settle the sign of a zero either way.
BITS, NUMBERS, ROUNDED = 0, 1, 2

FLOATS = ("float32", "float32", "float32", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
INTEGERS = ("int32", "int32", "int8", "uint8", "int16", "uint32")
SIZES = (4, 6, 8, 12, 16, 24)


class Value(NamedTuple):
    """An array of a drawn program.

    Attributes:
        array: The array itself.
        limit: No finite element is larger than this, the sign aside.
        trust: How strictly it is compared: `BITS`, `NUMBERS`, or `ROUNDED` and more, by one for each operation since.
        finite: Whether it holds neither NaN nor infinities.
    """

    array: Any
    limit: float
    trust: int = BITS
    finite: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def ndim(self) -> int:
        return self.array.ndim

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def is_float(self) -> bool:
        return bool(jnp.issubdtype(self.array.dtype, jnp.floating))

    @property
    def is_exact(self) -> bool:
        return self.trust < ROUNDED

    def made(self, array: Any, limit: float | None = None, trust: int | None = None, **known: Any) -> "Value":
        """What an operation makes of it; never trusted more."""
        rounded = self.trust + 1 if self.trust >= ROUNDED else self.trust
        return Value(array, self.limit if limit is None else limit, max(rounded, trust or 0), self.finite, **known)


def exact_up_to(dtype: str) -> float:
    """The largest number up to which a dtype holds all whole ones."""
    if dtype == "bool":
        return 1
    if jnp.issubdtype(dtype, jnp.integer):
        return float("inf")  # wraps around, in any order alike
    return 2.0 ** min(ml_dtypes.finfo(dtype).nmant + 1, 23)


def tamed(value: Value, cap: float) -> Value:
    """The value within a cap; NaN stays NaN."""
    if value.limit <= cap or not value.is_float:
        return value
    return value.made(jnp.clip(value.array, -cap, cap), cap, NUMBERS)


def finite(value: Value) -> Value:
    """The value without NaN and infinities."""
    if value.finite or not value.is_float:
        return value._replace(finite=True)
    return value.made(jnp.where(jnp.isfinite(value.array), value.array, 2), max(value.limit, 2))._replace(finite=True)


def whole(value: Value) -> Value:
    """A value that conversions to integers take as it is."""
    return tamed(finite(value), 100)


def draw_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, special: bool) -> np.ndarray:
    """Small whole numbers; with some NaN, infinities and −0.0 where asked for."""
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if jnp.issubdtype(dtype, jnp.integer):
        info = np.iinfo(dtype)
        drawn = rng.integers(max(info.min, -9), 10, shape)
        extreme = rng.choice([info.min, info.max], shape)
        return np.where(rng.random(shape) < 0.1, extreme, drawn).astype(dtype)
    drawn = rng.integers(-4, 5, shape).astype(np.float64)
    if special:
        odd = rng.choice([np.nan, np.inf, -np.inf, -0.0, -0.0, -0.0], shape)
        drawn = np.where(rng.random(shape) < 0.5 / max(prod(shape) ** 0.5, 1), odd, drawn)
        if "e4m3fn" in dtype:  # it has no infinities
            drawn = np.where(np.isinf(drawn), 3, drawn)
    return drawn.astype(jnp.dtype(dtype))


def as_bits(array: np.ndarray) -> np.ndarray:
    """The words that hold an array's numbers."""
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}" if array.dtype != bool else "u1")


def difference(expected: Any, found: Any, trust: int) -> str | None:
    """How a result differs from one device's; None where it does not."""
    a, b = (np.asarray(x) for x in (expected, found))
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}"
    if a.size == 0:
        return None
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        return difference(a.real, b.real, trust) or difference(a.imag, b.imag, trust)
    wrong = _differing(a, b, trust)
    if not wrong.any():
        return None
    at = tuple(int(i) for i in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {a.size}: {b[at]} instead of {a[at]} at {at}"


def _differing(a: np.ndarray, b: np.ndarray, trust: int) -> np.ndarray:
    if not jnp.issubdtype(a.dtype, jnp.floating):
        return a != b
    nan = np.isnan(a), np.isnan(b)
    if trust == BITS:
        return (nan[0] != nan[1]) | (~nan[0] & (as_bits(a) != as_bits(b)))
    wide, other = a.astype(np.float64), b.astype(np.float64)
    same = (wide == other) | (nan[0] & nan[1])
    if trust == NUMBERS:
        return ~same
    scale = np.max(np.abs(wide), initial=0, where=np.isfinite(wide)) + 1e-3
    tolerance = {2: 0.06, 1: 0.5}.get(a.dtype.itemsize, 2e-3)
    close = np.isfinite(wide) & np.isfinite(other)
    near = np.abs(np.where(close, wide - other, np.inf)) <= tolerance * scale
    return ~(same | near)


def alike(values: list[Value], like: Value) -> list[Value]:
    """Those of the same shape and dtype."""
    return [v for v in values if v.shape == like.shape and v.dtype == like.dtype]


Step = Callable[["Any"], Value]
