"""The values of an update are split as the state that they belong to, not as other state of the same shape."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright.program.program import Program
from meshwright.runtime.stages.lowering.update_shardings import update_specs
from tests.runtime.stages.models import compared

SIZES = {"replicas": 2, "x": 2}
SPREAD, ROWS = ((), ("x", "replicas")), (("x",), ())


def square_step(state, batch):
    """Products with square weights, split by columns and by rows in turn; some are read transposed."""

    def loss(params):
        x = batch
        for up, down, turned in params:
            x = x + jnp.tanh(jnp.tanh(x @ up) @ down) @ turned.T
        return (x**2).mean()

    optimizer = optax.adam(1e-2)
    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, moments = optimizer.update(gradients, state["moments"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value


def init(_):
    draw = np.random.default_rng(0)
    params = [tuple(jnp.array(draw.normal(size=(32, 32)) / 8) for _ in range(3)) for _ in range(4)]
    return {"params": params, "moments": optax.adam(1e-2).init(params)}


@pytest.mark.sweep(1)
@pytest.mark.devices
@pytest.mark.parametrize("tensor", [1, 2])
def test_parameters_of_equal_shape_and_transposed_ones_are_reduced_as_planned(tensor):
    recipe = mw.ThreeD(pipeline=2, data=2, tensor=tensor, microbatch=4)
    batch = np.random.default_rng(1).normal(size=(16, 32))
    with jax.enable_x64(True):
        worst, step = compared(init, square_step, batch, recipe)
        plan = step.last_plan
        verified = plan.verify()
    assert worst < 1e-12
    specs = {t.spec for t in plan.stages[0].tensors if t.role == "optimizer" and t.shape}
    assert len(specs) == tensor  # or equal shapes are split alike, and this tests nothing
    for stage in verified.stages:
        over_replicas = [stage.collectives[kind, ("x",)] for kind in ("all_reduce", "all_gather")]
        assert all(pair.ratio == pytest.approx(1, abs=0.01) for pair in over_replicas)
        assert all(pair.planned for pair in stage.collectives.values())  # nothing else is sent


def specs_of(function, args, state):
    program = Program.of(jax.make_jaxpr(function)(*args))
    found = update_specs(program.operations, program.types, state, SIZES)
    return [found.get(value) for value in program.outputs]


def test_a_sharding_is_carried_along_dims_to_values_of_equally_many_elements():
    def update(moment, other, gradient):
        turned = gradient.T.reshape(2, 2, 4)
        return moment + turned.reshape(4, 4) * 2, other + gradient, gradient, turned, moment.sum(0), moment @ other

    args = [jnp.zeros((4, 4))] * 3
    new, _, gradient, turned, total, product = specs_of(update, args, ({0: SPREAD}, {0: SPREAD, 1: ROWS}))
    assert new == SPREAD
    assert gradient == (("x", "replicas"), ())  # it is transposed before it is added
    assert turned == ((), (), ("x", "replicas"))
    assert total is None  # of fewer elements
    assert product is None  # it sums over the dim that is split


def test_state_that_is_split_over_replicas_is_carried_first():
    def update(parameter, moment, gradient):
        return gradient, parameter - moment * gradient

    args = [jnp.zeros((8, 8))] * 3
    inner = ((), ("x",))
    assert specs_of(update, args, ({1: SPREAD}, {0: inner, 1: SPREAD}))[0] == SPREAD
    assert specs_of(update, args, ({}, {0: inner}))[0] == inner
    assert specs_of(update, [jnp.zeros((8, 2))] * 3, ({1: SPREAD}, {}))[0] is None  # two columns do not divide by four
