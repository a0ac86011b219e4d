"""Methods: what each lays down, and that none is better than Auto by the same price."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.cli.options import METHOD_NAMES
from meshwright.graph import trace
from meshwright.planner.method_names import find_method, find_methods
from meshwright.step_search.ranking import NEARLY
from tests.planner.examples import mesh, mlp_step, solve_on, traced_zoo

pytestmark = pytest.mark.slow

NAMED = (mw.DataParallel(), mw.Zero(1), mw.Zero(2), mw.Zero(3), mw.TensorParallel())

ZOO = [  # each kind of model once, on clusters of every kind
    ("mlp", {}, "2x4 v100-32gb"),
    ("vit-tiny", {"batch": 12}, "1x3 l40s"),
    ("wide-resnet-tiny", {"layers": 1}, "1x4 a100-40gb"),
    ("unet-tiny", {"layers": 1}, "1x2 a100-40gb"),
    ("gpt2-125m", {"layers": 2, "batch": 24, "scan": True}, "1x3 l40s"),
    ("llama3-8b", {"layers": 3, "batch": 16, "seq": 512, "checkpoint": True}, "2x4 a100-40gb"),
    ("mixtral-8x7b", {"layers": 2, "batch": 16, "seq": 256}, "1x8 h100"),
    ("gshard-moe-380m", {"layers": 2, "batch": 16, "seq": 256}, "2x4 v100-32gb"),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize(("name", "options", "cluster"), ZOO, ids=str)
def test_auto_is_never_worse_than_a_named_method(name, options, cluster):
    traced, machine = traced_zoo(name, **options), mw.cluster(cluster)
    auto = solve_on(traced, mw.Auto(), mw.Auto().meshes(machine))
    compared = 0
    for method in NAMED:
        try:
            named = solve_on(traced, method, method.meshes(machine))
        except (mw.ShardingError, mw.DoesNotFit) as refusal:
            assert len(str(refusal)) > 40  # says why
            continue
        compared += 1
        assert auto.cost.total <= named.cost.total * (1 + 1e-6), method.name
        assert named.memory.peak_bytes <= named.memory.limit_bytes
    assert compared >= 3
    assert auto.memory.peak_bytes <= auto.memory.limit_bytes
    assert auto.solution.lower_bound <= auto.cost.total * (1 + 1e-12)


def test_auto_is_never_worse_on_an_abstract_mesh():
    traced = traced_zoo("gpt-tiny", layers=1)
    machine = mesh((2, 2, 2), alpha=1, beta=(1, 0.1, 0.05))
    auto = solve_on(traced, mw.Auto(), [machine])
    for method in NAMED:
        assert auto.cost.total <= solve_on(traced, method, [machine]).cost.total * (1 + 1e-6), method.name


@pytest.mark.sweep(1)
@pytest.mark.parametrize("mebibytes", [5.0, 5.25])
def test_auto_is_never_worse_where_memory_binds(mebibytes):
    """Answers on the way copy the tied table; one that fits is the better the less it copies."""

    def loss(params, x):
        h = params["table"][x]
        h = h + jax.nn.gelu(h @ params["up"]) @ params["down"]
        return -jnp.mean(jax.nn.log_softmax(h @ params["table"].T)[..., 0])

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = {"table": (4096, 128), "up": (128, 512), "down": (512, 128)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    args, machines = (params, jax.ShapeDtypeStruct((12, 16), jnp.int32)), mw.cluster("3x2 a100-40gb")
    fraction = mebibytes * 2**20 / machines.memory_bytes
    auto, named = (
        mw.plan(step, *args, cluster=machines, method=method(memory_fraction=fraction))
        for method in (mw.Auto, mw.TensorParallel)
    )
    assert auto.simulate().step_s <= named.simulate().step_s * (1 + NEARLY)


def test_data_parallel_replicates_state_and_splits_the_batch():
    step, args = mlp_step(64, 16, layers=3)
    plan = mw.plan(step, *args, mesh=mesh((2, 4)), method=mw.DataParallel())
    assert set(plan.sharding("state/*").values()) == {P()}
    assert plan.sharding("x") == plan.sharding("y") == P(("x", "y"))
    plan = mw.plan(step, *args, mesh=mesh((8,)), method=mw.DataParallel())
    kernels = [c for c in plan.collectives if c.bytes == 16 * 16 * 4]
    assert [(c.kind, c.axes) for c in kernels] == [("all_reduce", ("x",))] * 3


def test_zero_spreads_optimizer_state_then_parameters():
    step, args = mlp_step(64, 16, layers=3)
    plans = {stage: mw.plan(step, *args, mesh=mesh((4,)), method=mw.Zero(stage)) for stage in (1, 2, 3)}
    for stage, plan in plans.items():
        moments = plan.sharding("state/opt/0/*/kernel")
        assert len(moments) == 6
        assert all(spec in (P("x"), P(None, "x")) for spec in moments.values())
        params = plan.sharding("state/params/*/kernel").values()
        assert all(spec == P() for spec in params) == (stage < 3)
    assert not any(c.kind == "reduce_scatter" and c.phase == "backward" for c in plans[1].collectives)
    whole = {stage: plan.memory.argument_bytes["parameters"] for stage, plan in plans.items()}
    assert whole[1] == whole[2] == 4 * whole[3]


def test_tensor_parallel_splits_every_matrix_over_the_last_axis():
    step, args = mlp_step(64, 16, layers=4)
    plan = mw.plan(step, *args, mesh=mesh((2, 4)), method=mw.TensorParallel())
    kernels = plan.sharding("state/params/*/kernel")
    assert len(kernels) == 4
    assert set(kernels.values()) <= {P("y"), P(None, "y")}
    assert plan.sharding("x") == P("x")


def test_tensor_parallel_with_zero_splits_state_over_the_other_axes_as_well():
    step, args = mlp_step(64, 16, layers=4)
    plans = [mw.plan(step, *args, mesh=mesh((2, 4)), method=mw.TensorParallel(zero)) for zero in range(4)]
    for zero, plan in enumerate(plans):
        held = plan.sharding("state/params/*/kernel"), plan.sharding("state/opt/0/*/kernel")
        over = [{axis for spec in specs.values() for dim in spec for axis in (dim or ())} for specs in held]
        assert over == [{"x", "y"} if zero == 3 else {"y"}, {"x", "y"} if zero else {"y"}]
        before = [c for c in plan.collectives if c.argument and c.kind == "all_gather" and c.phase != "update"]
        gathered = {c.axes for c in before if c.bytes > 16 * 4}  # of a matrix; vectors may be
        assert gathered == ({("x",)} if zero == 3 else set())  # tensor parallelism never gathers
    bytes_of = [plan.memory.argument_bytes for plan in plans]
    assert bytes_of[0]["optimizer"] > 1.9 * bytes_of[1]["optimizer"]
    assert bytes_of[2]["parameters"] > 1.6 * bytes_of[3]["parameters"]
    sums = [{c.kind for c in plan.collectives if c.purpose == "gradient" and c.axes == ("x",)} for plan in plans[2:]]
    assert all("reduce_scatter" in kinds for kinds in sums)
    with pytest.raises(mw.ShardingError, match="zero is 4; ZeRO has stages 1, 2 and 3"):
        mw.TensorParallel(4)


def test_methods_choose_their_mesh_from_the_cluster():
    machine = mw.cluster("2x4 v100-32gb")
    assert [m.sizes for m in mw.DataParallel().meshes(machine)] == [(8,)]
    assert [m.sizes for m in mw.TensorParallel().meshes(machine)] == [(2, 4)]
    assert [m.sizes for m in mw.Auto(mesh_shapes=[(4, 2), (8,)]).meshes(machine)] == [(4, 2), (8,)]
    assert [m.sizes for m in mw.Manual({"x": P("y")}).meshes(machine)] == [(2, 4)]


@pytest.mark.parametrize("make", [mw.Auto, mw.DataParallel, mw.Zero, mw.TensorParallel, mw.Manual])
def test_every_method_can_leave_more_memory_to_the_runtime(make):
    step, args = mlp_step(64, 16, layers=2)
    machine = mw.cluster("1x4 a100-40gb")
    for method, share in ((make(), 0.9), (make(memory_fraction=0.5), 0.5)):
        plan = mw.plan(step, *args, cluster=machine, method=method)
        assert plan.memory.limit_bytes == int(share * machine.memory_bytes)
    with pytest.raises(mw.ShardingError, match=r"memory_fraction is 1\.5; give a fraction above 0 and at most 1"):
        make(memory_fraction=1.5)


def two_products(x, w):
    return {"y": jnp.tanh(x @ w["up"]) @ w["down"]}


SHAPES = (
    jax.ShapeDtypeStruct((16, 8), jnp.float32),
    {"up": jax.ShapeDtypeStruct((8, 32), jnp.float32), "down": jax.ShapeDtypeStruct((32, 8), jnp.float32)},
)


def test_fix_reaches_arguments_results_globs_and_tuples_of_axes():
    fix = {"w/*": P(), "w/up": P(None, ("x", "y")), "out/y": P("x", "y"), "x": P("y")}
    plan = mw.plan(two_products, *SHAPES, mesh=mesh((2, 2)), method=mw.Auto(fix=fix))
    assert plan.sharding("w/up") == P(None, ("x", "y"))  # the last glob that matches holds
    assert plan.sharding("w/down") == P()
    assert plan.sharding("x") == P("y")
    assert plan.sharding("out/y") == P("x", "y")
    free = mw.plan(two_products, *SHAPES, mesh=mesh((2, 2)))
    assert free.cost.total <= plan.cost.total


def test_a_fixed_result_is_paid_for():
    def function(x):
        return {"y": jnp.sin(x["a"])}

    a = {"a": jax.ShapeDtypeStruct((16, 8), jnp.float32)}
    fix = {"x/a": P("x"), "out/y": P(None, "x")}
    machine = mesh((4,))
    plan = mw.plan(function, a, mesh=machine, method=mw.Auto(fix=fix))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_to_all", 16 * 8 * 4)]
    assert plan.cost.total == pytest.approx(machine.collective_s("all_to_all", (0,), 16 * 8 * 4))


def test_fixing_a_new_state_fixes_the_old():
    step, args = mlp_step(16, 16, layers=2)
    plan = mw.plan(step, *args, mesh=mesh((4,)), method=mw.Auto(fix={"out/params/0/kernel": P("x")}))
    assert plan.sharding("state/params/0/kernel") == plan.sharding("out/params/0/kernel") == P("x")


def test_manual_replicates_what_is_not_named():
    plan = mw.plan(two_products, *SHAPES, mesh=mesh((4,)), method=mw.Manual({"x": P("x")}))
    assert plan.sharding("x") == P("x")
    assert set(plan.sharding("w/*").values()) == {P()}
    assert plan.cost.total == 0
    megatron = mw.Manual({"w/up": P(None, "x"), "w/down": P("x")})
    plan = mw.plan(two_products, *SHAPES, mesh=mesh((4,)), method=megatron)
    assert [(c.kind, c.bytes) for c in plan.collectives] in (
        [("all_reduce", 16 * 8 * 4)],
        [("reduce_scatter", 16 * 8 * 4)],
    )


def test_fixed_layers_are_kept_apart_by_folding():
    step, args = mlp_step(64, 16, layers=6)
    traced = trace(step, *args)
    fix = {"state/params/2/kernel": P("x"), "state/params/3/kernel": P(None, "x")}
    plan = solve_on(traced, mw.Auto(fix=fix), [mesh((4,))])
    assert plan.sharding("state/params/2/kernel") == P("x")
    assert plan.sharding("state/params/3/kernel") == P(None, "x")
    assert plan.sharding("state/params/0/kernel") == plan.sharding("state/params/4/kernel") == P()


def test_a_matrix_that_no_product_reads_may_leave_its_place():
    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean((x * p["scale"]) @ p["out"]) ** 2)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"scale": jnp.ones((16, 8)), "out": jnp.ones((8, 8))}
    plan = mw.plan(step, params, jnp.ones((8, 16, 8)), mesh=mesh((2, 4)), method=mw.TensorParallel())
    assert all(any(plan.sharding(f"params/{name}")) for name in params)


def test_methods_have_short_names():
    names = ("auto", "data", "zero1", "zero2", "zero3", "tensor")
    assert [find_method(name) for name in names] == [mw.Auto(), *NAMED] and names == METHOD_NAMES
    assert find_method("Zero-3") == mw.Zero(3) and find_method(None) == mw.Auto()
    assert find_methods("auto, zero3") == (mw.Auto(), mw.Zero(3)) == find_methods(["auto", mw.Zero(3)])
    plan = mw.plan(
        lambda x, w: x @ w, np.ones((8, 4)), np.ones((4, 4)), mesh=mw.Mesh.abstract((4,), 1, 1), method="data"
    )
    assert plan.method == "DataParallel"


@pytest.mark.parametrize("given", ["zero9", "", 3])
def test_what_is_no_method_is_refused_with_those_that_are(given):
    with pytest.raises(mw.ShardingError, match="give one of 'auto', 'data', 'zero1', 'zero2', 'zero3', 'tensor'"):
        mw.parallelize(lambda x: x, method=given)
    with pytest.raises(mw.ShardingError, match=r"give (one|some) of 'auto'"):
        mw.compare(lambda x: x, 1.0, methods=[given] if given != "" else "", run=False)


def test_zero_shares_the_state_within_groups():
    def step(w, x):
        return w - jax.grad(lambda w: ((x @ w) ** 2).mean())(w), x.max()

    shapes = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")
    plan = mw.plan(step, *shapes, cluster="2x4 h100", method=mw.Zero(3, group=4))
    assert plan.mesh.sizes == (2, 4) and plan.method == "Zero-3 in groups of 4"
    weights, batch = plan.in_shardings
    assert {axis for axis in weights if axis} == {"y"} and tuple(batch) == (("x", "y"),)
    with pytest.raises(mw.ShardingError, match=r"groups of 3 devices do not divide the 8 devices .* group=4"):
        mw.plan(step, *shapes, cluster="2x4 h100", method=mw.Zero(3, group=3))
    with pytest.raises(mw.ShardingError, match=r"last axis of mesh .* has 2 devices, .* group=4"):
        mw.plan(step, *shapes, cluster="2x4 h100", mesh=(4, 2), method=mw.Zero(3, group=4))
    with pytest.raises(mw.ShardingError, match="group is 0"):
        mw.Zero(3, group=0)
