"""The generator of random programs tells differences as strictly as it says, and draws what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.generator.programs import Drawn, differences
from tests.generator.values import BITS, NUMBERS, ROUNDED, difference, draw_array


def floats(*numbers, dtype=np.float32):
    return np.array(numbers, dtype)


@pytest.mark.parametrize(
    ("expected", "found", "differs_at"),
    [
        (floats(1, np.nan), floats(1, np.nan), ()),
        (floats(0.0), floats(-0.0), (BITS,)),
        (floats(1), floats(1 + 2e-7), (BITS, NUMBERS)),
        (floats(np.nan), floats(3.98), (BITS, NUMBERS, ROUNDED)),
        (floats(np.inf), floats(-np.inf), (BITS, NUMBERS, ROUNDED)),
        (floats(1e30), floats(np.inf), (BITS, NUMBERS, ROUNDED)),
        (np.array([2, -8]), np.array([3, -5]), (BITS, NUMBERS, ROUNDED)),
        (floats(1), floats(1, dtype=np.float64), (BITS, NUMBERS, ROUNDED)),
        (floats(1, dtype=jnp.bfloat16), floats(2, dtype=jnp.bfloat16), (BITS, NUMBERS, ROUNDED)),
    ],
)
def test_a_difference_is_seen_as_strictly_as_asked_for(expected, found, differs_at):
    assert [trust for trust in (BITS, NUMBERS, ROUNDED) if difference(expected, found, trust)] == list(differs_at)


def test_awkward_numbers_are_drawn():
    drawn = draw_array(np.random.default_rng(0), (64,), "float32", special=True)
    assert np.isnan(drawn).any() and np.isinf(drawn).any() and np.signbit(drawn[drawn == 0]).any()
    assert np.isin(draw_array(np.random.default_rng(0), (64,), "int8", special=False), [-128, 127]).any()


def test_a_program_is_the_same_each_time_it_is_drawn():
    assert str(jax.make_jaxpr(Drawn(7))(*Drawn(7).args)) == str(jax.make_jaxpr(Drawn(7))(*Drawn(7).args))


def test_a_wrong_result_is_told_with_its_place():
    assert differences([floats(1, 2)], [floats(1, 5)], [BITS]) == ["result 0: 1 of 2: 5.0 instead of 2.0 at (1,)"]
