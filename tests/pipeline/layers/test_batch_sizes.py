"""Microbatches of any size from two traces: the same types and loop nests as tracing would give."""

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright.graph import trace
from meshwright.pipeline.layers.batch_sizes import ResizableBatch
from meshwright.rules import loop_nest

pytestmark = pytest.mark.slow


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "rows"), [("llama-tiny", 2), ("gpt-tiny", 4), ("vit-tiny", 2), ("mixtral-tiny", 4)])
def test_what_is_resized_is_what_tracing_gives(name, rows):
    example, other = zoo.build(name, batch=8), zoo.build(name, batch=rows)
    found = ResizableBatch(trace(example.train_step, example.state, example.batch))
    traced = trace(other.train_step, other.state, other.batch).graph
    assert found.batch == 8
    graph, nests = found.at(rows)
    assert graph.types == traced.types
    for mine, theirs in zip(graph.ops, traced.ops, strict=True):
        assert mine.signature.results == theirs.signature.results
    numbers = zip(graph.columns.signature.tolist(), traced.columns.signature.tolist(), strict=True)
    for mine, theirs in set(numbers):
        expected = loop_nest(traced.columns.signatures[theirs])
        assert nests[mine].loops == expected.loops
        assert nests[mine].flops == pytest.approx(expected.flops)


def test_a_function_of_one_batch_only_is_not_resized():
    def step(x):
        return x.reshape(4, 2, 3).sum() if x.shape[0] == 8 else jnp.sin(x).sum()

    rows = ResizableBatch(trace(lambda x, w: step(x) * w, jnp.ones((8, 3)), jnp.ones((9, 9))))
    assert not rows.resizes
    assert rows.at(4) is None
    assert rows.at(rows.batch) is not None


def test_arrays_without_elements_are_no_obstacle():
    def step(w, x):
        return w - jax.grad(lambda w: jnp.tanh(jnp.concatenate([x, x[:, :0]], axis=1) @ w).sum())(w)

    rows = ResizableBatch(trace(step, jnp.ones((3, 3)), jnp.ones((8, 3))))
    graph, _ = rows.at(2)
    assert (2, 0) in {kind.shape for kind in graph.types}


def test_a_function_without_a_batch_has_one_row():
    rows = ResizableBatch(trace(lambda: jax.numpy.ones(3) * 2))
    assert rows.batch == 1
    assert not rows.resizes
