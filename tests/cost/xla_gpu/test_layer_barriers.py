"""Barriers between the layers of a backward pass: where they are, and which gradients pass them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.cost.xla_gpu.liveness import liveness
from meshwright.graph.phases import BACKWARD
from tests.graph.examples import shaped, traced


def residual_step(checkpoint=False, layers=4, scan=False, rows=256):
    """A train step over residual layers of two products each, and the shapes of its arguments."""

    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"]

    run = jax.checkpoint(layer) if checkpoint else layer

    def loss(params, x):
        if scan:
            return jnp.mean(lax.scan(lambda x, weights: (run(x, weights), None), x, params)[0] ** 2)
        for weights in params:
            x = run(x, weights)
        return jnp.mean(x**2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    shape = {"up": (8, 32), "down": (32, 8)}
    if scan:
        return step, {name: shaped(layers, *dims) for name, dims in shape.items()}, shaped(rows, 8)
    return step, [{name: shaped(*dims) for name, dims in shape.items()} for _ in range(layers)], shaped(rows, 8)


def barriers_of(function, *args):
    """The graph, and for each place of a barrier the operations whose results pass there."""
    graph, nests = traced(function, *args)
    live = liveness(graph, nests, barriers=True)
    places = {}
    for index in np.flatnonzero(live.barriers >= 0).tolist():
        places.setdefault(int(live.barriers[index]), []).append(graph.ops[index])
    return graph, live, places


@pytest.mark.parametrize("checkpoint", [False, True])
def test_each_barrier_has_what_a_layer_hands_on_and_the_gradients_from_before_the_last_barrier(checkpoint):
    graph, live, places = barriers_of(*residual_step(checkpoint))
    order, gradients = sorted(places), []
    assert len(order) >= 4 - 1  # between four layers
    for number, place in enumerate(order):
        passing = np.flatnonzero(live.barriers == place).tolist()
        handed_on = [i for i in passing if graph.types[graph.ops[i].outputs[0]].shape == (256, 8)]
        assert len(handed_on) == 1 and handed_on[0] < place
        assert number == 0 or handed_on[0] >= order[number - 1]
        for index in set(passing) - set(handed_on):
            gradients.append(graph.types[graph.ops[index].outputs[0]].shape)
            assert graph.ops[index].phase == BACKWARD
            assert number and index < order[number - 1] and (number == 1 or index >= order[number - 2])
    assert {(8, 32), (32, 8)} == set(gradients) and len(gradients) >= 4


def test_gradients_run_before_their_barrier():
    graph, live, _ = barriers_of(*residual_step())
    nests = traced(*residual_step())[1]
    free = liveness(graph, nests).runs
    products = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general" and free[i] > i]
    assert len(products) == 8
    ended = [i for i in products if live.runs[i] < free[i]]
    assert len(ended) >= 4  # those of the last layers have no barrier after them
    ends = {op.outputs[0]: int(live.barriers[i]) for i, op in enumerate(graph.ops) if live.barriers[i] >= 0}
    for index in ended:
        assert int(live.runs[index]) in ends.values()


def test_where_gradients_are_larger_than_what_they_wait_with_there_are_no_barriers():
    graph, live, places = barriers_of(*residual_step(rows=1))
    assert places == {} and (live.runs == liveness(graph, traced(*residual_step(rows=1))[1]).runs).all()


def test_without_barriers_nothing_passes_one():
    graph, nests = traced(*residual_step())
    assert (liveness(graph, nests).barriers == -1).all()


def test_a_forward_pass_and_a_scan_of_small_layers_have_none_outside_the_scan():
    step, params, x = residual_step(scan=True)
    graph, _, places = barriers_of(step, params, x)
    loops = [range(*loop) for loop in graph.loops]
    assert all(any(place in loop for loop in loops) for place in places)
    _, _, places = barriers_of(lambda params, x: params["up"].sum() + x.sum(), params, x)
    assert places == {}


def test_values_pass_only_inside_the_loop_that_makes_them():
    """A step in parts of the batch: layers that are not scanned, inside a loop."""

    def step(params, batch):
        def loss(params, x):
            for weights in params:
                x = x + jnp.tanh(x @ weights["up"]) @ weights["down"]
            return jnp.mean(x**2)

        def part(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(params, x)), None

        grads = lax.scan(part, jax.tree.map(jnp.zeros_like, params), batch)[0]
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    _, params, _ = residual_step()
    graph, live, places = barriers_of(step, params, shaped(2, 256, 8))
    (loop,) = [range(*loop) for loop in graph.loops]
    assert len(places) >= 3
    for index in np.flatnonzero(live.barriers >= 0).tolist():
        assert index in loop and int(live.barriers[index]) in loop
