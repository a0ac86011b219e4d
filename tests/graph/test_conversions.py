"""Conversions: what XLA's CPU backend holds of bfloat16 values, as they are computed and as the program has them."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright.graph.conversions import Sent, convert
from meshwright.graph.cpu_liveness import cpu_liveness
from meshwright.graph.simplified import Split
from tests.graph.examples import traced

narrow = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
X, W = narrow((64, 32)), narrow((32, 32))


def widths(function, *args, split=Split()):  # noqa: B008
    """For each operation of the program, by its primitive, the bytes of an element in each array held of its result."""
    graph, nests = traced(function, *args)
    held, found = cpu_liveness(graph, nests, split).converted, list[tuple[str, list[float]]]()
    for op in graph.ops:
        sizes = [2 * size for value, size in zip(held.value, held.size, strict=True) if value == op.outputs[0]]
        found.append((op.primitive, sorted(sizes)))
    return [(name, sizes) for name, sizes in found if sizes]


def test_what_one_product_reads_of_another_is_held_wide():
    assert widths(lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w, dtype=jnp.float32), X, W)[:2] == [
        ("dot_general", [4.0]),
        ("tanh", [4.0]),
    ]


def test_cpus_that_multiply_narrow_types_keep_what_products_read_and_make():
    def function(x, w):
        return jnp.sum(jnp.tanh(x @ w) @ w, dtype=jnp.float32)

    graph, nests = traced(function, X, W)
    plain = replace(graph, narrow_products=(True, False))
    batched = replace(graph, narrow_products=(False, True))
    held: list[dict[str, float]] = []
    for one in (graph, plain, batched):
        spans = cpu_liveness(one, nests).converted
        made = ((graph.producer.get(v), 2 * size) for v, size in zip(spans.value, spans.size, strict=True))
        held.append({graph.ops[index].primitive: size for index, size in made if index is not None})
    assert held[0] == held[2] == {"dot_general": 4.0, "tanh": 4.0}
    assert held[1] == {"dot_general": 2.0, "tanh": 2.0}


def test_what_several_kernels_read_is_held_narrow():
    def function(x, w):
        y = x * x
        return y @ w, jnp.exp(y)

    assert dict(widths(function, X, W))["mul"] == [2.0, 4.0]  # the product reads it wide


def test_kernels_count_as_they_are_fused():
    def function(x, w):
        y = x @ w
        return jnp.sum((jnp.tanh(y) * y) @ w, dtype=jnp.float32)

    assert dict(widths(function, X, W))["mul"] == [4.0]
    assert widths(function, X, W)[0] == ("dot_general", [4.0])  # read by one kernel, though by two operations


def test_what_the_program_widens_is_as_it_was_made_unless_it_is_laid_down():
    def normed(y, w):
        wide = y.astype(jnp.float32)
        return (wide / jnp.sqrt(jnp.sum(wide * wide, axis=1, keepdims=True))).astype(jnp.bfloat16) @ w

    assert dict(widths(lambda x, w: normed(x + x, w), X, W))["add"] == [4.0]
    assert ("dot_general", [2.0, 4.0, 4.0]) in widths(lambda x, w: normed(x @ w, w), X, W)


def test_loops_carry_and_stack_narrow_and_widen_what_they_take_apart():
    def function(w, xs):
        _, made = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h * 2), xs[0], xs)
        return jax.lax.scan(lambda h, y: (h + y @ w, None), xs[0], made)[0]

    found = widths(function, W, narrow((4, 64, 32)))
    assert [sizes for name, sizes in found if name == "loop_carry"] == [[2.0, 4.0], [2.0]]
    assert [sizes for name, sizes in found if name == "loop_stack"] == [[2.0, 4.0]]


def test_what_is_sent_is_held_as_its_copies_are():
    def function(x, w):
        y = jnp.tanh(x)
        return jnp.sum(y @ w, dtype=jnp.float32)

    graph, nests = traced(function, X, W)
    product, value = next((i, op.inputs[0]) for i, op in enumerate(graph.ops) if op.primitive == "dot_general")
    copy = Sent(value, 1, "forward", is_cut=False)
    live = cpu_liveness(graph, nests, Split(sent={(product, value): copy}))
    assert [itemsize for _, _, itemsize in live.sent[copy]] == [4, 4]  # as it comes, and rounded for the product
    assert all(start < stop <= live.num_steps for start, stop, _ in live.sent[copy])


@pytest.mark.parametrize("options", [{}, {"scan": True}, {"scan": True, "checkpoint": True}], ids=str)
def test_every_operation_has_a_place_and_every_value_is_one_of_before(options):
    example = zoo.build("llama-tiny", batch=16, dtype="bfloat16", **options)
    graph, nests = traced(example.train_step, example.state, example.batch)
    found = convert(graph, nests, {})
    assert len(found.nests) == len(found.graph.ops) and len(found.op) == len(graph.ops)
    names = [found.graph.ops[index].primitive for index in found.op]
    assert all(a == b.primitive or b.primitive == "convert_element_type" for a, b in zip(names, graph.ops, strict=True))
    assert (found.graph.sizes == graph.sizes[found.value]).all()
    made = set(found.graph.inputs) | set(found.graph.constants)
    for op in found.graph.ops:
        assert made.issuperset(op.inputs)
        made.update(op.outputs)
    live = cpu_liveness(graph, nests)
    held = live.converted
    assert ((held.start >= 0) & (held.start < held.stop) & (held.stop <= live.num_steps)).all()


def test_float32_is_left_alone():
    example = zoo.build("mlp", batch=16, dtype="float32")
    live = cpu_liveness(*traced(example.train_step, example.state, example.batch))
    assert not len(live.converted.value) and not live.num_conversions and not live.sent
