"""What was traced again has the ids of what it was traced from."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.matching import with_ids_of
from meshwright.program.program import UNPLANNED, Program


def _layers(x, w, both=True):
    """Layers whose sum is widened, as that of a half-precision gradient is, and one or both of their results."""

    def layer(total, w):
        y = jnp.tanh(x @ w)
        return total + y.astype(jnp.float32).sum(0), (y * 2, y) if both else y

    return lax.scan(layer, jnp.zeros(4), w)


X, W = jnp.ones((2, 4), jnp.bfloat16), jnp.ones((3, 4, 4), jnp.bfloat16)


def _loop(dtype=jnp.bfloat16, rows=2, both=True):
    """The program of the layers for some rows of some type, and the loop in it."""
    args = jax.ShapeDtypeStruct((rows, 4), dtype), jax.ShapeDtypeStruct((3, 4, 4), dtype)
    program = Program.of(jax.make_jaxpr(partial(_layers, both=both))(*args))
    (loop,) = (one for one in program.operations if one.name == "scan")
    return replace(program, operations=[loop]), loop


def test_operations_of_a_loop_keep_their_ids_where_a_conversion_is_gone():
    _, original = _loop()
    matched = with_ids_of(original, _loop(jnp.float32)[0], original.outputs)
    assert matched is not None
    (loop,) = matched.operations
    assert (loop.id, loop.num_ids) == (original.id, original.num_ids)
    assert [one.name for one in loop.regions[0].operations] != [one.name for one in original.regions[0].operations]
    ids = {one.name: one.id for one in loop.regions[0].walk()}
    assert ids == {one.name: one.id for one in original.regions[0].walk() if one.name in ids}


def test_a_scatter_whose_operands_are_widened_keeps_its_id_and_the_conversions_have_none():
    """As the gradient of a bfloat16 look-up is, whose contributions are added up in float32."""

    def contribution(total, rows, wide):
        total, rows = (x.astype(jnp.float32) if wide else x for x in (total, rows))
        return total.at[jnp.array([1, 0])].add(rows, mode="promise_in_bounds")

    narrow = Program.of(jax.make_jaxpr(partial(contribution, wide=False))(W[0], X))
    wide = Program.of(jax.make_jaxpr(partial(contribution, wide=True))(W[0], X), UNPLANNED)
    (original,) = (one for one in narrow.operations if one.name == "scatter-add")
    traced = [one for one in wide.operations if one.name in ("scatter-add", "convert_element_type")]
    matched = with_ids_of(original, Program(operations=traced), original.outputs)
    assert matched is not None
    assert [(one.name, one.id) for one in matched.operations if one.id < UNPLANNED] == [("scatter-add", original.id)]


def test_a_part_of_the_batch_runs_the_same_operations():
    _, original = _loop()
    matched = with_ids_of(original, _loop(rows=1)[0], original.outputs)
    assert matched is not None
    assert [one.id for one in matched.walk()] == [original.id, *(one.id for one in original.regions[0].walk())]


def test_results_that_are_left_keep_their_ids():
    _, original = _loop()
    first, _, last = original.outputs
    body = original.regions[0]
    fewer = [operation for operation in body.operations if operation.name != "mul"]  # what the other result is made of
    original = original._replace(regions=(replace(body, operations=fewer),))
    matched = with_ids_of(original, _loop(both=False)[0], (first, last))
    assert matched is not None and matched.operations[0].result_ids == [original.result_ids[1]]


def test_what_runs_another_operation_has_no_ids():
    _, original = _loop()
    other = Program.of(jax.make_jaxpr(lambda x, w: lax.scan(lambda c, w: (c + w.sum(), jnp.sin(x @ w)), 0.0, w))(X, W))
    assert with_ids_of(original, Program(operations=[o for o in other.operations if o.regions]), ()) is None
    assert with_ids_of(original, Program(), ()) is None  # a loop does not vanish
