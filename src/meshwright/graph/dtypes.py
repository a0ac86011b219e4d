"""Properties of dtype conversions: which are exact, and which may be applied to the parts of a sum."""

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np

from meshwright.rules.base import Signature

_BYTE = 8


@cache
def is_exact_widening(source: str, target: str) -> bool:
    """Whether every number of one dtype is a number of another, so that converting there and back changes nothing.

    Both must be whole numbers, both real or both complex, and numbers of the first must fill bytes.

    >>> is_exact_widening("bfloat16", "float32"), is_exact_widening("uint8", "int16")
    (True, True)
    >>> is_exact_widening("float8_e8m0fnu", "float16"), is_exact_widening("int32", "float32")
    (False, False)
    """
    (kind, low), (other, high) = _limits(source), _limits(target)
    if kind != other or low is None or source == target:
        return False
    if kind == "i":
        return low.bits >= _BYTE and high.min <= low.min and low.max <= high.max
    return (
        low.bits >= _BYTE
        and low.nmant <= high.nmant
        and low.max <= high.max
        and high.smallest_subnormal <= low.smallest_subnormal
        and _specials(source) <= _specials(target)
    )


@cache
def keeps_sums(source: str, target: str) -> bool:
    """Whether a sum of converted numbers is the converted sum, up to rounding: so the parts of a sum may be converted.

    Whole numbers wrap around and are truncated, and a part of a sum may overflow where the sum does not: only real or
    complex numbers qualify, and only if the target's range of exponents includes the source's.

    >>> keeps_sums("bfloat16", "float32"), keeps_sums("float32", "bfloat16")
    (True, True)
    >>> keeps_sums("float32", "int32"), keeps_sums("uint8", "int32"), keeps_sums("float32", "float16")
    (False, False, False)
    """
    (kind, low), (other, high) = _limits(source), _limits(target)
    if kind != other or low is None or kind == "i" or not _specials(source) <= _specials(target):
        return False
    return low.maxexp <= high.maxexp and high.minexp <= low.minexp


def widens(op: Signature) -> bool:
    """Whether an operation converts to a type that takes more bytes and loses nothing, so that it can be undone."""
    if op.primitive != "convert_element_type":
        return False
    (narrow,), (wide,) = op.operands, op.results
    return narrow.itemsize < wide.itemsize and is_exact_widening(narrow.dtype, wide.dtype)


def hands_sums_on(op: Signature) -> bool:
    """Whether an operation converts the parts of a sum without loss, so that they may be added up after it.

    Rounding parts to fewer digits is not allowed: large parts of opposite signs leave an error as large as they are.
    """
    if op.primitive != "convert_element_type":
        return False
    source, target = op.operands[0].dtype, op.results[0].dtype
    return keeps_sums(source, target) and (source == target or is_exact_widening(source, target))


@cache
def _limits(name: str) -> tuple[str, Any]:
    """A kind of numbers, and the limits of a dtype of that kind; None for dtypes that hold no numbers."""
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:  # typed random keys, tokens
        return "", None
    if dtype.kind == "c":
        return "c", ml_dtypes.finfo(np.empty(0, dtype).real.dtype)
    for kind, limits in (("i", ml_dtypes.iinfo), ("f", ml_dtypes.finfo)):
        try:
            return kind, limits(dtype)
        except ValueError:
            continue
    return "", None


@cache
def _specials(name: str) -> frozenset[str]:
    """The special numbers that a dtype of real or complex numbers has."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    with np.errstate(all="ignore"):
        specials = np.array([-0.0, np.inf, np.nan]).astype(dtype).astype(complex).real
    return frozenset(map(str, specials.tolist())) & {"-0.0", "inf", "nan"}
