"""The planner's front door: known optima, determinism, and every bad input's message."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P

import meshwright as mw
from tests.planner.examples import all_reduce, mesh, mlp_step, zoo_args


def test_a_wide_batch_is_split_and_every_gradient_reduced_once():
    batch, hidden = 256, 32
    step, args = mlp_step(batch, hidden)
    plan = mw.plan(step, *args, mesh=mw.Mesh.abstract((4, 1), alpha=(1, 1), beta=(1, 1)))
    expected = 6 * (all_reduce(hidden * hidden * 4, 4) + all_reduce(hidden * 4, 4))
    assert plan.cost.communication == pytest.approx(expected, rel=1e-9)
    assert sorted(c.bytes for c in plan.collectives) == [hidden * 4] * 6 + [hidden * hidden * 4] * 6
    assert {(c.kind, c.axes, c.phase, c.purpose) for c in plan.collectives} == {
        ("all_reduce", ("x",), "backward", "gradient")
    }
    assert set(plan.sharding("state/params/*").values()) == {P()}
    assert plan.cost.compute == 0


def test_a_loss_that_is_returned_costs_one_more_number():
    function, args = zoo_args("mlp", batch=256, hidden=32, layers=6)
    plan = mw.plan(function, *args, mesh=mesh((4, 1)))
    expected = 6 * (all_reduce(32 * 32 * 4, 4) + all_reduce(32 * 4, 4)) + all_reduce(4, 4)
    assert plan.cost.communication == pytest.approx(expected, rel=1e-9)


def test_wide_layers_alternate_columns_and_rows():
    batch, hidden = 32, 256
    step, args = mlp_step(batch, hidden)
    plan = mw.plan(step, *args, mesh=mesh((4, 1)))
    assert plan.cost.communication == pytest.approx(5 * all_reduce(batch * hidden * 4, 4), rel=1e-9)
    kernels = [plan.sharding(f"state/params/{i}/kernel") for i in range(6)]
    column, row = P(None, "x"), P("x")
    assert kernels in ([column, row] * 3, [row, column] * 3)


def test_two_axes_mix_both_and_are_no_dearer_than_the_published_plan():
    step, args = mlp_step(256, 32)
    plan = mw.plan(step, *args, mesh=mesh((2, 2), alpha=(1, 1), beta=(1, 0.1)))
    published = 6 * (all_reduce(32 * 32 * 4 / 2, 2) + all_reduce(32 * 4, 2)) + 5 * all_reduce(
        256 * 32 * 4 / 2, 2, beta=0.1
    )
    assert published == pytest.approx(21_265, rel=1e-3)
    assert plan.cost.communication <= published
    assert plan.solution.lower_bound <= plan.cost.total * (1 + 1e-12)


def test_experts_are_split_with_all_to_alls():
    function, args = zoo_args("moe-tiny", experts=16, ffn=256, batch=16)
    plan = mw.plan(function, *args, mesh=mesh((8,), alpha=1, beta=1))
    up = plan.sharding("state/params/layers/0/up")
    assert up[0] == "x", up  # experts, hidden, ffn
    assert any(c.kind == "all_to_all" for c in plan.collectives)
    assert any("moe" in c.operation for c in plan.collectives if c.kind == "all_to_all")


def test_one_device_sends_nothing():
    step, args = mlp_step(8, 8, layers=2)
    plan = mw.plan(step, *args, mesh=mesh((1,)))
    assert plan.cost.total == 0
    assert plan.collectives == ()
    assert plan.mesh.shape == {"x": 1}


def test_shardings_have_the_structure_of_arguments_and_results():
    step, args = mlp_step(64, 16, layers=2)
    plan = mw.plan(step, *args, mesh=mesh((2, 2)))
    for shardings, values in ((plan.in_shardings, args), (plan.out_shardings, jax.eval_shape(step, *args))):
        assert jax.tree.structure(shardings) == jax.tree.structure(values)
        assert all(isinstance(spec, P) for spec in jax.tree.leaves(shardings))
    assert plan.out_shardings == plan.in_shardings[0]  # state comes back as it lay


def test_costs_are_seconds_on_a_cluster():
    function, args = zoo_args("gpt2-125m", layers=2, batch=32, seq=128)
    plan = mw.plan(function, *args, cluster="1x4 a100-40gb")
    assert 0 < plan.cost.compute < 1
    assert plan.cost.total == plan.cost.compute + plan.cost.communication
    assert plan.mesh.num_devices == 4
    assert plan.memory.peak_bytes <= plan.memory.limit_bytes
    assert sum(plan.memory.argument_bytes.values()) <= plan.memory.peak_bytes


@pytest.mark.parametrize(("narrow", "sent"), [("bfloat16", 2), ("int32", 4), ("float32", 4)])
def test_what_was_widened_without_loss_is_sent_as_it_was_before(narrow, sent):
    x = jax.ShapeDtypeStruct((64, 32), narrow)
    method = mw.Auto(fix={"x": P("x"), "out": P(None, "x")})
    plan = mw.plan(lambda x: x.astype(jnp.float32), x, mesh=mesh((4,)), method=method)
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_to_all", 64 * 32 * sent)]


def test_a_loop_over_layers_pays_for_a_layer_a_trip_not_for_the_stack():
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)

    def seconds(layers):
        stack = jax.ShapeDtypeStruct((layers, 1024, 1024), jnp.float32)
        loop = partial(jax.lax.scan, lambda c, w: (jnp.tanh(c @ w), w + 1))
        return mw.plan(loop, x, stack, cluster="1x1 h200").cost.compute

    assert seconds(64) == pytest.approx(4 * seconds(16), rel=0.05)


@pytest.mark.slow
def test_two_plans_of_the_same_are_equal():
    plans = []
    for _ in range(2):
        function, args = zoo_args("llama-tiny")
        plans.append(mw.plan(function, *args, cluster="2x4 v100-32gb"))
    assert plans[0] == plans[1]


def test_progress_is_told():
    step, args = mlp_step(16, 16, layers=2)
    said = []
    mw.plan(step, *args, mesh=mesh((4,)), on_progress=said.append)
    assert said[0] == "tracing"
    assert len(said) >= 2


def test_primitives_without_a_rule_are_named_and_planned_whole():
    unheard_of = Primitive("unheard_of")
    unheard_of.def_abstract_eval(lambda x: x)

    def function(x, w):
        return unheard_of.bind(x @ w) @ w

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (8, 8))]
    plan = mw.plan(function, *shapes, mesh=mesh((2,)))
    assert plan.unsplittable == ("unheard_of",)
    assert "unheard_of" in str(plan)


X = np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: mw.plan(lambda x: x @ x, X, mesh=mesh((2,))), mw.TraceError, "could not trace"),
        (
            lambda: mw.plan(jnp.sin, X, mesh=mesh((2,)), method=3),
            mw.ShardingError,
            "method is 3; give one of 'auto'",
        ),
        (lambda: mw.plan(jnp.sin, X, cluster="2x4 a1000"), mw.ClusterError, "unknown chip 'a1000'"),
        (lambda: mw.plan(jnp.sin, X, cluster="1x4 h100", mesh=(3,)), mw.ClusterError, "3 devices but cluster"),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((2,)), method=mw.Auto(fix={"y*": P("x")})),
            mw.ShardingError,
            r"'y\*' matches no argument or result; paths look like x",
        ),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((3,)), method=mw.Auto(fix={"x": P("x")})),
            mw.ShardingError,
            r"x: a dim of 8 .*cannot be split evenly into 3",
        ),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((2,)), method=mw.Auto(fix={"x": P("z")})),
            mw.ShardingError,
            "axis 'z' is not on mesh.*its axes are x",
        ),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((2,)), method=mw.Auto(fix={"x": P("x", "x")})),
            mw.ShardingError,
            "an axis can split one dim only",
        ),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((2,)), method=mw.Auto(fix={"x": P(None, None, "x")})),
            mw.ShardingError,
            "3 entries but the tensor has shape",
        ),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((2, 2)), method=mw.Auto(fix={"x": P(("y", "x"))})),
            mw.ShardingError,
            "in the mesh's order, x, y",
        ),
        (
            lambda: mw.plan(lambda x: x, X, mesh=mesh((2,)), method=mw.Auto(fix={"x": 3})),
            mw.ShardingError,
            "3 is not a PartitionSpec",
        ),
        (lambda: mw.Auto(memory_fraction=1.5), mw.ShardingError, "memory_fraction is 1.5"),
        (lambda: mw.Zero(3, memory_fraction=0), mw.ShardingError, "memory_fraction is 0; give a fraction above 0"),
        (lambda: mw.Zero(4), mw.ShardingError, "stages 1, 2 and 3"),
        (lambda: mw.Auto(fix=["x"]), mw.ShardingError, r"fix is \['x'\]; give globs of paths"),
        (lambda: mw.Manual({3: P("x")}), mw.ShardingError, "give globs of paths to shardings"),
        (lambda: mw.Auto(mesh_shapes=[]), mw.ShardingError, r"mesh_shapes is \[\]; give a list of shapes"),
        (lambda: mw.plan(jnp.sin, X, cluster="1x4 h100", mesh=4), mw.ClusterError, "the shape of a mesh is 4"),
        (lambda: mw.plan(lambda x: x, None, mesh=mesh((2,))), mw.TraceError, "there is nothing to split"),
        (
            lambda: mw.plan(jnp.sin, X, mesh=mesh((2,))).show(3),
            mw.ShardingError,
            "found by its path, as text, not by 3",
        ),
        (lambda: mw.plan(jnp.sin, X, mesh=mesh((2,))).diff("a.json"), mw.ShardingError, "'a.json' is no plan"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_input_is_answered_with_a_remedy(call, error, words):
    with pytest.raises(error, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_batch_smaller_than_the_data_axis_is_said():
    function, args = zoo_args("gpt-tiny", batch=4, layers=1)
    with pytest.raises(mw.ShardingError, match=r"the batch has 4 rows.*multiple of 8, fewer devices, or mw.Auto"):
        mw.plan(function, *args, mesh=mesh((8,)), method=mw.DataParallel())


def test_shapes_that_no_device_count_divides_are_planned_whole_and_said():
    def function(x, w):
        return jnp.tanh(x @ w)

    x, w = jax.ShapeDtypeStruct((7, 5), jnp.float32), jax.ShapeDtypeStruct((5, 3), jnp.float32)
    plan = mw.plan(function, x, w, mesh=mesh((8,)))
    assert plan.collectives == ()
    assert "no argument can be split" in str(plan)
    assert "Pad the batch" in str(plan)


def test_a_path_that_matches_nothing_is_answered_with_the_nearest():
    step, args = mlp_step(16, 16, layers=2)
    plan = mw.plan(step, *args, mesh=mesh((2,)))
    with pytest.raises(mw.ShardingError, match="state/params/0/kernel"):
        plan.sharding("state/params/0/kernels")


def test_four_axes_are_planned_and_are_no_worse_than_two():
    def layer(w, x):
        return jnp.tanh(x @ w["up"]) @ w["down"]

    up, down, x = ((4096, 16384), (16384, 4096), (8192, 4096))
    args = {"up": jax.ShapeDtypeStruct(up, "bfloat16"), "down": jax.ShapeDtypeStruct(down, "bfloat16")}
    cluster = mw.cluster("2x8 h100")
    two, four = (
        mw.plan(layer, args, jax.ShapeDtypeStruct(x, "bfloat16"), cluster=cluster, mesh=mesh)
        for mesh in ((4, 4), {"pod": 2, "data": 2, "expert": 2, "model": 2})
    )
    assert four.mesh.names == ("pod", "data", "expert", "model")
    assert four.cost.total <= two.cost.total * 1.0001 and four.solution.status == "optimal"
