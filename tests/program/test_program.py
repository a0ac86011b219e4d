"""Traced programs as lists of operations: which of them must run for some values."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from meshwright.program.program import Program
from meshwright.program.text import first_difference, program_form
from tests.generator.programs import Drawn


def test_of_a_loop_over_layers_runs_only_what_leads_to_the_values_that_are_needed():
    def stack(x, scales, weights):
        """Layers, and their scales as the backward pass reads them, which need neither examples nor weights."""
        return lax.scan(lambda x, layer: ((x * layer[0]) @ layer[1], layer[0][None]), x, (scales, weights))

    x, scales, weights = jnp.ones((2, 3)), jnp.arange(12.0).reshape(4, 3), jnp.ones((4, 3, 3))
    program = Program.of(jax.make_jaxpr(stack)(x, scales, weights))
    last, wide = program.outputs
    (loop,) = program.needed([wide])
    assert (loop.inputs, loop.outputs) == ((1,), (wide,))
    np.testing.assert_array_equal(loop.run([scales])[0], scales[:, None])
    (whole,) = program.needed([last, wide])
    assert whole is program.operations[-1] and set(whole.inputs) >= {0, 1, 2}


def step(x, w):
    """A loop of layers that are checkpointed, a loop without a known length, and branches."""

    def layer(carry, w):
        carry = jax.checkpoint(jax.jit(lambda carry: jnp.tanh(carry @ w)))(carry)
        return carry, carry.sum()

    x, sums = lax.scan(layer, x, w)
    count, x = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))
    return lax.cond(sums.sum() > count, lambda x: x * 2.0, lambda x: x - 1.0, x), sums


X, W = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4), np.linspace(0, 1, 48, dtype=np.float32).reshape(3, 4, 4)


def test_a_program_computes_what_the_function_does():
    program = Program.of(jax.make_jaxpr(step)(X, W))
    for found, expected in zip(jax.jit(lambda *args: program.run(args))(X, W), jax.jit(step)(X, W), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_every_operation_and_every_value_that_enters_or_leaves_a_region_has_an_id_of_its_own():
    program = Program.of(jax.make_jaxpr(step)(X, W), first_id=7)
    loop, *_, branches = (one for one in program.operations if one.regions)
    assert loop.name == "scan" and (loop.carry_ids, loop.slice_ids, loop.result_ids) == (
        range(7, 8),
        range(8, 9),
        range(loop.id + loop.num_ids - 1, loop.id + loop.num_ids),
    )
    assert branches.name == "cond" and len(branches.result_ids) == 1
    ids = [one.id for one in program.walk() if not one.regions]
    for one in program.walk():
        if one.regions and not one.is_checkpoint:
            ids += [*one.carry_ids, *one.slice_ids, *one.result_ids]
    assert sorted(ids) == list(range(7, 7 + program.num_ids))


def test_an_operation_knows_the_calls_and_the_line_it_was_written_in():
    program = Program.of(jax.make_jaxpr(step)(X, W))
    tanh = next(one for one in program.walk() if one.name == "tanh")
    assert [call.primitive.name for call in tanh.calls] in (["jit"], ["pjit"])
    assert "test_program.py" in tanh.source and "test_program.py" in str(tanh)


def test_a_program_is_printed_as_a_page_that_names_ids_types_and_lines():
    text = str(Program.of(jax.make_jaxpr(step)(X, W)))
    assert "scan[length=3]" in text and "f32[2,4]" in text and "test_program.py" in text
    (line,) = (line for line in text.splitlines() if "tanh(" in line)
    assert line.startswith("        #2 ") or line.startswith("        #3 ")


@functools.cache
def drawn(seed):
    """A function of random operations, and its program."""
    one = Drawn(seed)
    return one, Program.of(jax.make_jaxpr(one)(*one.args))


def changed(program, rng):
    """A program with one operation changed, and that operation: it is gone, makes another type, or reads others."""
    place, other = rng.integers(len(program.operations)), program.copy()
    one, kind = program.operations[place], rng.integers(4)
    if kind == 0:
        del other.operations[place]
    elif kind == 1:
        aval = program.types[one.outputs[0]]
        other.types[one.outputs[0]] = jax.ShapeDtypeStruct((*aval.shape, 7), aval.dtype)
    elif kind == 2:
        dtype = jnp.int8 if program.types[one.outputs[0]].dtype != jnp.int8 else jnp.int16
        other.types[one.outputs[0]] = jax.ShapeDtypeStruct(program.types[one.outputs[0]].shape, dtype)
    else:
        other.operations[place] = one._replace(inputs=(*one.inputs, program.inputs[0]))
    return one, other


@pytest.mark.parametrize("seed", range(6))
def test_a_form_is_that_of_one_program_and_differs_where_one_operation_does(seed):
    one, program = drawn(seed)
    form = program_form(program)
    assert form == program_form(Program.of(jax.make_jaxpr(lambda *args: one(*args))(*one.args)))  # traced anew
    assert form != program_form(drawn(seed + 1)[1]) and "test_program" not in form and " at 0x" not in form
    rng = np.random.default_rng(seed)
    for _ in range(8):
        operation, other = changed(program, rng)
        planned, found = first_difference(form, program_form(other))
        assert planned != found and planned.startswith(f"#{operation.id} ")


def test_a_form_does_not_say_what_constants_are_and_says_what_parameters_are():
    def form(function):
        return program_form(Program.of(jax.make_jaxpr(function)(X)))

    assert form(lambda x: x * 2.0 + np.ones(4, np.float32)) == form(lambda x: x * 3.0 + np.zeros(4, np.float32))
    assert form(lambda x: lax.rev(x, (0,))) != form(lambda x: lax.rev(x, (1,)))
    assert form(lambda x: x + np.ones(4, np.float32)) != form(lambda x: x + np.ones((2, 4), np.float32))
