"""`mw.current_mesh`: the planned mesh inside the function, and JAX's mesh in context if the user names its axes."""

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw

SEEN = []


def f(x):
    SEEN.append((mw.current_mesh().shape, jax.sharding.get_abstract_mesh().axis_names))
    return x * 2


@pytest.mark.parametrize(
    ("mesh", "shape", "in_context"),
    [
        ({"data": 4, "model": 2}, {"data": 4, "model": 2}, ("data", "model")),
        ((4, 2), {"x": 4, "y": 2}, ()),
        (jax.sharding.AbstractMesh((8,), ("all",)), {"all": 8}, ("all",)),
    ],
)
def test_it_is_the_planned_mesh_while_planning_and_running(mesh, shape, in_context):
    SEEN.clear()
    mw.parallelize(f, cluster="1x8 cpu", mesh=mesh)(jnp.ones(8))
    assert len(SEEN) >= 2 and all((dict(found), names) == (shape, in_context) for found, names in SEEN)


def test_without_a_mesh_it_says_how_to_give_one():
    with pytest.raises(mw.ShardingError, match=r"mesh=\{'data': 4, 'model': 2\}"):
        mw.plan(f, jnp.ones(8), cluster="1x8 cpu")
    with pytest.raises(mw.ShardingError, match="call it inside a function"):
        mw.current_mesh()


def test_an_axis_that_the_mesh_does_not_have_is_named_with_the_remedy():
    def constrained(x):
        return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec("model"))

    with pytest.raises(mw.TraceError, match=r"model.*\('data', 'tensor'\).*Plan it for a mesh that has the axes"):
        mw.plan(constrained, jnp.ones(8), cluster="1x8 cpu", mesh={"data": 2, "tensor": 4})


def test_specs_that_no_mesh_could_honour_are_not_answered_with_another_mesh():
    def twice(x):
        return jax.lax.with_sharding_constraint(x, jax.P("data", "data"))

    with pytest.raises(mw.TraceError, match=r"duplicate entries for `data`.*Check that it runs"):
        mw.plan(twice, jnp.ones((8, 8)), cluster="1x8 h100", mesh={"data": 4, "model": 2})


def test_a_reshard_over_automatic_axes_is_refused_with_both_remedies():
    def resharded(x):
        return jax.sharding.reshard(x, jax.P("data"))

    with pytest.raises(mw.TraceError, match=r"of type: AxisType.Auto.*with_sharding_constraint, or plan.*Explicit"):
        mw.plan(resharded, jnp.ones((8, 8)), cluster="1x8 h100", mesh={"data": 4, "model": 2})
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    plan = mw.plan(resharded, jnp.ones((8, 8)), cluster="1x8 h100", mesh=mesh)
    assert plan.out_shardings == jax.P("data")
