"""Conversions, held against every number of narrow types."""

import jax
import ml_dtypes
import numpy as np
import pytest

from meshwright.graph.dtypes import hands_sums_on, is_exact_widening, keeps_sums
from meshwright.rules.base import Signature, TensorType

FLOATS = [
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"),
    *("float8_e5m2fnuz", "float8_e8m0fnu", "bfloat16", "float16"),
]
INTS = ["int8", "uint8", "int16", "uint16"]
WIDE = ["float32", "float64", "int32", "uint32", "int64", "complex64"]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def all_numbers(name):
    """Every number that a dtype has, special ones, too."""
    dtype = numpy_dtype(name)
    return np.arange(256**dtype.itemsize).astype(f"uint{8 * dtype.itemsize}").view(dtype)


def same(a, b):
    """Which entries are equal, signs of zeros included."""
    with np.errstate(invalid="ignore"):  # NaNs
        a, b = a.astype(np.float64), b.astype(np.float64)
    return (a == b) & (np.signbit(a) == np.signbit(b)) | (np.isnan(a) & np.isnan(b))


@pytest.mark.parametrize("source", [*FLOATS, *INTS])
def test_a_widening_is_exact_where_no_number_changes(source):
    numbers, found = all_numbers(source), {}
    with np.errstate(all="ignore"):  # what does not fit in the other type
        for target in {*FLOATS, *INTS, *WIDE} - {source, "complex64"}:
            there = numbers.astype(np.float64).astype(numpy_dtype(target))
            back = there.astype(np.float64).astype(numbers.dtype)
            found[target] = same(numbers, there).all() and same(numbers, back).all()
    alike = [target for target in found if (target in FLOATS or "float" in target) == (source in FLOATS)]
    assert {t: is_exact_widening(source, t) for t in alike} == {t: found[t] for t in alike}
    assert not any(is_exact_widening(source, target) for target in {*found} - {*alike})


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"])
def test_a_compiled_program_widens_exactly(source):
    numbers = all_numbers(source)
    for target in ("float16", "float32"):
        if is_exact_widening(source, target):
            there = jax.jit(lambda x: x.astype(target))(numbers)  # noqa: B023
            back = jax.jit(lambda x: x.astype(source))(there)
            assert same(numbers, np.asarray(back)).all()


def test_complex_numbers_and_what_holds_none():
    assert is_exact_widening("complex64", "complex128") and keeps_sums("complex64", "complex128")
    assert not is_exact_widening("float32", "complex64") and not is_exact_widening("float32", "float32")
    for name in ("bool", "key<fry>", "token", "int4", "float4_e2m1fn"):
        assert not is_exact_widening(name, "int32") and not is_exact_widening(name, "float32")


@pytest.mark.parametrize("source", ["bfloat16", "float16", "float32", "float64"])
def test_sums_are_kept_where_no_part_overflows(source):
    for target in ("bfloat16", "float16", "float32", "float64", "float8_e5m2", "int32", "uint8", "bool"):
        largest = np.array([ml_dtypes.finfo(numpy_dtype(source)).max / 2]).astype(numpy_dtype(source))
        with np.errstate(all="ignore"):
            fits = "float" in target and np.isfinite(largest.astype(numpy_dtype(target)).astype(float)).all()
        assert keeps_sums(source, target) == fits
    assert not keeps_sums("int8", "int32") and not keeps_sums("int32", "float32") and not keeps_sums("bool", "int32")


@pytest.mark.parametrize(
    ("source", "target", "handed_on"),
    [
        ("bfloat16", "float32", True),
        ("float32", "float32", True),
        ("float32", "bfloat16", False),  # parts of 1000.3 and −1000 would leave 0 or 4 instead of 0.3
        ("float16", "bfloat16", False),
        ("uint8", "int32", False),
        ("float8_e8m0fnu", "float16", False),
    ],
)
def test_sums_are_handed_on_where_nothing_is_lost(source, target, handed_on):
    kinds = [TensorType((8,), dtype, numpy_dtype(dtype).itemsize) for dtype in (source, target)]
    assert hands_sums_on(Signature("convert_element_type", {}, (kinds[0],), (kinds[1],))) == handed_on
