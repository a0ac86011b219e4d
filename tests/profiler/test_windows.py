"""Probes of convolutions: they count what the rule for convolutions counts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.graph import trace
from meshwright.profiler.probes import window_probe
from meshwright.rules import loop_nest


@pytest.mark.parametrize("batch, side, inputs, outputs, window, stride", [(2, 8, 3, 4, 7, 2), (1, 9, 16, 8, 3, 1)])
def test_a_probe_counts_as_the_rule_does(batch, side, inputs, outputs, window, stride):
    def convolve(image, kernel):
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(image, kernel, (stride, stride), "SAME", dimension_numbers=layout)

    probe = window_probe(1, batch, side, inputs, outputs, window, stride)
    image = jax.ShapeDtypeStruct((batch, side, side, inputs), jnp.float32)
    kernel = jax.ShapeDtypeStruct((window, window, inputs, outputs), jnp.float32)
    (op,) = trace(convolve, image, kernel).graph.ops
    nest = loop_nest(op.signature)
    assert (probe.amount, probe.flops) == (nest.num_fetches, nest.flops)


def test_a_probe_runs_for_any_number_of_trips():
    program = window_probe(8, 1, 6, 2, 3, 3, 2).compile()
    first = [np.asarray(array) for array in program(0)]
    assert [array.shape for array in first] == [(8, 6, 6, 2), (24, 3, 2, 3), (8, 3, 3, 3)]
    assert not first[2].any() and all(np.isfinite(array).all() for array in program(3))
