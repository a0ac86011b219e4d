"""Liveness on CPUs: every kernel finds what it reads, in an order that XLA would choose."""

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright.graph import trace
from meshwright.graph.cpu_liveness import cpu_liveness
from meshwright.graph.kernels import Kernels
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
    assert sorted(live.step) == list(range(len(graph.ops)))
    assert (live.last >= live.step).all()
    inside = {i: loop for loop in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]) for i in range(*loop)}
    for index, values in Kernels(graph, nests).reads.items():
        if not any(live.stored[v] for v in graph.ops[index].outputs):
            continue  # nobody needs it, or its result takes an argument's place
        for value in values:
            made = graph.producer.get(value, -1)
            carried = index in inside and made in range(*inside[index])  # from trip to trip
            assert carried or live.start[value] <= live.step[index] < live.stop[value]


def test_nothing_to_run():
    graph, _, live = live_of(lambda x: x, jax.ShapeDtypeStruct((4,), jnp.float32))
    assert live.num_steps == len(graph.ops) == 0
