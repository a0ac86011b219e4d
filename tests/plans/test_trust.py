"""A plan says how far its step may be off, and which operations are priced without measurement."""

import json

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.cost.xla_gpu.kernels import arithmetic_left, counted, num_experts, rate_left, workspace_bytes
from meshwright.graph import trace
from meshwright.hardware import Mesh


def arrays(*shapes, dtype="float32"):
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def planned(function, *args, cluster="1x1 h200"):
    return mw.plan(function, *args, cluster=cluster, mesh=(1,))


def signature(function, *args, primitive):
    return next(op.signature for op in trace(function, *args).graph.ops if op.primitive == primitive)


def test_the_interval_is_printed_beside_the_step():
    plan = planned(lambda x, w: x @ w, *arrays((4096, 4096), (4096, 4096), dtype="bfloat16"))
    assert plan.trust.low_s < plan.step_s < plan.trust.high_s
    assert plan.trust.interval in str(plan) and sum(plan.trust.shares.values()) == pytest.approx(1)
    assert next(iter(plan.trust.shares)) == "products" and not plan.trust.remarks


def test_what_is_priced_without_measurement_is_said():
    plan = planned(lambda x: jax.lax.cummax(x, 1) * 2, *arrays((4096, 4096)))
    assert plan.trust.unmeasured["cummax"] > 0.5
    (said,) = plan.trust.remarks
    assert "priced without measurement: cummax" in said and said in " ".join(str(plan).split())
    wide = plan.trust.high_s / plan.trust.low_s
    narrow = planned(lambda x: x * 2, *arrays((4096, 4096))).trust
    assert wide > narrow.high_s / narrow.low_s


def test_where_nothing_is_known_nothing_is_said():
    mesh = Mesh.abstract((2,), alpha=(1,), beta=(1,))
    assert mw.plan(lambda x: x * 2, *arrays((8, 8)), mesh=mesh).trust is None
    assert planned(lambda x: x * 2, *arrays((8, 8)), cluster="1x1 cpu").trust is None


def test_ragged_products_are_priced_over_all_experts():
    rows, weights = arrays((8192, 1024), (8, 1024, 2048), dtype="bfloat16")
    sizes = jax.ShapeDtypeStruct((8,), "int32")
    ragged = planned(jax.lax.ragged_dot, rows, weights, sizes)
    plain = planned(lambda x, w: x @ w, rows, jax.ShapeDtypeStruct((1024, 2048), "bfloat16"))
    assert ragged.step_s > 5 * plain.step_s and ragged.flops == plain.flops
    assert any("ragged_dot" in remark and "all 8" in remark for remark in ragged.remarks)
    op = signature(jax.lax.ragged_dot, rows, weights, sizes, primitive="ragged_dot_general")
    assert num_experts(op) == 8 and rate_left(op) == 1 / 8


def test_windows_with_holes_and_few_features_waste_arithmetic():
    def convolve(x, w, holes=1):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID", rhs_dilation=(holes,), dimension_numbers=DIMS)

    x, w, few = arrays((8, 1024, 64), (2, 64, 64), (2, 64, 3))
    dense = signature(convolve, x, w, primitive="conv_general_dilated")
    apart = signature(lambda x, w: convolve(x, w, 8), x, w, primitive="conv_general_dilated")
    assert arithmetic_left(apart) == pytest.approx(2 / 9 * arithmetic_left(dense))
    assert arithmetic_left(signature(convolve, x, few, primitive="conv_general_dilated")) < 0.1


DIMS = ("NWC", "WIO", "NWC")


def test_look_ups_scatters_and_sorts_take_longer_than_their_bytes():
    table, ids = jax.ShapeDtypeStruct((1000, 64), "float32"), jax.ShapeDtypeStruct((5000,), "int32")
    rows = jax.ShapeDtypeStruct((5000, 64), "float32")
    assert counted(signature(lambda t, i: t[i], table, ids, primitive="gather")) > 0
    add = signature(lambda t, i, r: t.at[i].add(r), table, ids, rows, primitive="scatter-add")
    assert counted(add) > 5000 * 64
    short, long = (signature(jnp.sort, *arrays((64, n)), primitive="sort") for n in (16, 1024))
    assert counted(long) / counted(short) > 64
    assert counted(signature(lambda x: x * 2, rows, primitive="mul")) == 0


def test_sums_were_measured_of_scatters_and_minima_were_not():
    rows, ids = jax.ShapeDtypeStruct((500_000, 8), "float32"), jax.ShapeDtypeStruct((500_000,), "int32")
    added, largest = (
        planned(lambda x, i, how=how: how(x, i, 1000), rows, ids) for how in (jax.ops.segment_sum, jax.ops.segment_min)
    )
    assert largest.step_s > added.step_s and "scatter-min" in " ".join(largest.trust.unmeasured).replace("_", "-")
    assert not added.trust.unmeasured


def test_memory_that_kernels_take_while_they_run():
    def upscaled(x, w):
        return jax.lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    image, window = arrays((8, 16, 16, 32), (4, 4, 32, 3))
    gradient = jax.grad(lambda w, x: upscaled(x, w).sum())
    kinds = (op.signature for op in trace(gradient, window, image).graph.ops)
    rooms = [workspace_bytes(op) for op in kinds if op.primitive == "conv_general_dilated"]
    assert max(rooms) == 4 * 8 * 35 * 35 * 32  # pixels with zeros between and around them
    rows, weights = arrays((64, 16), (4, 16, 32), dtype="bfloat16")
    sizes = jax.ShapeDtypeStruct((4,), "int32")
    op = signature(jax.lax.ragged_dot, rows, weights, sizes, primitive="ragged_dot_general")
    assert workspace_bytes(op) == 2 * 4 * 64 * 16 * 2  # masked for every matrix, and in the order of a product


def test_loops_of_which_nobody_knows_the_trips_are_said():
    def until_small(x):
        return jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x * 0.5, x)

    x = jax.ShapeDtypeStruct((4096, 4096), "float32")
    found = mw.plan(until_small, x, cluster="1x1 h200").trust
    assert "is priced as one trip" in str(found) and "test_trust.py" in str(found)
    assert found.high_s == float("inf") and found.interval.endswith(" or more")
    assert not mw.plan(lambda x: x * 0.5, x, cluster="1x1 h200").trust.loops


def test_the_interval_reaches_from_one_trip_to_the_most():
    def settle(x, rounds):
        def advance(state):
            return state[0] + 1, state[1] @ state[1]

        return jax.lax.while_loop(lambda s: (s[0] < rounds) & (jnp.max(s[1]) < 9), advance, (0, x))[1]

    x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16")
    short, long = (planned(lambda x, n=n: settle(x, n), x) for n in (1, 20))
    assert long.step_s > 15 * short.step_s
    assert long.trust.high_s > long.step_s > short.step_s > long.trust.low_s
    assert "priced as 20 trips, the most that it takes" in str(long.trust)


def test_plans_of_earlier_versions_say_that_there_are_loops(tmp_path):
    path = tmp_path / "plan.json"
    plan = planned(lambda x: jax.lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x * 0.5, x), *arrays((4096, 4096)))
    plan.save(path)
    assert mw.Plan.load(path).trust.remarks == plan.trust.remarks
    path.write_text(json.dumps(json.loads(path.read_text()) | {"provenance": {"loops": "assumed: one trip for each"}}))
    assert "A while loop is priced as one trip" in str(mw.Plan.load(path).trust)
