"""Tracing: what of a JAX function reaches the graph, and under which name."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshwright.graph import BACKWARD, FORWARD, UPDATE, trace


def vector(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def primitives(graph):
    return [op.primitive for op in graph.ops]


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_dataclass
@dataclass
class Weights:
    kernel: object
    bias: object


def test_paths_name_every_kind_of_container():
    def step(state, *rest):
        return {"same": state, "sum": rest[0] + rest[1]}

    state = {"pair": Pair(vector(2), vector(3)), "list": [vector(4), (vector(5),)], "w": Weights(vector(6), vector(7))}
    graph = trace(step, state, vector(8), vector(8)).graph
    assert graph.input_paths == (
        "state/list/0",
        "state/list/1/0",
        "state/pair/left",
        "state/pair/right",
        "state/w/kernel",
        "state/w/bias",
        "rest/0",
        "rest/1",
    )
    assert [graph.types[v].shape for v in graph.inputs] == [(4,), (5,), (2,), (3,), (6,), (7,), (8,), (8,)]
    assert graph.output_paths[:2] == ("out/same/list/0", "out/same/list/1/0")
    assert graph.output_paths[-1] == "out/sum"


def test_a_function_without_a_signature_still_has_paths():
    assert trace(dict, {"a": vector(2)}).graph.input_paths == ("args/0/a",)


def test_a_bare_result_is_called_out():
    assert trace(lambda x: x + 1, vector(2)).graph.output_paths == ("out",)


def test_arrays_scalars_and_shapes_trace_alike():
    concrete = trace(lambda x, s: x * s, np.ones((2, 3), np.float32), 2.0).graph
    abstract = trace(lambda x, s: x * s, vector(2, 3), 2.0).graph
    assert concrete.types == abstract.types
    assert primitives(concrete) == primitives(abstract)


def test_the_source_line_is_the_users():
    def function(x):
        return jnp.sin(x)

    (op,) = trace(function, vector(2)).graph.ops
    line = function.__code__.co_firstlineno + 1
    assert f"test_trace.py:{line}" in op.source


def test_name_scopes_become_labels():
    def function(x):
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return jnp.sin(x)

    (op,) = trace(function, vector(2)).graph.ops
    assert op.label == "outer/inner/sin"


def train_step(state, batch):
    def loss(params):
        hidden = jnp.tanh(batch["x"] @ params["first"])
        return jnp.mean((hidden @ params["second"] - batch["y"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


PARAMS = {"first": vector(4, 8), "second": vector(8, 2)}
STATE = {"params": PARAMS, "momentum": PARAMS}
BATCH = {"x": vector(16, 4), "y": vector(16, 2)}


def test_a_train_step_has_a_forward_a_backward_and_an_update():
    graph = trace(train_step, STATE, BATCH).graph
    by_phase = {p: [op.primitive for op in graph.ops if op.phase == p] for p in (FORWARD, BACKWARD, UPDATE)}
    assert by_phase[FORWARD].count("dot_general") == 2
    assert by_phase[BACKWARD].count("dot_general") == 3  # both kernels' gradients, and one activation's
    assert sorted(by_phase[UPDATE]) == ["add"] * 2 + ["mul"] * 4 + ["sub"] * 2


def test_state_that_comes_back_is_paired_with_its_argument():
    graph = trace(train_step, STATE, BATCH).graph
    pairs = {graph.output_paths[o]: graph.input_paths[i] for o, i in graph.state.items()}
    assert pairs == {f"out/0/{path[6:]}": path for path in graph.input_paths if path.startswith("state/")}


def test_a_result_of_another_type_is_not_an_arguments_next_value():
    def bump(state):
        return {"count": state["count"] + 1}

    assert trace(bump, {"count": vector(4)}).graph.state == {0: 0}
    assert trace(lambda s: {"count": s["count"].astype(jnp.bfloat16)}, {"count": vector(4)}).graph.state == {}


def test_a_single_array_is_state_only_where_something_learns_or_it_is_donated():
    def forward(x, w):
        return jnp.tanh(x @ w)

    def descend(w, x):
        return w - 0.1 * jax.grad(lambda v: jnp.sum(jnp.tanh(x @ v)))(w)

    assert trace(forward, vector(8, 4), vector(4, 4)).graph.state == {}
    assert trace(jax.jit(forward, donate_argnums=0), vector(8, 4), vector(4, 4)).graph.state == {0: 0}
    assert trace(descend, vector(4, 4), vector(8, 4)).graph.state == {0: 0}


def test_donation_is_read_off_jit_however_deep():
    donating = jax.jit(train_step, donate_argnums=0)
    graph = trace(lambda state, batch: donating(state, batch), STATE, BATCH).graph
    donated = {p for p, v in zip(graph.input_paths, graph.inputs, strict=True) if v in graph.donated}
    assert donated == {p for p in graph.input_paths if p.startswith("state/")}
    assert trace(train_step, STATE, BATCH).graph.donated == frozenset()


def test_work_that_no_result_needs_is_left_out():
    def wasteful(x, unused):
        jnp.exp(x) @ jnp.ones((3, 3))
        return jnp.sin(x)

    graph = trace(wasteful, vector(3), vector(5)).graph
    assert primitives(graph) == ["sin"]
    assert len(graph.inputs) == 2


def test_an_argument_handed_through_is_its_own_result():
    graph = trace(lambda x: (x, x), vector(3)).graph
    assert graph.outputs == (graph.inputs[0], graph.inputs[0])
    assert len(graph.ops) == 0


def test_calls_are_inlined():
    @jax.custom_jvp
    def jvp_ruled(x):
        return jnp.sin(x)

    jvp_ruled.defjvp(lambda primals, tangents: (jvp_ruled(*primals), jnp.cos(primals[0]) * tangents[0]))

    @jax.custom_vjp
    def vjp_ruled(x):
        return jnp.cos(x)

    vjp_ruled.defvjp(lambda x: (vjp_ruled(x), x), lambda x, g: (g * jnp.tan(x),))

    def function(x):
        return jax.jit(vjp_ruled)(jax.jit(jvp_ruled)(x))

    assert primitives(trace(function, vector(3)).graph) == ["sin", "cos"]
    backward = trace(jax.grad(lambda x: function(x).sum()), vector(3)).graph
    assert "tan" in primitives(backward)  # the rule the user wrote, not JAX's own
    assert {op.primitive for op in backward.ops}.isdisjoint({"custom_jvp_call", "custom_vjp_call", "jit", "pjit"})


def test_a_scan_is_its_body_once_with_its_carry_tied():
    def function(init, xs):
        def body(carry, x):
            new = jnp.tanh(carry + x)
            return new, 2 * new

        return lax.scan(body, init, xs)

    graph = trace(function, vector(3), vector(7, 3)).graph
    names = primitives(graph)
    assert [names.count(n) for n in ("loop_carry", "loop_slice", "loop_stack", "tanh")] == [1, 1, 1, 1]
    trips = {op.primitive: op.trips for op in graph.ops}
    assert trips["tanh"] == trips["loop_slice"] == trips["loop_stack"] == 7
    assert trips["loop_carry"] == 1
    (tie,) = graph.ties
    assert graph.ops[graph.producer[tie.made]].primitive == "tanh"
    assert graph.ops[graph.producer[tie.carry]].primitive == "loop_carry"
    assert tie.trips == 7
    assert graph.outputs[0] == tie.carry  # the last carry has the carry's sharding
    assert graph.types[graph.outputs[1]].shape == (7, 3)
    assert graph.loops == ((0, len(graph.ops)),)


def test_nested_scans_multiply_their_trips():
    def function(x):
        def inner(c, _):
            return jnp.sin(c), None

        def outer(c, _):
            return lax.scan(inner, c, None, length=5)[0], None

        return lax.scan(outer, x, None, length=3)[0]

    graph = trace(function, vector(2)).graph
    assert next(op.trips for op in graph.ops if op.primitive == "sin") == 15
    assert len(graph.loops) == 2
    inner, outer = sorted(graph.loops, key=lambda loop: loop[1] - loop[0])
    assert outer[0] <= inner[0] < inner[1] <= outer[1]


def test_a_while_loop_runs_as_often_as_it_counts():
    def function(x):
        return lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]

    graph = trace(function, vector(4)).graph
    assert {op.trips for op in graph.ops if op.primitive == "sin"} == {5}
    tied = {graph.types[t.carry].shape for t in graph.ties}
    assert (4,) in tied
    (loop,) = graph.whiles
    assert graph.loops == ((loop.start, loop.stop),) == ((0, len(graph.ops)),)


def test_both_branches_of_a_cond_are_merged():
    def function(flag, x):
        return lax.cond(flag, lambda y: jnp.sin(y), lambda y: y @ jnp.ones((4, 4)), x)

    graph = trace(function, vector(dtype=jnp.bool_), vector(4)).graph
    names = primitives(graph)
    assert {"sin", "dot_general"} <= set(names)
    merge = next(op for op in graph.ops if op.primitive == "branch_merge")
    assert merge.outputs == graph.outputs
    assert {graph.ops[graph.producer[v]].primitive for v in merge.inputs} == {"sin", "dot_general"}


def test_recomputation_of_a_checkpoint_is_kept_and_marked():
    def loss(w, x):
        return jnp.sum(jax.checkpoint(lambda y: jnp.sin(jnp.tanh(y @ w)))(x))

    graph = trace(jax.grad(loss), vector(4, 4), vector(8, 4)).graph
    products = [op for op in graph.ops if op.primitive == "dot_general"]
    assert not any(op.recomputed for op in products if op.phase == FORWARD)
    assert any(op.recomputed for op in products)
    assert all(op.phase == BACKWARD for op in graph.ops if op.recomputed)
    plain = trace(jax.grad(lambda w, x: jnp.sum(jnp.sin(jnp.tanh(x @ w)))), vector(4, 4), vector(8, 4)).graph
    assert not any(op.recomputed for op in plain.ops)


def test_serials_follow_the_order_of_the_program():
    graph = trace(train_step, STATE, BATCH).graph
    serials = [op.serial for op in graph.ops]
    assert serials == sorted(set(serials))


def test_equal_operations_share_one_signature():
    def function(x):
        for _ in range(3):
            x = jnp.sin(x)
        return x

    graph = trace(function, vector(4)).graph
    assert len({id(op.signature) for op in graph.ops}) == 1


def test_every_operation_reads_what_is_made_before_it():
    for example in (train_step, jax.jit(train_step)):
        graph = trace(example, STATE, BATCH).graph
        known = set(graph.inputs) | set(graph.constants)
        for op in graph.ops:
            assert set(op.inputs) <= known
            known.update(op.outputs)
        assert set(graph.outputs) <= known


def test_constants_need_no_operation():
    table = jnp.arange(12.0).reshape(3, 4)
    graph = trace(lambda x: x @ table, vector(2, 3)).graph
    (op,) = graph.ops
    assert op.inputs[1] in graph.constants
    assert graph.types[op.inputs[1]].shape == (3, 4)


def test_typed_keys_have_a_size():
    graph = trace(lambda key: jax.random.normal(key, (3,)), jax.random.key(0)).graph
    assert graph.types[graph.inputs[0]].num_bytes == 8


def test_cpus_have_narrow_numbers_wide_but_for_what_is_given_taken_and_converted():
    def step(narrow, wide):
        converted = wide.astype(jnp.bfloat16)
        return jnp.exp(narrow * converted) + narrow

    graph = trace(step, vector(8, dtype=jnp.bfloat16), vector(8)).graph
    cpu = graph.for_cpu()
    kept = {op.primitive: cpu.types[op.outputs[0]].itemsize for op in cpu.ops}
    assert kept == {"convert_element_type": 2, "mul": 4, "exp": 4, "add": 2}
    assert [cpu.types[v].itemsize for v in cpu.inputs] == [2, 4]
    assert set(cpu.sent_itemsize.tolist()) == {4} and 2 in graph.sent_itemsize
    assert [kind.dtype for kind in cpu.types] == [kind.dtype for kind in graph.types]
    plain = trace(jnp.exp, vector(8)).graph
    assert plain.for_cpu() is plain


def test_bodies_are_told_apart_and_what_a_loop_takes_is_read_before_it():
    def function(x, flag):
        y = jax.lax.cond(flag, jnp.sin, lambda v: jax.lax.scan(lambda c, row: (c + row, None), v[0], v)[0] + v, x)
        return jnp.cos(y)

    graph = trace(function, jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((), bool)).graph
    body = {}
    for op, number in zip(graph.ops, graph.body.tolist(), strict=True):
        body.setdefault(op.primitive, set()).add(number)
    (sine,), (cosine,), (carry,), (slices,) = (body[n] for n in ("sin", "cos", "loop_carry", "loop_slice"))
    assert cosine == 0 and sine != 0 and carry == slices not in (0, sine)
    assert len(body["add"] - {carry}) == 1  # the loop's own


def reconstructing(weights, x, target):
    """A train step that also returns what has the type of its examples."""

    def loss(weights):
        made = x + jnp.tanh(x @ weights["w"])
        return ((made - target) ** 2).mean(), made

    (value, made), grads = jax.value_and_grad(loss, has_aux=True)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, grads), value, made


def test_results_of_the_types_of_examples_are_no_next_values():
    weights, x = {"w": vector(4, 4)}, vector(8, 4)

    def alone(weights, x):
        return reconstructing(weights, x, 0.0)

    def named(weights, batch):
        weights, value, made = reconstructing(weights, batch["x"], 0.0)
        return weights, value, {"x": made}

    for function, *args in ((reconstructing, weights, x, x), (alone, weights, x), (named, weights, {"x": x})):
        graph = trace(function, *args).graph
        assert [graph.input_paths[i] for i in graph.state.values()] == ["weights/w"]


def test_statistics_that_the_forward_pass_computes_are_next_values():
    def step(weights, mean, key, x):
        key, used = jax.random.split(key)

        def loss(weights):
            made = x @ weights + jax.random.normal(used, (8, 4))
            return (made**2).mean(), 0.9 * mean + 0.1 * made.mean(0)

        grads, mean_ = jax.grad(loss, has_aux=True)(weights)
        return weights - grads, mean_, key

    args = jnp.ones((4, 4)), jnp.ones(4), jax.random.key(0), jnp.ones((8, 4))
    graph = trace(step, *args).graph
    assert {graph.input_paths[i] for i in graph.state.values()} == {"weights", "mean", "key"}
