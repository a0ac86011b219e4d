"""Traced programs as lists of operations: which of them must run for some values."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright import jax_compat
from meshwright.runtime.microbatches.units import Units


def test_of_a_loop_over_layers_runs_only_what_leads_to_the_values_that_are_needed():
    def stack(x, scales, weights):
        """Layers, and their scales as the backward pass reads them, which need neither examples nor weights."""
        return lax.scan(lambda x, layer: ((x * layer[0]) @ layer[1], layer[0][None]), x, (scales, weights))

    x, scales, weights = jnp.ones((2, 3)), jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3, 3))
    program = Units.of(jax.make_jaxpr(stack)(x, scales, weights))
    last, wide = program.outputs
    (loop,) = program.needed([wide])
    assert (loop.ins, loop.outs) == ((1,), (wide,))
    np.testing.assert_array_equal(jax_compat.bind(loop.eqn, [scales], loop.stack)[0], scales[:, None])
    (whole,) = program.needed([last, wide])
    assert whole is program.units[-1] and set(whole.ins) >= {0, 1, 2}
