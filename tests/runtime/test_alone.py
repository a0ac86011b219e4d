"""What XLA cannot split is done by each device on its own parts: nothing is sent for it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.runtime.spmd import spmd

FUNCTIONS = {
    "fft": jnp.fft.fft,
    "rfft": jnp.fft.rfft,
    "irfft": lambda x: jnp.fft.irfft(x.astype(jnp.complex64)),
    "top_k": lambda x: jax.lax.top_k(x, 3),
    "in a loop": lambda x: jax.lax.scan(lambda c, y: (c + jnp.fft.fft(y).real, None), x[0], x)[0],
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_sent_along_batch_dims(name):
    x, function = jax.random.normal(jax.random.key(0), (8, 4, 16)), FUNCTIONS[name]
    mesh = mw.Mesh.abstract((2, 4), alpha=0.0, beta=1e-9)
    spec = P(None, ("y",)) if name == "in a loop" else P("x", "y")
    plan = mw.plan(function, x, mesh=mesh, method=mw.Manual({"[ax]*": spec}))
    assert not plan.verify().collectives
    for expected, found in zip(jax.tree.leaves(function(x)), jax.tree.leaves(spmd(plan, function)(x)), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)
