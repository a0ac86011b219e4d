"""A sample of the strangers of `benchmarks/strangers`, tiny: each runs split over 8 devices as on one.

`python benchmarks/strangers_on_cpus.py split` runs all of them.
"""

import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import meshwright as mw

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
pytest.importorskip("equinox")
pytest.importorskip("haiku")
strangers = pytest.importorskip("strangers")

SAMPLE = ["dropless_experts", "graph_convolution", "long_scan", "mixture_density"]


def test_half_of_the_corpus_is_set_aside():
    told = [one.is_told for one in strangers.corpus().values()]
    assert len(told) >= 40 and 0.4 < sum(told) / len(told) < 0.6


@pytest.mark.sweep(2)
@pytest.mark.devices
@pytest.mark.parametrize("name", SAMPLE)
def test_a_stranger_runs_split_as_on_one_device(name):
    program = strangers.corpus()[name].tiny()
    state, batch = jax.jit(program.init)(jax.random.key(0)), jax.jit(program.sample)(jax.random.key(1))
    alone = program.step(jax.tree.map(lambda x: x + 0, state), batch)[1]
    step = mw.parallelize(program.step, cluster="1x8 cpu")
    assert step.plan(state, batch).verify().flops.ratio > 0.9  # XLA multiplies ragged rows with every matrix
    np.testing.assert_allclose(float(step(state, batch)[1]), float(alone), rtol=0.03)
