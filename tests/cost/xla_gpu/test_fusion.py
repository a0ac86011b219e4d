"""Fusion for accelerators: which values stay in memory, and which take the place of others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.cost.xla_gpu.dim_orders import Orders
from meshwright.cost.xla_gpu.fusion import _read_in_place, fuse
from meshwright.cost.xla_gpu.liveness import liveness
from meshwright.graph.facts import Facts
from meshwright.planner.grouping.groups import Grouping
from tests.graph.examples import shaped, traced
from tests.planner.examples import traced_zoo


def fused(function, *args):
    graph, nests = traced(function, *args)
    return graph, fuse(Facts(graph, nests)), liveness(graph, nests)


def made_by(graph, primitive):
    return [op.outputs[0] for op in graph.ops if op.primitive == primitive]


NARROW, WIDE = (jax.ShapeDtypeStruct((8, 8), dtype) for dtype in (jnp.bfloat16, jnp.float32))


@pytest.mark.parametrize("name", ["exp", "exp2", "logistic", "sqrt", "rsqrt", "div"])
def test_a_gpu_has_instructions_for_some_functions_and_does_them_again(name):
    def function(x, w):
        y = x @ w
        many = y / (y + 2) if name == "div" else getattr(lax, name)(y)
        return many.sum(0), many @ w, many * 2

    def only_reduced(x, w):
        return function(x, w)[::2]

    graph, found, _ = fused(only_reduced, WIDE, WIDE)
    (many,) = made_by(graph, name)
    assert found.stored[many] and not found.kept[many]
    graph, found, _ = fused(function, WIDE, WIDE)
    assert found.kept[made_by(graph, name)[0]]  # the product reads it


def test_other_costly_functions_are_done_once():
    def function(x, w):
        y = jnp.tanh(x @ w)
        return y.sum(0), y * 2

    graph, found, _ = fused(function, WIDE, WIDE)
    assert found.kept[made_by(graph, "tanh")[0]]


def test_a_gather_takes_in_what_it_reads():
    def function(x, w, i):
        logits = (x @ w).astype(jnp.float32)
        return jnp.take_along_axis(logits, i[:, None], axis=-1), logits.sum(0)

    graph, found, _ = fused(function, NARROW, NARROW, jax.ShapeDtypeStruct((8,), jnp.int32))
    assert not found.kept[made_by(graph, "convert_element_type")[0]]
    assert found.kept[made_by(graph, "dot_general")[0]]


def attention(groups):
    """What softmax is in attention: its scores come and its weights go through products, forward and backward."""

    def loss(q, k):
        scores = jnp.einsum("bqngh,bknh->bngqk", q, k)
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.sum(jnp.einsum("bngqk,bknh->bqngh", weights, k).astype(jnp.float32))

    kinds = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 8, 3, groups, 4), (2, 8, 3, 4))]
    return jax.value_and_grad(loss, argnums=(0, 1)), *kinds


@pytest.mark.parametrize("groups", [1, 5])
def test_what_products_must_transpose_each_in_its_own_way_is_made_for_each(groups):
    graph, found, live = fused(*attention(groups))
    converted = made_by(graph, "convert_element_type")
    (weights,) = [v for v in converted if graph.types[v].dtype == "bfloat16" and graph.types[v].shape[-2:] == (8, 8)][
        :1
    ]
    readers = [i for i, op in enumerate(graph.ops) if weights in op.inputs]
    assert found.stored[weights]
    assert found.kept[weights] == (groups == 1)  # keys of one query lie as the product made them
    assert found.apart == ([] if groups == 1 else [(weights, i) for i in readers])
    times = live.copies.start[live.copies.value == weights].tolist()
    assert times == ([] if groups == 1 else readers)


def test_an_order_of_dims_is_followed_through_elementwise_work_and_transposes():
    def function(x, y, z):
        product = jnp.einsum("abi,cbi->bac", x, y)
        moved = jnp.transpose(jnp.exp(product) * 2, (2, 0, 1))
        return moved, moved + z, jnp.where(z > 0, moved, 0.0) - lax.broadcasted_iota(jnp.float32, (6, 3, 2), 0)

    graph, nests = traced(function, shaped(2, 3, 5), shaped(6, 3, 5), shaped(6, 3, 2))
    orders = Orders(Facts(graph, nests))
    moved, with_argument, _ = graph.outputs
    assert orders.of(made_by(graph, "mul")[0]) == (0, 1, 2)
    assert orders.of(moved) == (1, 2, 0)
    assert orders.of(with_argument) is None  # the argument lies otherwise
    assert orders.of(made_by(graph, "iota")[0]) == ()


def test_orders_of_many_dims_are_unclear():
    def function(x, y):
        return jnp.transpose(jnp.exp(x * 2) + y.reshape(x.shape), (*range(1, 17), 0))

    graph, nests = traced(function, shaped(*[2] * 17), shaped(2**17))
    assert Orders(Facts(graph, nests)).of(graph.outputs[0]) is None


def test_an_elementwise_kernel_writes_over_what_it_reads_last():
    def function(x, w):
        y = x @ w
        z = (y * 2 + x) @ w
        return z @ w

    graph, _, live = fused(function, WIDE, WIDE)
    first, (added,) = made_by(graph, "dot_general")[0], made_by(graph, "add")
    assert live.stop[first] == live.start[added]


@pytest.mark.parametrize("otherwise", ["read later", "transposed", "narrower", "reduced"])
def test_no_kernel_writes_over_what_is_needed_elsewhere(otherwise):
    def function(x, w):
        y = x @ w
        if otherwise == "transposed":
            return (y.T + x) @ w
        if otherwise == "narrower":
            return (y + x).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        if otherwise == "reduced":
            return jnp.sum(y, axis=0)
        return (y + x) @ w @ y

    graph, _, live = fused(function, WIDE, WIDE)
    first = made_by(graph, "dot_general")[0]
    last = max(i for i, op in enumerate(graph.ops) if first in op.inputs)
    by = int(live.stop[first]) - 1
    assert by >= last and live.start[graph.ops[by].outputs[0]] == by  # until that kernel has run


def test_products_read_through_a_rectifier_but_not_through_sums_of_two_values():
    def function(x, w):
        y = x @ w
        z = jnp.maximum(y, 0)
        return jnp.maximum(z @ w + z, 0) @ w, jnp.sum(z), y

    graph, found, live = fused(function, WIDE, WIDE)
    first, second = made_by(graph, "max")
    (added,) = made_by(graph, "add")
    assert found.passing[first] and not found.passing[[second, added]].any()
    assert live.stop[first] <= live.start[first]
    assert live.stored[second] and live.stop[second] > live.start[second]


@pytest.mark.parametrize("readers", ["elementwise", "a product"])
def test_look_ups_are_made_again_by_kernels_that_fuse_them(readers):
    def function(table, rows, w):
        x = table[rows]
        return x @ w if readers == "a product" else (x * w[: len(rows)], jnp.sum(jnp.exp(x), axis=0))

    graph, found, _ = fused(function, WIDE, jax.ShapeDtypeStruct((4,), jnp.int32), WIDE)
    (value,) = made_by(graph, "gather")
    assert found.kept[value] == (readers == "a product")


@pytest.mark.parametrize("adds_to", ["the nodes", "zeros"])
def test_a_scatter_computes_its_updates_unless_they_are_looked_up_in_what_it_changes(adds_to):
    def summed(nodes, start, end):
        sums = jax.ops.segment_sum(nodes[start], end, len(nodes))
        return nodes + sums if adds_to == "the nodes" else jnp.tanh(sums)

    ends = jax.ShapeDtypeStruct((64,), jnp.int32)
    graph, found, _ = fused(summed, WIDE, ends, ends)
    (value,) = made_by(graph, "gather")
    assert found.kept[value] == (adds_to == "the nodes")


@pytest.mark.parametrize("name", ["mlp", "llama-tiny", "moe-tiny", "wide-resnet-tiny"])
def test_places_are_given_on_once_and_to_values_of_the_same_size(name):
    graph = traced_zoo(name).graph
    nests = Grouping(graph).nests
    found, live = fuse(Facts(graph, nests)), liveness(graph, nests)
    assert not (found.kept & ~found.stored).any()
    last = np.zeros(graph.columns.num_values, np.int64)
    np.maximum.at(last, graph.columns.reads, graph.columns.reader)
    kept = np.flatnonzero(found.kept & live.stored & (graph.columns.producer >= 0))
    given = [v for v in kept.tolist() if 0 < live.stop[v] <= last[v]]
    taken = [int(graph.columns.first_made[live.stop[v]]) for v in given]
    assert len(set(taken)) == len(taken)
    for value, other in zip(given, taken, strict=True):
        assert graph.types[value].num_bytes == graph.types[other].num_bytes


def test_a_kernel_evaluates_no_value_too_often():
    """An associative scan reads every other element, twice at each level: levels between are written."""

    def scanned(x):
        return lax.associative_scan(lambda a, b: a * b + b, x * 0.5)

    def once(x):
        return jnp.concatenate([x[1:] * 2, x[:1]]) + jnp.roll(x, 3)

    vector = jax.ShapeDtypeStruct((1024,), jnp.float32)
    graph, found, _ = fused(scanned, vector)
    inside = np.setdiff1d(np.flatnonzero(found.kept), [*graph.inputs, *graph.outputs])
    sizes = {graph.types[value].shape[0] for value in inside.tolist()}
    assert {256, 255} & sizes and 3 <= len(inside) < len(graph.ops) / 2
    graph, found, _ = fused(once, vector)
    assert not set(np.flatnonzero(found.kept).tolist()) - {*graph.inputs, *graph.outputs}


@pytest.mark.parametrize("seed", range(30))
def test_what_a_kernel_reads_in_place_is_so_on_every_path(seed):
    """Held against all paths from an operation, through what its kernel makes within itself, to a value."""
    rng = np.random.default_rng(seed)
    num_ops, num_inputs = 8, 3  # operation i makes value num_inputs + i
    reads = [rng.integers(0, num_inputs + i, rng.integers(1, 4)) for i in range(num_ops)]
    alike = [rng.random(len(some)) < 0.7 for some in reads]
    maker = np.concatenate([np.full(num_inputs, -1), np.where(rng.random(num_ops) < 0.7, np.arange(num_ops), -1)])

    def paths(op, value, same):
        for source, one in zip(reads[op].tolist(), alike[op].tolist(), strict=True):
            if source == value:
                yield same and one
            elif maker[source] >= 0:
                yield from paths(maker[source], value, same and one)

    begin = np.cumsum([0, *map(len, reads)])
    ops, values = (part.ravel() for part in np.meshgrid(np.arange(num_ops), np.arange(num_inputs + num_ops)))
    found = _read_in_place(np.concatenate(reads), begin, np.concatenate(alike), maker, ops, values)
    expected = [list(paths(op, value, True)) for op, value in zip(ops.tolist(), values.tolist(), strict=True)]
    assert found.tolist() == [bool(some) and all(some) for some in expected]
    assert found.any() and not found.all()
