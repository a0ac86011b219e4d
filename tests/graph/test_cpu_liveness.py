"""Liveness on CPUs: every kernel finds what it reads, in the order in which XLA runs them."""

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright.graph import trace
from meshwright.graph.cpu_liveness import cpu_liveness
from meshwright.graph.kernels import Kernels
from meshwright.graph.simplified import Split
from meshwright.rules import loop_nest

MODELS = [("mlp", {}), ("llama-tiny", {}), ("llama-tiny", {"scan": True, "checkpoint": True}), ("moe-tiny", {})]


def live_of(function, *args):
    graph = trace(function, *args).graph
    nests = [loop_nest(op.signature) for op in graph.ops]
    return graph, nests, cpu_liveness(graph, nests)


@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_every_kernel_finds_what_it_reads(name, options):
    example = zoo.build(name, batch=16, dtype="float32", **options)
    graph, nests, live = live_of(example.train_step, example.state, example.batch)
    times = [*live.step.tolist(), *(copy.start for copy in live.copies)]
    assert sorted(times) == list(range(live.num_steps))
    assert (live.last >= live.step).all() and all(copy.start < copy.stop for copy in live.copies)
    inside = {i: loop for loop in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]) for i in range(*loop)}
    kernels = Kernels(graph, nests)
    for index, values in kernels.reads.items():
        if index >= len(graph.ops):
            continue  # a copy
        if not any(live.stored[v] for v in graph.ops[index].outputs):
            continue  # nobody needs it, or its result takes an argument's place
        for value in (v for v in values if v < len(live.stored)):
            made = graph.producer.get(value, -1)
            carried = index in inside and made in range(*inside[index])  # from trip to trip
            taken = value in kernels.in_place.get(index, ()) and live.stop[value] == live.step[index]
            assert carried or taken or live.start[value] <= live.step[index] < live.stop[value]


def test_nothing_to_run():
    graph, _, live = live_of(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32))
    assert live.num_steps == len(graph.ops) == 0


def test_a_result_that_does_the_same_as_another_operation_has_a_time_of_its_own():
    """As the norm of gradients that is clipped by, and returned as a metric."""

    def function(x):
        return x / jnp.sum(x * x), jnp.sum(x * x)

    _, _, live = live_of(function, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    times = [*live.step.tolist(), *(copy.start for copy in live.copies)]
    assert sorted(times) == list(range(live.num_steps))


def test_an_elementwise_result_takes_the_place_of_what_it_is_made_from():
    def function(x):
        y = x @ x
        return jnp.sum(jnp.sin(y) @ x)

    graph, _, live = live_of(function, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    product, sine = (next(op.outputs[0] for op in graph.ops if op.primitive == name) for name in ("dot_general", "sin"))
    assert live.stop[product] == live.start[sine]


def test_what_a_loop_adds_up_is_there_from_its_first_trip_and_added_to_in_place():
    def function(x):
        return jax.lax.fori_loop(0, 4, lambda i, total: total + jnp.sin(x @ x), jnp.zeros((64, 64)))

    graph, _, live = live_of(function, jax.ShapeDtypeStruct((64, 64), jnp.float32))
    first, end = graph.loops[-1]
    tie = next(t for t in graph.ties if graph.types[t.carry].shape == (64, 64))
    assert live.start[tie.carry] == live.step[first:end].min() and live.stop[tie.carry] > live.step[first:end].max()
    assert not live.stored[tie.made]


def test_gradients_that_are_reduced_wait_for_one_another():
    def loss(params, x):
        for w in params:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    weights = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 3
    graph, nests, live = live_of(jax.grad(loss), weights, jax.ShapeDtypeStruct((64, 32), jnp.float32))
    sums = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general" and op.phase == "backward"]
    sums = [i for i in sums if graph.types[graph.ops[i].outputs[0]].shape == (32, 32)]
    settled = cpu_liveness(graph, nests, Split(dict.fromkeys(sums, "x")))
    assert len(sums) == 3 and settled.num_reductions == 1 and settled.num_steps == live.num_steps + 1
    (time,) = set(settled.reduced_at.values())
    assert set(settled.reduced_at) == set(sums) and time > settled.step[sums].max()


def test_a_literal_zero_is_told_from_other_constants_by_its_place():
    _, _, live = live_of(lambda w, i: w[i] + w[jnp.int32(0) + 0], jax.ShapeDtypeStruct((8, 8), jnp.float32), 3)
    assert live.num_steps > 0
