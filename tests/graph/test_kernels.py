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


def test_a_gradient_of_a_weight_reads_a_transposed_copy_made_from_its_sources():
    def loss(w, x):
        return jnp.sum(jnp.square(jnp.maximum(x @ w, 0) @ w))

    graph, kernels = kernels_of(jax.grad(loss), W, X)
    ((index, operand),) = kernels.copies  # of the slope that the layer before reads as well
    (value,) = (graph.ops[index].inputs[operand],)
    assert graph.ops[index].phase == "backward" and graph.types[value].shape == (64, 32)
    assert value not in kernels.reads[index]


def test_convolutions_read_images_with_features_last():
    def convolve(layout):
        dims = (layout, "HWIO", layout)
        return lambda x, k: jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)

    kernel = shaped(3, 3, 8, 8)
    assert not kernels_of(convolve("NHWC"), shaped(2, 4, 4, 8), kernel)[1].copies
    assert kernels_of(convolve("NCHW"), shaped(2, 8, 4, 4), kernel)[1].copies == [(0, 0)]


def test_values_scattered_into_zeros_are_scattered_into_what_they_are_added_to():
    def function(x, at):
        return (jnp.zeros((64, 32)).at[at].add(1.0) + x * 2) @ jnp.ones((32, 8))

    graph, kernels = kernels_of(function, X, jax.ShapeDtypeStruct((4,), jnp.int32))
    assert "add" not in stored(graph, kernels)
    scatter = next(i for i, op in enumerate(graph.ops) if op.primitive == "scatter-add")
    assert graph.inputs[0] in kernels.reads[scatter]
