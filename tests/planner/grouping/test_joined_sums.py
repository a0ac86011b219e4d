"""Sums that are added to one another are settled once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.grouping.groups import Grouping
from tests.graph.examples import shaped
from tests.planner.examples import all_reduce, mesh, traced_zoo

ROWS, WIDTH = 4, 64


X, W = shaped(ROWS, WIDTH), shaped(WIDTH, WIDTH)


def joins(function, *args):
    """The primitives of leading operations that may join others, and how many hand each on."""
    grouping = Grouping(trace(function, *args).graph)
    ops, joining = grouping.graph.ops, grouping.joining
    for leader, addition in joining.joins.items():
        assert joining.joints[addition] == leader
        assert addition in joining.paths[grouping.groups[int(grouping.placed.group[addition])].leader]
    return [(ops[leader].primitive, len(joining.paths[leader])) for leader in joining.joins]


def test_products_that_are_added_up_join_one_after_the_other():
    assert joins(lambda x, y, z, w: x @ w + y @ w + z @ w, X, X, X, W) == [("dot_general", 1), ("dot_general", 2)]
    assert joins(lambda x, y, w: x @ w + (y @ w).T.reshape(ROWS, WIDTH), X, X, W) == [("dot_general", 1)]
    narrow = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in (X, X, W)]
    assert joins(lambda x, y, w: (x @ w).astype("float32") + (y @ w).astype("float32"), *narrow) == [("dot_general", 2)]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, w: (z := x @ w, z + y @ w),  # read twice
        lambda x, y, w: jnp.tanh(x @ w) + y @ w,  # not linear
        lambda x, y, w: (x @ w).astype("bfloat16") + (y @ w).astype("bfloat16"),  # rounds what is yet to be added up
        lambda x, y, w: x + y @ w,  # no sum
        lambda x, y, w: (z := x @ w) + z,
        lambda x, y, w: (
            jax.lax.scan(lambda c, a: (c + a @ w, None), y, x.reshape(2, 2, WIDTH))[0] if y.shape[0] == 2 else x * 2
        ),
    ],
)
def test_what_is_read_otherwise_joins_nothing(function):
    assert joins(function, X, X, W) == []


def test_in_a_layer_of_llama_queries_keys_and_values_join_and_so_do_gate_and_up():
    grouping = Grouping(traced_zoo("llama-tiny", layers=3).graph)
    backward = [grouping.graph.ops[leader].phase for leader in grouping.joining.joins]
    assert backward == ["backward"] * 3 * 3


def branches(params, x):
    """Two products of one value, as the gate and the up-projection of a gated layer are."""
    hidden = jnp.tanh(x @ params["first"])
    gated = jax.nn.sigmoid(hidden @ params["gate"]) * (hidden @ params["up"])
    return jnp.sum((gated @ params["down"]) ** 2)


def test_a_gated_layer_split_over_columns_settles_the_gradient_of_its_operand_once():
    params, columns = dict.fromkeys(("first", "gate", "up", "down"), W), P(None, "x")
    fix = {"params/first": P(), "params/gate": columns, "params/up": columns, "params/down": P("x"), "x": P()}
    plan = mw.plan(jax.grad(branches), params, X, mesh=mesh((4,)), method=mw.Manual(fix))
    settled = [c for c in plan.collectives if c.phase == "backward" and c.purpose == "activation"]
    assert [c.bytes for c in settled] == [ROWS * WIDTH * 4]
    assert sum(c.seconds for c in plan.collectives) == pytest.approx(plan.cost.communication)


def test_a_tied_table_is_summed_once():
    """Its gradient is that of the looking up and that of the product with it."""

    def step(table, tokens):
        def loss(table):
            return jnp.sum(jax.nn.log_softmax(table[tokens] @ table.T)[:, 0])

        return table - jax.grad(loss)(table)

    tokens = jax.ShapeDtypeStruct((64,), jnp.int32)
    plan = mw.plan(step, shaped(16, 8), tokens, mesh=mesh((4,)), method=mw.DataParallel())
    assert plan.cost.communication == pytest.approx(all_reduce(16 * 8 * 4, 4))


def test_what_is_saved_is_what_settling_alone_costs():
    formulation = mw.plan(
        jax.grad(branches), dict.fromkeys(("first", "gate", "up", "down"), W), X, mesh=mesh((2, 2))
    ).details.back.formulation
    saved = [formulation.joined_s(*key) for key in formulation.edges]
    assert any(matrix is not None and matrix.any() for matrix in saved)
    for key, matrix in zip(formulation.edges, saved, strict=True):
        if matrix is not None:
            source = formulation.tables[key[0]]
            assert (matrix <= source.communication[:, None]).all()
            np.testing.assert_allclose(formulation.edges[key][1], formulation.resharding_s(*key) - matrix)
