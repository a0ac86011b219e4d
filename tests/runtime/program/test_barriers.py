"""Barriers between layers: the program has them where the plan says so, and computes what one device computes."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.plan_files.stored_operations import ops_to_json, parse_ops
from meshwright.runtime.spmd import spmd
from tests.draws import normal
from tests.runtime.test_spmd import assert_same

pytestmark = pytest.mark.devices

LAYERS = 4
QUICK = mw.Mesh.abstract((8,), alpha=0.0, beta=1e-9)  # reductions take less time than products, so gradients wait


def step(params, batch):
    """Layers of two products, whose weights are cast and which are recomputed; the first one's are used twice."""

    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"].astype("bfloat16").astype("float32")) @ weights["down"]

    def loss(params):
        x = batch
        for weights in [*params, params[0]]:
            x = jax.checkpoint(layer)(x, weights)
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments():
    params = [
        {"up": normal(16, 64, seed=2 * n, scale=0.1), "down": normal(64, 16, seed=2 * n + 1, scale=0.1)}
        for n in range(LAYERS)
    ]
    return params, normal(512, 16, seed=2 * LAYERS)


@pytest.mark.parametrize("method", [mw.Zero(stage=3), mw.DataParallel()], ids=lambda method: method.name)
def test_a_program_has_the_planned_barriers_and_the_numbers_of_one_device(method):
    args = arguments()
    plan = mw.plan(step, *args, mesh=QUICK, method=method)
    places = {op.serial + op.barrier for op in plan.ops if op.barrier}
    assert len(places) >= LAYERS - 2  # the first layer is used twice
    program = spmd(plan, step).lower(*args)
    bare = replace(plan, details=NoBarriers(plan))
    more = [text.count("optimization_barrier") for text in (program.as_text(), spmd(bare, step).lower(*args).as_text())]
    assert more[0] - more[1] == len(places)
    assert_same(jax.jit(step)(*args), spmd(plan, step)(*args), 5)


class NoBarriers:
    """The details of a plan, without its barriers."""

    def __init__(self, plan):
        self.ops = tuple(replace(op, barrier=0) for op in plan.ops)
        self.collectives = plan.collectives
        self.make_form = plan.details.make_form


def test_barriers_are_saved_with_the_plan():
    plan = mw.plan(step, *arguments(), mesh=QUICK, method=mw.Zero(stage=3))
    assert any(op.barrier for op in plan.ops)
    assert parse_ops(ops_to_json(plan.ops), plan.mesh.names, "operations") == plan.ops


def test_gradients_that_no_device_shares_pass_no_barrier():
    plan = mw.plan(step, *arguments(), mesh=mw.Mesh.abstract((1,), alpha=0.0, beta=1e-9))
    assert not any(op.barrier for op in plan.ops)
