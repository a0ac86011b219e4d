"""Calling with types: which leaves are arrays, what is kept, and how what JAX refuses is said."""

import enum

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.graph.tracing.call import call_abstractly


def vector(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def names(call):
    return [operation.name for operation in call.program.operations]


def test_leaves_that_are_not_arrays_are_kept_as_they_are():
    def apply(function, x, name):
        assert name == "double"
        return {"function": function, "y": function(x), "name": name}

    def double(x):
        return 2 * x

    call = call_abstractly(apply, (double, vector(3), "double"))
    assert call.arguments.positions == (None, 0, None)
    assert call.arguments.paths == ("x",)
    assert call.results.positions == (None, None, 0)
    assert call.results.paths == ("out/y",)
    assert call.results.fill(["made"]) == {"function": double, "y": "made", "name": "double"}
    assert call.results.bare.fill(["made"]) == {"function": None, "y": "made", "name": None}


def test_numbers_are_traced_where_jax_can():
    call = call_abstractly(lambda x, flag, rate: jnp.where(flag, rate * x, 0), (vector(3), True, 0.5))
    assert call.arguments.paths == ("x", "flag", "rate")
    assert call.arguments.positions == (0, 1, 2)


def test_a_switch_that_python_reads_is_kept_and_numbers_are_still_traced():
    def function(options, x):
        y = jnp.sin(x) if options["fast"] else jnp.cos(x)
        return options, y * options["rate"]

    call = call_abstractly(function, ({"fast": True, "rate": 0.5}, vector(3)))
    assert call.arguments.paths == ("options/rate", "x")
    assert names(call)[0] == "sin"
    assert call.results.leaves == (True, None, None)
    assert names(call_abstractly(function, ({"fast": False, "rate": 0.5}, vector(3))))[0] == "cos"


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: sum(x + i for i in range(n)),
        lambda x, n: x.reshape(n, -1),
        lambda x, n: jnp.zeros(n) + x[0],
        lambda x, n: [x, -x, x, x][n],
    ],
    ids=["range", "reshape", "shape", "index"],
)
def test_a_number_that_python_reads_is_kept(function):
    call = call_abstractly(function, (vector(4), 2))
    assert call.arguments.paths == ("x",)
    assert call.arguments.leaves == (None, 2)


def test_numbers_of_the_users_own_kind_are_kept():
    class Mode(enum.IntEnum):
        FAST = 1

    call = call_abstractly(lambda x, mode: x + 1 if mode is Mode.FAST else x, (vector(3), Mode.FAST))
    assert call.arguments.paths == ("x",)
    assert names(call) == ["add"]


@pytest.mark.parametrize(
    ("function", "args", "words"),
    [
        (lambda x, y: x @ y, (vector(2, 3), vector(4, 5)), ["dot_general", "(3,)", "(4,)"]),
        (lambda x: x if x.sum() > 0 else -x, (vector(3),), ["TracerBoolConversionError"]),
        (lambda x: x["missing"], ({"x": vector(3)},), ["KeyError", "missing"]),
        (lambda x: np.asarray(x), (vector(3),), ["TracerArrayConversionError"]),
        (lambda x, y: x, (vector(3),), ["TypeError", "y"]),
    ],
    ids=["shapes", "branch on a tracer", "key", "numpy", "too few arguments"],
)
def test_what_does_not_trace_is_said_in_one_paragraph(function, args, words):
    with pytest.raises(mw.TraceError) as caught:
        call_abstractly(function, args)
    message = str(caught.value)
    assert "\n" not in message
    assert "jax.jit" in message  # the remedy
    for word in words:
        assert word in message


def test_a_refusal_names_the_users_function_and_argument():
    def choose(state, x):
        return x if state["on"] else -x

    with pytest.raises(mw.TraceError) as caught:
        call_abstractly(choose, ({"a": vector(2), "on": vector(dtype=jnp.bool_)}, vector(3)))
    assert "tracing the function choose at" in str(caught.value)
    assert "the argument state['on']" in str(caught.value)


def test_an_array_that_jax_does_not_know_is_named():
    with pytest.raises(mw.TraceError, match=r"argument state/words: .*not a valid JAX array type"):
        call_abstractly(lambda state, x: x, ({"words": np.array(["a", "b"])}, vector(3)))
