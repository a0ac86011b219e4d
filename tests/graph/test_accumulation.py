"""Sums that loops add up: found through conversions, transposes, stacks and inner loops, and nowhere else."""

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.graph import trace
from meshwright.graph.accumulation import find_accumulated

X = jax.ShapeDtypeStruct((4, 8, 6), jnp.bfloat16)
W = jax.ShapeDtypeStruct((6, 5), jnp.float32)


def found(function, *args):
    graph = trace(function, *args).graph
    accumulated = find_accumulated(graph)
    return {graph.ops[i].primitive: item for i, item in accumulated.items()}, graph


def test_a_carry_that_is_only_added_to():
    def function(x):
        def step(total, part):
            return total + jnp.transpose(part.T @ part).astype(jnp.float32), None

        return lax.scan(step, jnp.zeros((6, 6)), x)[0] * 2

    items, graph = found(function, X)
    assert set(items) == {"dot_general"}
    item = items["dot_general"]
    assert item.trips == 1 and item.growth == 2  # bfloat16 is added up in float32
    names = [graph.ops[i].primitive for i in item.chain]
    assert names[-2:] == ["add", "loop_carry"] and set(names[:-2]) <= {"convert_element_type", "transpose"}
    assert (item.start, item.stop) in graph.loops


def test_sums_of_inner_loops_and_stacks_of_them():
    def function(x):
        def outer(total, part):
            _, stacked = lax.scan(lambda c, row: (c, row[:, None] * row @ jnp.ones((6, 6))), 0.0, part)
            return total + stacked, None

        return lax.scan(outer, jnp.zeros((8, 6, 6)), x.astype(jnp.float32))[0]

    items, graph = found(function, X)
    item = items["dot_general"]
    assert "loop_stack" in [graph.ops[i].primitive for i in item.chain]
    assert item.trips == 1 and item.growth == 8


def test_what_is_read_otherwise_is_no_sum():
    def used(x):
        return lax.scan(lambda c, p: (c + p @ p.T, c.sum()), jnp.zeros((8, 8), jnp.bfloat16), x)

    def scaled(x):
        return lax.scan(lambda c, p: (0.9 * c + p @ p.T, None), jnp.zeros((8, 8), jnp.bfloat16), x)

    def shown(x):
        def step(c, p):
            product = p @ p.T
            return c + product, product

        return lax.scan(step, jnp.zeros((8, 8), jnp.bfloat16), x)

    for function in (used, scaled, shown):
        assert not found(function, X)[0], function


def test_a_program_without_loops():
    assert not found(lambda x, w: x[0].astype(jnp.float32) @ w, X, W)[0]
