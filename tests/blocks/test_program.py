"""Segments as programs of their own: the same blocks, the same numbers, and nothing that they do not need."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.blocks.program import segment_program


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"checkpoint": True}, {"scan": True}, {"scan": True, "checkpoint": True}])
@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_a_segment_alone_has_the_blocks_that_it_has_in_the_program(name, options):
    model = zoo.build(name, layers=4, **options)
    found = mw.find_blocks(model.train_step, model.state, model.batch)
    for segment in found.segments:
        program = segment_program(found.graph, segment.operations)
        alone = mw.find_blocks(program.function, *program.types)
        assert [len(block.choices) for block in alone.blocks] == list(segment.choices)
        assert [len(block.contractions) for block in alone.blocks] == [
            len(found.blocks[number].contractions) for number in segment.blocks
        ]


def test_nothing_of_the_size_of_attention_crosses_the_border_of_a_layer():
    model = zoo.build("gpt-tiny", layers=4)
    found = mw.find_blocks(model.train_step, model.state, model.batch)
    program = segment_program(found.graph, found.segments[1].operations)
    shapes = [found.graph.types[value].shape for value in (*program.inputs, *program.outputs)]
    assert shapes.count((8, 32, 64)) <= 8
    assert all(shape[:1] != (8,) or shape == (8, 32, 64) for shape in shapes)


def test_what_is_recomputed_is_computed_twice():
    weights, x = jnp.ones((16, 16)), jnp.ones((8, 16))

    def loss(weights, x):
        for _ in range(3):
            x = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))(weights, x)
        return jnp.sum(x)

    found = mw.find_blocks(jax.value_and_grad(loss), weights, x)
    program = segment_program(found.graph, range(len(found.graph.ops)))
    alone = mw.find_blocks(program.function, *program.types)
    for one in (found, alone):
        products = [op for op in one.graph.ops if op.primitive == "dot_general"]
        assert sum(op.recomputed for op in products) >= 3
        assert len(one.blocks) == 6


def test_a_program_of_all_operations_computes_what_the_function_does():
    def loss(weights, x):
        hidden = jax.nn.relu(x @ weights["up"]) * jnp.arange(8.0)[:, None]
        return jnp.mean(jnp.square(hidden @ weights["down"]))

    step = jax.value_and_grad(loss)
    weights = {"up": jnp.ones((4, 16)) * 0.1, "down": jnp.arange(32.0).reshape(16, 2)}
    x = jnp.arange(32.0).reshape(8, 4)
    found = mw.find_blocks(step, weights, x)
    program = segment_program(found.graph, range(len(found.graph.ops)))
    leaves = jax.tree.leaves((weights, x))
    given = {v: leaves[found.graph.inputs.index(v)] for v in program.inputs if v in found.graph.inputs}
    assert given.keys() == set(program.inputs)
    made = dict(zip(program.outputs, program.function(*given.values()), strict=True))
    for value, expected in zip(found.graph.outputs, jax.tree.leaves(step(weights, x)), strict=True):
        np.testing.assert_allclose(made[value], expected, rtol=1e-6)
