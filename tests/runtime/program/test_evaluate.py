"""What a plan becomes in the program: constraints where XLA needs them, and no others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.spmd import spmd
from tests.draws import normal
from tests.runtime.test_spmd import run_once

pytestmark = pytest.mark.devices

CLUSTER = "1x8 cpu"


def num_constraints(plan, function, *args):
    return spmd(plan, function).lower(*args).as_text().count("sdy.sharding_constraint")


def chain(length):
    """Two products with elementwise work between them, which a product and a sum read as well."""

    def function(x, w1, w2):
        hidden = x @ w1
        for _ in range(length):
            hidden = jnp.tanh(hidden) * 0.5 + hidden
        return hidden @ w2, hidden.sum(axis=0), hidden

    return function, (jnp.ones((64, 32)), jnp.ones((32, 128)), jnp.ones((128, 32)))


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize("method", [mw.DataParallel(), mw.Zero(3), mw.Auto()])
def test_elementwise_work_needs_no_constraints_of_its_own(shape, method):
    counts = []
    for length in (1, 9):
        function, args = chain(length)
        plan = mw.plan(function, *args, cluster=CLUSTER, mesh=shape, method=method)
        counts.append(num_constraints(plan, function, *args))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("shape", [(8,), (2, 4), (2, 2, 2)])
def test_what_is_not_laid_down_sends_nothing_that_was_not_planned(shape):
    function, args = chain(5)
    args = tuple(normal(*x.shape, seed=i) for i, x in enumerate(args))
    plan = mw.plan(function, *args, cluster=CLUSTER, mesh=shape)
    results, sent = run_once(plan, function, *args)
    assert sum(pair.compiled for pair in sent) == sum(pair.planned for pair in sent)
    for one, many in zip(jax.jit(function)(*args), results, strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-4, atol=1e-4)


def test_a_loop_reads_and_gives_values_as_planned_where_they_come_from_elementwise_work():
    def function(x, w):
        def step(carry, _):
            return jnp.tanh(carry @ w) * scale + carry, jnp.exp(carry) * 2.0

        scale = jnp.exp(x) + 1.0
        last, stacked = jax.lax.scan(step, jnp.sin(x) * 2.0, length=3)
        return last + 1.0, stacked

    args = normal(16, 32), normal(32, 32, seed=1)
    plan = mw.plan(function, *args, cluster=CLUSTER, mesh=(2, 4))
    for one, many in zip(function(*args), spmd(plan, function)(*args), strict=True):
        np.testing.assert_allclose(one, many, rtol=1e-4, atol=1e-4)


def test_what_some_reader_wants_otherwise_is_laid_down_for_all_of_them():
    """Of a value that is constrained twice in a row, XLA's propagation hands the last to all readers."""
    example = zoo.build("bert-tiny", batch=16)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster=CLUSTER, mesh=(8,))
    text = spmd(plan, example.train_step).lower(example.state, example.batch).as_text()
    found = re.findall(r"(%\d+) = sdy.sharding_constraint (%\w+) <@mesh, (.*)> :", text)
    before = {name: (value, spec) for name, value, spec in found}
    moved = [before[value][0] for _, value, spec in found if value in before and before[value][1] != spec]
    assert moved
    for value in moved:
        assert len(re.findall(rf"{value}\b(?!\s*=)", text)) == 1, value
