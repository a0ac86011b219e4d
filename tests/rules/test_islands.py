"""Functions written for each device: loops, flops and collectives as their specs and their bodies say."""

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AbstractMesh, AxisType

from meshwright.rules import loop_nest
from meshwright.rules.base import Sent

from .contract import signature_of

MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def nest_of(body, *shapes, **specs):
    function = jax.shard_map(body, mesh=MESH, **specs)
    traced = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    return loop_nest(next(signature_of(eqn) for eqn in traced.jaxpr.eqns if eqn.primitive.name == "shard_map"))


def test_each_manual_axis_is_a_loop_and_a_devices_own_part_stays_whole():
    nest = nest_of(lambda a: 2 * a, (16, 6), in_specs=P(("data", "model")), out_specs=P(("data", "model")))
    assert [(loop.size, loop.kind) for loop in nest.loops[:2]] == [(4, "parallel"), (2, "parallel")]
    (rows, columns), (result, _) = nest.operands[0], nest.results[0]
    assert rows[:2] == result[:2] == (0, 1)
    assert {nest.loops[rows[2]].kind, nest.loops[columns[0]].kind} == {"unsplittable"}
    assert nest.loops[rows[2]].size == 2 and nest.leads


def test_the_flops_are_those_of_all_devices_and_of_all_trips():
    def body(a, b):
        return jax.lax.fori_loop(0, 3, lambda _, x: x @ b, a)

    nest = nest_of(body, (8, 4), (4, 4), in_specs=(P("data"), P()), out_specs=P("data"))
    assert nest.flops == 3 * (2 * 2 * 4 * 4) * 8  # each of 8 devices multiplies 2×4 by 4×4; model's devices repeat it


@pytest.mark.parametrize(
    ("body", "rows", "sent"),
    [
        (lambda a: jax.lax.psum(a, "model"), 8, Sent("all_reduce", ("model",), 32.0, 1.0)),
        (lambda a: jax.lax.all_gather(a, "model", axis=1, tiled=True), 8, Sent("all_gather", ("model",), 64.0, 1.0)),
        (lambda a: jax.lax.psum_scatter(a, "data", tiled=True), 32, Sent("reduce_scatter", ("data",), 128.0, 1.0)),
        (lambda a: jax.lax.ppermute(a, "data", [(0, 1), (1, 0)]), 8, Sent("permute", ("data",), 32.0, 1.0)),
        (lambda a: jax.lax.all_to_all(a, "model", 1, 0, tiled=True), 8, Sent("all_to_all", ("model",), 64.0, 1.0)),
    ],
)
def test_collectives_of_the_body_are_part_of_the_operation(body, rows, sent):
    spec = P("data", "model")  # each device has rows / 4 × 4 floats
    assert nest_of(body, (rows, 8), in_specs=spec, out_specs=spec, check_vma=False).sent == (sent,)
