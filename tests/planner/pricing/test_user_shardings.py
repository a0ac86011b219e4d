"""Shardings that a plan cannot have: the message names the line, the axis, the mesh and the remedy."""

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding

import meshwright as mw

X, W = jnp.ones((8, 16)), jnp.ones((16, 8))
MESH = {"data": 4, "model": 2}


def plan_of(sharding, mesh=None, method=None, rows=8):
    def f(x, w):
        return jax.lax.with_sharding_constraint((x @ w)[:rows], sharding)

    return mw.plan(f, X, W, cluster="1x8 h100", mesh=mesh, method=method)


def other_mesh(names=("data", "model"), sizes=(2, 4)):
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.mark.parametrize(
    ("sharding", "mesh", "message"),
    [
        (P("data"), None, r"Plan it for a mesh that has the axes .* mesh=\{'data': 4, 'model': 2\}"),
        (
            NamedSharding(other_mesh(), P("data")),
            None,
            r"test_user_shardings.py:\d+.*axis 'data' is not on mesh \{'x': 8\}, whose axes are x; plan for the mesh .*"
            r"mesh=\{'data': 2, 'model': 4\}",
        ),
        (
            NamedSharding(other_mesh(), P("data")),
            MESH,
            r"axis 'data' has 2 devices in the function and 4 on mesh .*mesh=\{'data': 2, 'model': 4\}",
        ),
        (P(("model", "data")), MESH, r"write the axes of a dim in the mesh's order, data, model"),
    ],
)
def test_a_constraint_that_the_mesh_does_not_know_is_refused(sharding, mesh, message):
    with pytest.raises(mw.MeshwrightError, match=message):
        plan_of(sharding, mesh)


def test_a_constraint_that_does_not_divide_is_refused():
    with pytest.raises(mw.ShardingError, match=r"a dim of 6 \(shape \(6, 8\)\) cannot be split evenly into 4"):
        plan_of(P("data"), MESH, rows=6)


def test_an_island_without_or_on_another_mesh_is_refused():
    def f(x, mesh=None):
        return jax.shard_map(lambda a: 2 * a, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    with pytest.raises(mw.TraceError, match="Plan it for a mesh that has the axes and the sizes"):
        mw.plan(f, X, cluster="1x8 h100")
    with pytest.raises(
        mw.TraceError, match=r"should match the mesh passed to shard_map.*mw.current_mesh\(\) returns it"
    ):
        mw.plan(lambda x: f(x, other_mesh()), X, cluster="1x8 h100", mesh=MESH)
    with pytest.raises(mw.ShardingError, match=r"shard_map: axis 'data' is not on mesh \{'x': 8\}"):
        mw.plan(lambda x: f(x, other_mesh()), X, cluster="1x8 h100")


def test_views_without_the_axis_are_left_out():
    plan = plan_of(NamedSharding(other_mesh(("x", "y")), P("y")))
    assert plan.mesh.shape == {"x": 2, "y": 4} and plan.out_shardings == P("y")


def test_a_pipeline_is_refused():
    with pytest.raises(mw.ShardingError, match="a pipeline gives each stage a mesh of its own"):
        plan_of(NamedSharding(other_mesh(("x", "y")), P("y")), method=mw.Auto(pipeline=True))


def test_a_constraint_to_one_device_is_a_whole_value():
    assert plan_of(SingleDeviceSharding(jax.devices()[0]), MESH).out_shardings == P()


def test_two_constraints_that_differ_both_hold_and_the_plan_says_so():
    def f(x, w):
        first = jax.lax.with_sharding_constraint(x @ w, P("data"))
        return jax.lax.with_sharding_constraint(first, P(None, "model"))

    plan = mw.plan(f, X, W, cluster="1x8 h100", mesh=MESH)
    (remark,) = plan.remarks
    assert r"as P('data', None) and as P(None, 'model')" in remark and remark.count("test_user_shardings.py") == 2
    assert plan.out_shardings == P(None, "model") and any(c.purpose == "reshard" for c in plan.collectives)


def test_equal_constraints_are_no_remark():
    def f(x, w):
        first = jax.lax.with_sharding_constraint(x @ w, P("data"))
        return jax.lax.with_sharding_constraint(first, P("data")) * 2

    assert not mw.plan(f, X, W, cluster="1x8 h100", mesh=MESH).remarks


def test_device_put_inside_the_function_is_a_constraint():
    sharding = NamedSharding(other_mesh(sizes=(4, 2)), P(None, "model"))
    plan = mw.plan(lambda x, w: jax.device_put(x @ w, sharding) * 2, X, W, cluster="1x8 h100", mesh=MESH)
    (moved,) = [op for op in plan.ops if op.label.endswith("device_put")]
    assert moved.results == (((), ("model",)),)


def test_shardings_of_a_jitted_function_are_named_as_not_followed():
    rows = NamedSharding(other_mesh(sizes=(4, 2)), P("data"))

    def twice(x):
        return x * 2

    inner = jax.jit(twice, in_shardings=rows, out_shardings=rows)
    plan = mw.plan(lambda x, w: jax.jit(inner)(x) @ w, X, W, cluster="1x8 h100", mesh=MESH)
    (remark,) = plan.remarks
    assert "in_shardings and out_shardings" in remark and "mw.Auto(fix=" in remark and "jax.jit(twice)" in remark
    assert not mw.plan(lambda x, w: jax.jit(lambda x: x * 2)(x) @ w, X, W, cluster="1x8 h100").remarks
