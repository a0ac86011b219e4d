"""Words and symbols: the examples in their docstrings, and figures of every type."""

import doctest
from importlib import import_module

import pytest

from meshwright.parallelism.words import bytes_on_device, sharding_words, symbols


@pytest.mark.parametrize(
    "module", ["parallelism.dim_names", "plan_files.packing", "explain.alpa.repr_parser", "parallelism.words"]
)
def test_examples_in_docstrings(module):
    outcome = doctest.testmod(import_module(f"meshwright.{module}"))
    assert outcome.attempted > 0 and outcome.failed == 0


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("bool", 1),
        ("int64", 8),
        ("complex64", 8),
        ("key<fry>", 8),
    ],
)
def test_bytes_of_every_type(dtype, size):
    assert bytes_on_device((8, 4), dtype, (("x",), ()), {"x": 4}) == 8 * size


def test_a_sharding_without_letters_goes_by_size():
    assert symbols((8, 4), ("", ""), ((), ("x", "y"))) == "8 4_xy"
    assert (
        sharding_words((8, 4), ("", ""), ((), ("x", "y")), {"x": 2, "y": 2}) == "dim 1 (4) split over x and y (4 parts)"
    )
    assert symbols((), (), ()) == "scalar"
    assert sharding_words((), (), (), {}) == "a scalar"
