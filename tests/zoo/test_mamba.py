"""The dual form of the state-space model equals its recurrence, position by position."""

import jax
import numpy as np

from meshwright.zoo import mamba

RNG = np.random.default_rng(0)


def test_products_in_chunks_equal_the_recurrence():
    values, into, out_of = RNG.normal(size=(2, 12, 3, 4)), RNG.normal(size=(2, 12, 5)), RNG.normal(size=(2, 12, 5))
    decay = -RNG.uniform(0.1, 2, size=(2, 12, 3))
    state, expected = np.zeros((2, 3, 4, 5)), np.zeros((2, 12, 3, 4))
    for t in range(12):
        state = np.exp(decay[:, t])[..., None, None] * state + np.einsum("bk,bnp->bnpk", into[:, t], values[:, t])
        expected[:, t] = np.einsum("bk,bnpk->bnp", out_of[:, t], state)
    arrays = [array.astype(np.float32) for array in (values, decay, into, out_of)]
    mixed = jax.jit(mamba._state_space, static_argnums=4)(*arrays, 4)
    np.testing.assert_allclose(mixed, expected, rtol=1e-4, atol=1e-4)
