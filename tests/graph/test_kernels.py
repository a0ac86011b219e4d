"""Kernels: what XLA's CPU backend fuses, and what it writes."""

import jax
import jax.numpy as jnp

from meshwright.graph.kernels import Kernels
from tests.graph.examples import shaped, traced


def kernels_of(function, *args):
    graph, nests = traced(function, *args)
    return graph, Kernels(graph, nests)


def stored(graph, kernels):
    """Primitives whose results are written, in the order of the program."""
    return [op.primitive for op in graph.ops if any(kernels.stored[v] for v in op.outputs)]


X, W = shaped(64, 32), shaped(32, 32)


def test_elementwise_work_is_fused_and_written_for_a_library_call():
    graph, kernels = kernels_of(lambda x, w: (jnp.maximum(x * 2, 0) + 1) @ w, X, W)
    assert stored(graph, kernels) == ["add", "dot_general"]
    product = next(i for i, op in enumerate(graph.ops) if op.primitive == "dot_general")
    assert len(kernels.reads[product]) == 2


def test_what_reads_one_large_operand_is_made_again_and_what_reads_two_is_not():
    def one(x, y, w):
        z = x * 2
        return z @ w, jnp.maximum(z, 0)

    def two(x, y, w):
        z = x * y
        return z @ w, jnp.maximum(z, 0)

    for function, expected in ((one, {"x"}), (two, {"z"})):
        graph, kernels = kernels_of(function, X, X, W)
        top = next(i for i, op in enumerate(graph.ops) if op.primitive == "max")
        assert {"x" if v in graph.inputs else "z" for v in kernels.reads[top]} == expected


def test_a_sum_takes_in_a_multiplication_but_nothing_else():
    graph, kernels = kernels_of(lambda x, y: (jnp.sum(x * y, axis=0), jnp.sum(x + y, axis=0)), X, X)
    assert stored(graph, kernels) == ["reduce_sum", "add", "reduce_sum"]


def test_costly_work_with_several_readers_is_written_once():
    graph, kernels = kernels_of(lambda x: (jnp.exp(x) + 1, jnp.exp(x) * 2)[0] * jnp.exp(x), X)
    assert "exp" not in stored(graph, kernels) or stored(graph, kernels).count("exp") == 1

    def shared(x):
        z = jnp.exp(x)
        return z + 1, z * 2

    assert stored(*kernels_of(shared, X)) == ["exp", "add", "mul"]


def views(graph, kernels):
    """Of each view: the primitive that makes the value, whether it is transposed, and how many kernels read it."""
    first = len(kernels.stored)
    count = {n: sum(n in reads for reads in kernels.reads.values()) for n in range(first, first + len(kernels.views))}
    maker = graph.columns.producer
    names = ["" if maker[v.value] < 0 else graph.ops[maker[v.value]].primitive for v in kernels.views]
    return [
        (name, v.is_transposed, count[first + n]) for n, (name, v) in enumerate(zip(names, kernels.views, strict=True))
    ]


def test_matrices_are_read_as_they_are_either_way_round():
    def loss(w, x):
        return jnp.sum(jnp.square(jnp.maximum(x @ w, 0) @ w))

    assert not kernels_of(jax.grad(loss), W, X)[1].views


def test_what_has_more_dims_is_reshaped_once_for_products_forward_and_back_and_its_slope_is_transposed():
    def loss(w, x):
        return jnp.sum(jnp.sin(jnp.einsum("bsd,df->bsf", x * 2, w)))

    graph, kernels = kernels_of(jax.grad(loss, argnums=(0, 1)), W, shaped(4, 16, 32))
    assert sorted(views(graph, kernels)) == [("mul", False, 2), ("mul", True, 1)]
    name, view = next((name, v) for name, v in enumerate(kernels.views, len(graph.ops)) if not v.is_transposed)
    assert view.value not in kernels.reads[name] and not kernels.stored[view.value]  # it is made where it is read


def test_a_product_that_another_reads_transposed_is_copied():
    def function(x, w, y):
        return jnp.einsum("bsd,bsf->df", jnp.einsum("bsd,df->bsf", x, w), y)

    graph, kernels = kernels_of(function, shaped(4, 16, 32), W, shaped(4, 16, 8))
    assert views(graph, kernels) == [("dot_general", True, 1)]
    assert kernels.reads[len(graph.ops)] == (kernels.views[0].value,)


def test_what_a_call_reads_along_with_what_is_made_of_it_by_a_call_is_written_once():
    def alone(x, y, w):
        z = x * y
        return jnp.maximum(z, 0), z + 1

    def round_about(x, y, w):
        z = x * y
        return jnp.maximum(z, 0) * (jnp.sin(z) @ w), z - (jnp.sin(z) @ w)

    assert stored(*kernels_of(alone, X, X, W)) == ["max", "add"]
    assert "mul" in stored(*kernels_of(round_about, X, X, W))[:1]


def test_operations_that_do_the_same_are_one():
    def function(x):
        mean = jnp.mean(x, axis=1, keepdims=True)
        return jnp.sum(jnp.square(x - mean), axis=0), jnp.sum(jnp.sin(x - mean), axis=0)

    graph, kernels = kernels_of(function, X)
    subs = [i for i, op in enumerate(graph.ops) if op.primitive == "sub"]
    assert len(subs) == 2 and [kernels.program.same[i] for i in subs] == [subs[0]] * 2
    assert stored(graph, kernels).count("sub") == 1


def test_what_is_checkpointed_is_done_again():
    def function(x):
        return jax.grad(lambda x: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.exp(x @ x)))(x)))(x)

    graph, kernels = kernels_of(function, shaped(32, 32))
    again = [i for i, op in enumerate(graph.ops) if op.recomputed]
    assert again and all(kernels.program.same[i] == i or graph.ops[kernels.program.same[i]].recomputed for i in again)


def test_a_slice_of_what_is_stacked_is_taken_where_it_is_read():
    def function(stack):
        return jax.lax.scan(lambda c, x: (c + jnp.maximum(x, 0), None), jnp.zeros(32), stack)[0]

    graph, kernels = kernels_of(function, X)
    assert "loop_slice" not in stored(graph, kernels)
    total = next(i for i, op in enumerate(graph.ops) if op.primitive == "add")
    assert graph.inputs[0] in kernels.reads[total] and kernels.in_place[total]


def test_convolutions_read_images_with_features_last():
    def convolve(layout):
        dims = (layout, "HWIO", layout)
        return lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)

    kernel = shaped(3, 3, 8, 8)
    assert not kernels_of(convolve("NHWC"), shaped(2, 4, 4, 8), kernel)[1].views
    graph, kernels = kernels_of(convolve("NCHW"), shaped(2, 8, 4, 4), kernel)
    assert views(graph, kernels) == [("", True, 1)]


def test_values_scattered_into_zeros_are_scattered_into_what_they_are_added_to():
    def function(x, at):
        return (jnp.zeros((64, 32)).at[at].add(1.0) + x * 2) @ jnp.ones((32, 8))

    graph, kernels = kernels_of(function, X, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert "add" not in stored(graph, kernels)
    scatter = next(i for i, op in enumerate(graph.ops) if op.primitive == "scatter-add")
    assert graph.inputs[0] in kernels.reads[scatter]
