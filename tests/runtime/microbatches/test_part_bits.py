"""Random bits of parts of a batch: those of the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.runtime.microbatches.cut_operations import Cut
from meshwright.runtime.microbatches.part_bits import _positions, part_bits
from tests.runtime.microbatches.cutting import in_parts

pytestmark = pytest.mark.slow


@pytest.mark.sweep(6)
@pytest.mark.parametrize("bit_width", [8, 16, 32])
@pytest.mark.parametrize(("shape", "dim"), [((12,), 0), ((12, 5), 0), ((3, 24, 2), 1)])
@pytest.mark.parametrize("before", [1, 3])
def test_parts_have_the_bits_of_the_whole(shape, dim, before, bit_width):
    cut, dtype = Cut(4, before), jnp.dtype(f"uint{bit_width}")
    for keys in (jax.random.key(7), jax.random.split(jax.random.key(3), (2, 3))):
        drawn = jax.vmap(lambda key: jax.random.bits(key, shape, dtype))(keys.reshape(-1)).reshape(*keys.shape, *shape)
        parts = cut.parts(drawn, keys.ndim + dim)
        for index in range(4):
            found = part_bits(keys, bit_width, shape, cut.rows(shape[dim], index), dim)
            np.testing.assert_array_equal(found, parts[index])


def test_positions_beyond_32_bits():
    shape, rows = (2**20, 3, 2**17 + 1), jnp.array([0, 1, 2**16, 2**20 - 1], jnp.uint32)
    high, low = jax.jit(lambda rows: [word[:, :, -2:] for word in _positions(shape, (4, 3, 2**17 + 1), rows, 0)])(rows)
    place = np.arange(3)[:, None] * shape[2] + np.arange(shape[2] - 2, shape[2])
    place = np.asarray(rows, np.uint64)[:, None, None] * np.uint64(3 * shape[2]) + place.astype(np.uint64)
    np.testing.assert_array_equal(high, place >> np.uint64(32))
    np.testing.assert_array_equal(low, place & np.uint64(2**32 - 1))


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_draws_at_positions_of_the_whole_batch(kind):
    def step(state, x):
        kept = jax.random.bernoulli(state[1], 0.5, x.shape)
        return jax.grad(lambda w: jnp.mean(jnp.where(kept, x @ w, 0.0) ** 2))(state[0])

    state, x = (jnp.eye(4), jax.random.key(5, impl=kind)), jax.random.normal(jax.random.key(1), (8, 4))
    cut = in_parts(step, (state, x), (1,), 4)
    np.testing.assert_allclose(jax.jit(cut)(state, x), jax.jit(step)(state, x), rtol=1e-6)
