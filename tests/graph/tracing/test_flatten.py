"""Flattening: the graph has the operations of the program, with the same ids, and the same whoever is called."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright import zoo
from meshwright.graph import trace


def vector(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


@jax.jit
def layer(x, w):
    def turn(carry, _):
        return jnp.tanh(carry @ w) + 1.0, carry.sum()

    x, sums = lax.scan(turn, x, None, length=3)
    return x * 2.0, sums, jnp.zeros(4)


def many_layers(x, w):
    with jax.named_scope("deep"):
        for _ in range(4):
            x, sums, _ = layer(x, w)
    return x, sums


def in_a_loop(x, w):
    def body(carry, _):
        return layer(layer(carry, w)[0], w)[:2]

    return lax.scan(body, layer(x, w)[0], None, length=5)


def with_aliases(x, w):
    return layer(w, w)[0] + layer(w, x)[0] + layer(x, w)[0] + layer(jnp.ones((4, 4)), w)[0]


def of_branches(x, w):
    return lax.cond(x.sum() > 0, lambda: layer(x, w), lambda: layer(x, w + 1))


def zoo_step(name, **options):
    example = zoo.build(name, **options)
    return example.train_step, (example.state, example.batch)


SQUARES = (vector(4, 4), vector(4, 4))
PROGRAMS = {
    "many layers": (many_layers, SQUARES),
    "in a loop": (in_a_loop, SQUARES),
    "with aliases": (with_aliases, SQUARES),
    "of branches": (of_branches, SQUARES),
    "llama": zoo_step("llama-tiny", layers=3, checkpoint=True),
    "unet": zoo_step("unet-tiny"),
}


def told(graph):
    """All that a graph tells of its operations, with values named by the order in which they are met."""
    names = {value: i for i, value in enumerate(graph.inputs)}
    values = [v for op in graph.ops for v in (*op.inputs, *op.outputs)] + list(graph.outputs)
    for value in values:
        names.setdefault(value, len(names))

    def of(values):
        return [(names[v], graph.types[v], v in graph.constants) for v in values]

    ops = [
        (op.primitive, str(op.signature.params), of(op.inputs), of(op.outputs), op.scope, op.phase, op.trips, op.serial)
        for op in graph.ops
    ]
    ties = [(names[t.made], names[t.carry], t.trips) for t in graph.ties]
    return ops, of(graph.outputs), ties, graph.loops, graph.whiles, graph.donated, graph.state


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_graph_has_the_ids_of_the_program(program):
    function, args = PROGRAMS[program]
    traced = trace(function, *args)
    equations = {one.id: one.equation for one in traced.call.program.walk() if not one.regions}
    taken = [op for op in traced.graph.ops if op.equation is not None]
    assert all(equations[op.serial] is op.equation for op in taken)
    own = {op.serial for op in traced.graph.ops} - {op.serial for op in taken}
    around = [
        number
        for one in traced.call.program.walk()
        if one.regions
        for number in (*one.carry_ids, *one.slice_ids, *one.result_ids)
        if not one.is_checkpoint
    ]
    assert own <= set(around) and len(set(around)) == len(around) and equations.keys().isdisjoint(around)


@pytest.mark.parametrize("program", ["many layers", "in a loop", "with aliases", "of branches"])
def test_functions_that_are_called_often_are_as_if_written_out(program, monkeypatch):
    function, args = PROGRAMS[program]
    called = told(trace(function, *args).graph)
    monkeypatch.setitem(globals(), "layer", layer.__wrapped__)
    assert without_scopes(told(trace(lambda *args: function(*args), *args).graph)) == without_scopes(called)


def without_scopes(graph):
    ops, *rest = graph
    return [(*op[:4], *op[5:]) for op in ops], rest


def test_what_is_given_away_inside_a_copy_is_the_callers_own():
    inner = jax.jit(lambda x, y: (x + y, y * 2), donate_argnums=0)

    @jax.jit
    def twice(x, y):
        return inner(x, y)

    def step(a, b, c):
        return twice(a, c), twice(b, c), twice(a + b, c)

    graph = trace(step, vector(4), vector(4), vector(4)).graph
    assert graph.donated == {0, 1}


def test_parameters_that_cannot_be_hashed():
    @partial(jax.custom_vjp, nondiff_argnums=(1,))
    def scaled(x, scale):
        return jnp.tanh(x) * scale

    scaled.defvjp(lambda x, scale: (scaled(x, scale), x), lambda scale, x, g: (g * scale,))
    graph = trace(lambda x: scaled(x, 2.0) + scaled(x, 3.0), vector(4)).graph
    assert [op.primitive for op in graph.ops] == ["tanh", "mul", "tanh", "mul", "add"]
