"""Models of every framework run in stages as they are, with the numbers of one device."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from tests.frameworks.pipelined import FRAMEWORKS

pytestmark = pytest.mark.devices

RECIPES = {
    "Flax linen": mw.ThreeD(pipeline=2, microbatch=4),
    "Flax nnx": mw.ThreeD(pipeline=2, microbatch=8, schedule="zb-h1"),
    "Equinox": mw.ThreeD(pipeline=2, microbatch=4, schedule="gpipe"),
    "Haiku": mw.ThreeD(pipeline=2, data=2, microbatch=4),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_a_pipeline_computes_what_one_device_computes(name):
    recipe = RECIPES[name]
    with jax.enable_x64(True):
        init, train_step, batch = FRAMEWORKS[name](jnp.float64)
        state = eqx.filter_jit(init)(jax.random.key(0))
        one = eqx.filter_jit(train_step)  # which also takes what is no array
        step = mw.parallelize(train_step, cluster=f"1x{recipe.data * 2} cpu", method=recipe, donate_argnums=())
        found, expected = state, state
        for _ in range(3):
            found, loss = step(found, batch)
            expected, right = one(expected, batch)
            assert abs(float(loss) - float(right)) < 1e-12
    assert len(step.last_plan.stages) == 2
    for a, b in zip(*(jax.tree.leaves(tree) for tree in (found, expected)), strict=True):
        if isinstance(b, jax.Array):
            np.testing.assert_allclose(np.asarray(a, float), np.asarray(b, float), atol=1e-12)
