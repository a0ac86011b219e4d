"""Ordinary code of every kind is planned for CPUs and GPUs without a refinement failing, and runs as on one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.planning import plan_traced
from meshwright.runtime.spmd import spmd
from tests.compiling import QUICK

from .ordinary import PROGRAMS

pytestmark = pytest.mark.devices

# Those that no other test runs, as far as they compile quickly.
RUN = [
    *("a row by a traced integer", "rows in a loop", "negative and clamped", "nonzero of a size", "histogram", "truth"),
    *("unique of a size", "complex numbers", "whole numbers", "bits", "narrow floats", "sparse", "a custom reduction"),
    *(
        "a custom sort",
        "batched map",
        "a scan of nothing",
        "gradient of an rnn without a batch",
        "debugging",
        "a kernel",
    ),
    *("custom vjp with what is not differentiated", "custom jvp", "numbers alone", "nothing at all among the results"),
    *(
        "arrays without elements",
        "one array twice",
        "a constant result",
        "python state",
        "random keys",
        "several steps",
    ),
    *("lion", "an embedding of equinox", "a net of nnx"),
]


def traced(name):
    function, *args = PROGRAMS[name]()
    return function, args, trace(function, *args)


@pytest.mark.sweep(15)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in RUN])
def test_it_is_planned(name):
    _, _, found = traced(name)
    for cluster, mesh in (("1x4 h100", None), ("1x4 cpu", (2, 2))):
        plan = plan_traced(found, cluster, mesh, mw.Auto())
        assert plan.remarks == () and plan.solution.lower_bound <= plan.cost.total * (1 + 1e-12)
        assert str(plan.mesh.sizes[0]) in str(plan)


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", RUN)
def test_it_runs_as_on_one_device(name):
    function, args, found = traced(name)
    assert plan_traced(found, "1x4 h100", None, mw.Auto()).remarks == ()
    plan = plan_traced(found, "1x4 cpu", (2, 2), mw.Auto())
    expected = jax.jit(function, compiler_options=QUICK)(*args) if "equinox" not in name else function(*args)
    got = spmd(plan, function)(*args)
    for one, many in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(numbers(many), numbers(one), rtol=2e-4, atol=2e-4)


def numbers(leaf):
    is_key = jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf).astype(complex)


def test_a_function_without_products_has_a_pipeline_of_nothing():
    function, *args = PROGRAMS["arrays without elements"]()
    assert mw.plan(function, *args, cluster="1x4 h100", method=mw.Auto(pipeline=True)).stages == ()
