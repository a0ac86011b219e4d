"""Liveness: which values take memory, and from which operation to which."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.cost.xla_gpu.liveness import liveness
from tests.graph.examples import shaped, traced


def live_of(function, *args):
    graph, nests = traced(function, *args)
    return graph, liveness(graph, nests)


def bytes_at(graph, live):
    """Bytes of the whole program at each operation, counted value by value."""
    total = np.zeros(live.num_steps)
    for value, kind in enumerate(graph.types):
        if live.stored[value]:
            total[live.start[value] : live.stop[value]] += kind.num_bytes
    return total


def made_by(graph, primitive):
    return [op.outputs[0] for op in graph.ops if op.primitive == primitive]


def copies_of(live, value):
    """When copies of a value are in memory, and how large they are."""
    found = live.copies.value == value
    return [part[found].tolist() for part in live.copies[1:]]


def sgd(loss):
    """A train step that descends along the gradient."""

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    return step


def chain(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def test_intervals_reach_from_the_maker_to_the_last_reader():
    def function(x, w):
        first = x @ w
        second = first @ w
        third = second @ w
        return first @ third

    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    first, second, third, last = made_by(graph, "dot_general")
    assert [(int(live.start[v]), int(live.stop[v])) for v in (first, second, third, last)] == [
        (0, 4),
        (1, 3),
        (2, 4),
        (3, 4),
    ]


def test_arguments_that_are_not_donated_live_to_the_end():
    graph, live = live_of(lambda x, w: (x @ w) @ w @ w, shaped(4, 4), shaped(4, 4))
    assert live.stop[list(graph.inputs)].tolist() == [3, 3]
    assert live.start[list(graph.inputs)].tolist() == [0, 0]


def test_a_donated_argument_ends_with_its_last_reader():
    function = jax.jit(lambda x, w: ((x @ w) @ w @ w)[:2], donate_argnums=0)
    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    x, w = graph.inputs
    assert (live.stop[x], live.stop[w]) == (1, len(graph.ops))


def update(state, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads)


def test_a_donated_argument_that_is_handed_on_as_it_is_stays():
    graph, live = live_of(
        jax.jit(lambda s: {"a": s["a"], "b": s["b"] + 1}, donate_argnums=0), {"a": shaped(4, 4), "b": shaped(4, 4)}
    )
    kept = graph.inputs[0]
    assert graph.outputs[0] == kept and kept in graph.donated
    assert live.stored[kept] and live.stop[kept] == live.num_steps


def test_a_donated_buffer_and_its_next_value_are_counted_once():
    state = {"w": shaped(64, 64)}
    kept_graph, kept = live_of(update, state, state)
    graph, live = live_of(jax.jit(update, donate_argnums=0), state, state)
    size = 64 * 64 * 4
    assert bytes_at(kept_graph, kept).max() == 3 * size
    assert bytes_at(graph, live).max() == 2 * size
    assert not live.stored[graph.outputs[0]]
    assert live.stop[graph.inputs[0]] == live.num_steps


def test_elementwise_chains_are_not_stored():
    def function(x, w):
        return (2 * x + 1 - x) @ w

    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    stored = [bool(live.stored[v]) for name in ("mul", "add", "sub") for v in made_by(graph, name)]
    assert stored == [False, False, True]  # only what the product reads is written


def test_what_a_fused_value_is_made_from_lives_until_it_is_used():
    def function(x, w):
        cheap = 2 * x  # never written: made again from x by its reader
        return ((x @ w) @ w @ w) + cheap

    graph, live = live_of(jax.jit(function, donate_argnums=0), shaped(4, 4), shaped(4, 4))
    assert not live.stored[made_by(graph, "mul")[0]]
    assert live.stop[graph.inputs[0]] == len(graph.ops)


def test_a_costly_value_with_several_readers_is_stored():
    def twice(x):
        y = jnp.exp(x)
        return y * 2, y + 1

    def once(x):
        return jnp.exp(x) * 2

    graph, live = live_of(twice, shaped(8))
    assert live.stored[made_by(graph, "exp")[0]]
    graph, live = live_of(once, shaped(8))
    assert not live.stored[made_by(graph, "exp")[0]]


def test_a_loop_keeps_what_it_reads_until_it_ends():
    def function(x, w):
        table = x @ w
        return lax.scan(lambda c, _: (jnp.sin(c @ table) @ w, None), x, None, length=3)[0]

    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    table = made_by(graph, "dot_general")[0]
    ((_, end),) = graph.loops
    assert live.stop[table] == end


def test_a_stacked_result_is_allocated_when_the_loop_starts():
    def function(x, w):
        def body(carry, _):
            new = carry @ w
            return new, jnp.tanh(new)

        return lax.scan(body, x @ w, None, length=5)[1]

    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    ((first, end),) = graph.loops
    (stacked,) = made_by(graph, "loop_stack")
    assert live.stored[stacked]
    assert (live.start[stacked], live.stop[stacked]) == (first, end)


def test_constants_take_no_memory_of_the_plan():
    graph, live = live_of(lambda x: x @ jnp.ones((4, 4)), shaped(4, 4))
    assert not live.stored[sorted(graph.constants)].any()


def test_results_live_to_the_end():
    graph, live = live_of(lambda x, w: (x @ w, (x @ w) @ w), shaped(4, 4), shaped(4, 4))
    assert live.stop[list(graph.outputs)].tolist() == [live.num_steps] * 2


def test_the_gradient_of_a_weight_may_wait_for_its_update():
    graph, live = live_of(sgd(chain), [shaped(8, 8)] * 3, shaped(4, 8))
    products = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general"]
    late = [i for i in products if live.runs[i] != i]
    assert len(late) == 3
    for index in late:
        made, at = graph.ops[index].outputs[0], live.runs[index]
        assert graph.ops[at].phase == "update"
        assert live.start[made] == at < live.stop[made]
        assert copies_of(live, made)[0] == [at]
    assert len(products) - len(late) == 3 + 2  # the forward pass, and what the backward pass hands on


def test_a_gradient_that_is_a_result_does_not_wait():
    _, live = live_of(jax.grad(chain), [shaped(8, 8)] * 3, shaped(4, 8))
    assert live.runs.tolist() == list(range(live.num_steps))


def test_in_a_loop_gradients_wait_for_the_end_of_the_trip():
    def loss(weights, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, weights)[0])

    graph, live = live_of(sgd(loss), [shaped(3, 8, 8)] * 2, shaped(4, 8))
    (first, end) = max(graph.loops)
    late = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general" and live.runs[i] != i]
    assert [graph.ops[live.runs[i]].primitive for i in late] == ["loop_stack"] * 2
    assert all(first <= i < live.runs[i] < end for i in late)


def test_a_product_is_there_twice_when_it_is_made():
    def function(x, w):
        return (x @ w).astype(jnp.float32) + 1, x.astype(jnp.float32)

    narrow = jax.ShapeDtypeStruct((4, 4), jnp.bfloat16)
    graph, live = live_of(function, narrow, narrow)
    (product,) = made_by(graph, "dot_general")
    assert copies_of(live, product) == [[0], [1], [2.0]]  # in the wider type in which it is read
    assert not np.isin(graph.inputs, live.copies.value).any()


def test_what_one_loop_stacks_for_another_is_copied_when_that_begins():
    def function(x, w):
        _, stacked = lax.scan(lambda c, _: (c @ w, c @ w), x, None, length=3)
        return lax.scan(lambda c, y: (c + y, None), x, stacked)[0], stacked

    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    (stacked,) = made_by(graph, "loop_stack")
    (index,) = [i for i, op in enumerate(graph.ops) if op.primitive == "loop_slice"]
    assert copies_of(live, stacked) == [[index], [index + 1], [1.0]]


def convolve(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_a_filter_is_copied_from_its_first_convolution_until_the_update():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(convolve(jnp.tanh(convolve(x, w)), w))))(w)

    graph, live = live_of(step, shaped(3, 3, 4, 4), shaped(2, 8, 8, 4))
    w, x = graph.inputs
    first = min(i for i, op in enumerate(graph.ops) if op.primitive == "conv_general_dilated")
    last = max(i for i, op in enumerate(graph.ops) if w in op.inputs)
    assert copies_of(live, w) == [[first], [last + 1], [1.0]]
    assert copies_of(live, x) == [[], [], []]


def test_what_makes_a_filter_writes_it_as_it_is_read():
    kind = jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32)
    image = jax.ShapeDtypeStruct((2, 8, 8, 4), jnp.bfloat16)
    graph, live = live_of(lambda w, x: convolve(x, w.astype(jnp.bfloat16)), kind, image)
    assert not np.isin([*graph.inputs, *made_by(graph, "convert_element_type")], live.copies.value).any()


def test_what_is_sent_is_asked_for_when_the_contraction_before_begins():
    def function(x, w):
        y = jnp.tanh(x @ w) @ w
        return lax.scan(lambda c, _: (jnp.tanh(c @ w) + c, None), y, None, length=3)[0] @ w

    graph, live = live_of(function, shaped(4, 4), shaped(4, 4))
    products = [i for i, op in enumerate(graph.ops) if op.primitive == "dot_general"]
    ((first, end),) = graph.loops
    for index in range(live.num_steps):
        earlier = [i for i in products if i < index]
        inside = [i for i in earlier if not first <= index < end or first <= i]
        assert live.before[index] == max(inside, default=first if first <= index < end else 0)


def test_arguments_and_what_they_are_converted_to_can_be_sent_from_the_beginning():
    graph, live = live_of(lambda x, w: jnp.tanh(x @ w.astype(jnp.bfloat16)) + 1, shaped(4, 4), shaped(4, 4))
    for index, op in enumerate(graph.ops):
        given = op.primitive == "convert_element_type" and set(op.inputs) <= set(graph.inputs)
        assert live.ready[op.outputs[0]] == (0 if given else index + 1)
    assert (live.ready[list(graph.inputs)] == 0).all()


def test_a_function_that_does_nothing_has_no_moments():
    graph, live = live_of(lambda x: x, shaped(4))
    assert live.num_steps == 0
    assert live.stored[graph.inputs[0]]


def test_what_many_kernels_read_is_in_memory_and_what_it_is_made_of_is_let_go():
    def function(x, y, w):
        left, right = x @ w, y @ w
        total = left + right
        peak = total.max(1, keepdims=True)
        for _ in range(5):  # each waits for the one before
            peak = jnp.sin(total - peak).sum(1, keepdims=True)
        return peak

    graph, live = live_of(function, shaped(64, 64), shaped(64, 64), shaped(64, 64))
    total = made_by(graph, "add")[0]
    assert live.stored[total] and live.stop[total] == live.num_steps - 1
    assert all(live.stop[product] <= live.start[total] + 1 for product in made_by(graph, "dot_general"))


def test_what_few_kernels_read_once_others_are_in_memory_is_made_again():
    def function(x, y, z, w):
        total = x @ w + y @ w
        more = total + z @ w
        peak = more.max(1, keepdims=True)
        for _ in range(5):  # each waits for the one before
            peak = jnp.sin(more - peak).sum(1, keepdims=True)
        return jnp.cos(total - peak).sum(0)

    graph, live = live_of(function, *[shaped(64, 64)] * 4)
    total, more = made_by(graph, "add")
    assert live.stored[more] and not live.stored[total]
