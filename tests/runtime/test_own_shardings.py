"""Shardings that the user wrote into the function: the plan has them, and the numbers are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import AxisType, NamedSharding

import meshwright as mw

MESH = {"data": 4, "model": 2}
X = jnp.cos(jnp.arange(128.0)).reshape(8, 16)
W = {"in": jnp.sin(jnp.arange(128.0)).reshape(16, 8), "out": jnp.cos(jnp.arange(64.0)).reshape(8, 8)}


def constrained(w, x):
    hidden = jax.lax.with_sharding_constraint(x @ w["in"], P("data", P.UNCONSTRAINED))
    hidden = jax.lax.with_sharding_constraint(jnp.tanh(hidden), NamedSharding(mw.current_mesh(), P(None, "model")))
    rows = jax.lax.with_sharding_constraint(jnp.arange(8.0), P("data"))  # cheap, and yet as written
    return ((hidden @ w["out"]).sum(1) * rows).mean()


def with_islands(w, x):
    def layer(hidden, _):
        product = jax.shard_map(
            lambda a, b: jax.lax.psum(a @ b, "model") + jax.lax.axis_index("data"),
            in_specs=(P("data", "model"), P("model")),
            out_specs=P("data"),
        )
        return jax.lax.with_sharding_constraint(jnp.tanh(product(hidden, w["out"])), P("data", "model")), None

    return jax.lax.scan(jax.checkpoint(layer), x @ w["in"], length=2)[0].mean()


def explicit(w, x):
    x, kernel = jax.sharding.reshard(x, P("data", None)), jax.sharding.reshard(w["in"], P("model", None))
    hidden = jnp.tanh(jnp.einsum("bd,df->bf", x, kernel, out_sharding=P("data", None)))
    automatic = jax.sharding.auto_axes(
        lambda h: jax.lax.with_sharding_constraint(2 * h, P("data", "model")), out_sharding=P("data", "model")
    )
    return jnp.sum(hidden * automatic(hidden)) + jnp.sum(w["out"])


def step_of(loss):
    def step(w, x):
        value, gradient = jax.value_and_grad(loss)(w, x)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, gradient), value

    return step


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)


@pytest.mark.devices
@pytest.mark.parametrize(
    ("loss", "mesh", "method"),
    [
        (constrained, MESH, "auto"),
        (with_islands, MESH, "auto"),
        (with_islands, MESH, "zero3"),
        (explicit, mesh_of(AxisType.Explicit), "auto"),
    ],
)
def test_numbers_are_those_of_one_device_and_xla_sends_what_is_planned(loss, mesh, method, monkeypatch):
    step = step_of(loss)
    run = mw.parallelize(step, cluster="1x8 cpu", mesh=mesh, method=method, donate_argnums=())
    found = run(W, X)
    monkeypatch.setattr("meshwright.current_mesh", jax.sharding.get_abstract_mesh)
    with jax.set_mesh(mesh_of(AxisType.Explicit if loss is explicit else AxisType.Auto)):
        wanted = jax.jit(step)(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5), found, wanted)
    monkeypatch.undo()
    verified = mw.plan(step, W, X, cluster="1x8 cpu", mesh=mesh, method=method).verify()
    assert verified.bytes.ratio == pytest.approx(1.0)


def results_of(plan, primitive, phase="forward"):
    return [op.results[0] for op in plan.ops if op.label.endswith(primitive) and op.phase == phase]


def test_constraints_are_choices_of_the_plan():
    plan = mw.plan(step_of(constrained), W, X, cluster="1x8 cpu", mesh=MESH)
    first, second, rows = results_of(plan, "sharding_constraint")
    assert first[0] == ("data",) and second == ((), ("model",)) and rows == (("data",),)


def test_islands_read_and_make_exactly_their_specs_and_their_sums_are_priced():
    plan = mw.plan(with_islands, W, X, cluster="1x8 cpu", mesh=MESH)
    islands = [op for op in plan.ops if op.label.endswith("shard_map") and op.phase == "forward"]
    assert ((("data",), ("model",)), (("model",), ())) in {op.operands for op in islands}
    sums = [c for c in plan.collectives if c.operation.endswith("shard_map") and c.kind == "all_reduce"]
    assert {("model",)} <= {c.axes for c in sums}
    assert "shard_map" not in plan.unsplittable


def test_reshards_of_explicit_axes_are_choices_of_the_plan():
    plan = mw.plan(step_of(explicit), W, X, cluster="1x8 cpu", mesh=mesh_of(AxisType.Explicit))
    assert results_of(plan, "reshard")[:2] == [(("data",), ()), (("model",), ())]
    assert results_of(plan, "dot_general")[0] == (("data",), ())


def test_a_saved_plan_keeps_the_names_and_runs(tmp_path):
    step = step_of(constrained)
    mw.plan(step, W, X, cluster="1x8 cpu", mesh=MESH).save(tmp_path / "plan.json")
    plan = mw.Plan.load(tmp_path / "plan.json")
    assert plan.mesh.shape == MESH and plan.mesh.axis_names == ("data", "model")
    new, value = mw.parallelize(step, method=plan, donate_argnums=())(W, X)
    assert np.isfinite(value) and new["in"].sharding.mesh.axis_names == ("data", "model")


def test_a_mesh_that_the_user_made_of_the_local_devices_is_the_planned_one():
    mesh = mesh_of(AxisType.Auto)
    island = jax.shard_map(lambda a: 2 * a, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    placed = NamedSharding(mesh, P(None, "model"))
    found = mw.parallelize(lambda x: jax.device_put(island(x), placed) + 1, cluster="1x8 cpu", mesh=mesh)(X)
    np.testing.assert_array_equal(found, 2 * X + 1)


def test_an_island_that_is_manual_along_one_axis_repeats_its_work_along_the_other():
    def f(x, w):
        island = jax.shard_map(lambda a, b: a @ b, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"})
        return island(x, w["in"]) * 2

    run = mw.parallelize(f, cluster="1x8 cpu", mesh=MESH)
    np.testing.assert_allclose(run(X, W), 2 * X @ W["in"], rtol=1e-5, atol=1e-5)
    assert results_of(run.last_plan, "shard_map") == [(("data",), ())]


def test_microbatches_keep_constraints():
    def loss(w, x):
        return (jax.lax.with_sharding_constraint(x @ w["in"], P("data")) ** 2).mean()

    step = step_of(loss)
    batch = jnp.concatenate([X, X])
    run = mw.parallelize(step, cluster="1x8 cpu", mesh={"data": 8}, microbatches=2, donate_argnums=())
    plan = run.plan(W, batch)
    assert not plan.remarks and results_of(plan, "sharding_constraint")[0] == (("data",), ())
    whole = mw.parallelize(step, cluster="1x8 cpu", mesh={"data": 8}, donate_argnums=())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), run(W, batch), whole(W, batch))
