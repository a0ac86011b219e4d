"""Running plans on eight virtual devices: one device's numbers, and the communication that was planned."""

import json
from collections import Counter
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.compiled import collectives_of
from meshwright.runtime.checking.figures import by_kind as compared
from meshwright.runtime.checking.rematerialized import heard
from meshwright.runtime.spmd import compiler_options, device_mesh, spmd
from tests.compiling import KEEPING_CHECKPOINTS, QUICK
from tests.draws import normal

pytestmark = pytest.mark.devices


def compiled(function, *args):
    lowered = function.lower(*args)
    try:
        return lowered.compile(compiler_options=KEEPING_CHECKPOINTS)
    except jax.errors.JaxRuntimeError:  # the CPU backend cannot keep a barrier everywhere
        return lowered.compile(compiler_options=QUICK)


def abstract(shape):
    return mw.Mesh.abstract(shape, alpha=1, beta=(1, 0.1, 0.05)[: len(shape)])


def placed(plan, args):
    mesh = device_mesh(plan)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), plan.in_shardings)
    return jax.device_put(args, shardings)


def run_once(plan, function, *args):
    """What a plan's program computes, and its collectives as `Plan.verify` compares them, of one compiled program."""
    program = spmd(plan, function).lower(*args).compile()
    made = collectives_of(program.as_text(), plan.mesh.shape)
    return program(*placed(plan, args)), compared(plan.collectives, made, scatters=False).values()


def by_kind(collectives):
    """Bytes by kind; the CPU backend has no reduce-scatter but an all-reduce and a slice, of as many bytes."""
    total = Counter()
    for item in collectives:
        total["reduction" if item.kind in ("all_reduce", "reduce_scatter") else item.kind] += item.bytes * item.trips
    return total


def by_axis(collectives, kinds):
    """Bytes by axis that crosses: a reduction over two axes counts for both."""
    total = Counter()
    for item in collectives:
        if item.kind in kinds:
            for axis in item.axes:
                total[axis] += item.bytes * item.trips
    return total


def assert_same(one, many, places):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=10.0**-places, err_msg=jax.tree_util.keystr(path))


def on_one_device(example):
    """The state after one step, and its loss."""
    args = example.init(0), example.sample(1)
    return compiled(example.train_step, *args)(*args)


def train(example, plan, expected=None):
    """One step on one device, unless its result is known, and on eight; gives the compiled program of the eight."""
    state, batch = example.init(0), example.sample(1)
    with heard() as warnings:
        program = compiled(spmd(plan, example.train_step), state, batch)
    assert warnings.found() == ()  # no value is gathered whole to reshard it
    one_state, one_loss = expected or on_one_device(example)
    new_state, loss = program(*placed(plan, (example.init(0), batch)))  # a state of its own: it is donated
    np.testing.assert_allclose(loss, one_loss, rtol=1e-5)
    # Adam's first step is the learning rate times about the gradient's sign: compare what made it, too.
    assert_same(one_state["mu"], new_state["mu"], places=6)
    assert_same(one_state["params"], new_state["params"], places=4)
    return program


MODELS = [
    ("mlp", (2, 4), {"batch": 64, "hidden": 64, "layers": 4}),
    ("gpt-tiny", (2, 4), {"layers": 1}),
    ("llama-tiny", (2, 4), {"scan": True, "checkpoint": True}),
    ("moe-tiny", (2, 4), {}),
    ("bert-tiny", (8,), {"layers": 1}),
    ("vit-tiny", (8,), {"layers": 1}),
]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "shape", "options"), MODELS, ids=str)
def test_a_model_trains_as_on_one_device_and_sends_what_was_planned(name, shape, options):
    example = zoo.build(name, dtype="float32", **options)
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=abstract(shape))
    program = train(example, plan)
    real = collectives_of(program.as_text(), plan.mesh.shape)
    last = plan.mesh.names[-1]
    for kinds in (("all_gather",), ("all_to_all",), ("permute",)):
        planned, found = by_axis(plan.collectives, kinds), by_axis(real, kinds)
        assert found == pytest.approx(planned, rel=0.02, abs=2048), kinds
    # Where a sum is scattered over the last axis and then reduced over others, the CPU reduces the whole over both:
    # the last axis carries what was planned, the others more.
    reductions = ("all_reduce", "reduce_scatter")
    planned, found = by_axis(plan.collectives, reductions), by_axis(real, reductions)
    assert found[last] == pytest.approx(planned[last], rel=0.02, abs=2048)
    for axis in plan.mesh.names[:-1]:
        assert found[axis] >= 0.98 * planned[axis] - 2048
    held = program.memory_analysis().argument_size_in_bytes  # for the rest, abstract devices are unlike CPUs
    assert sum(plan.memory.argument_bytes.values()) == pytest.approx(held, rel=0.01, abs=64)


@pytest.mark.sweep(1)
@pytest.mark.parametrize(("shape", "method"), [((2, 2, 2), mw.Auto()), ((2, 4), mw.TensorParallel())])
def test_gradients_of_weights_that_are_summed_over_pixels_send_what_was_planned(shape, method):
    example = zoo.build("wide-resnet-tiny", batch=16, dtype="float32", layers=1)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 cpu", mesh=shape, method=method)
    images = [op.operands[0] for op in plan.ops if op.label.endswith("conv_general_dilated") and op.sums]
    assert any(image[1] or image[2] for image in images)
    found = plan.verify(compiler_options=QUICK)
    for pair in found.collectives.values():
        assert pair.compiled == pytest.approx(pair.planned, rel=0.01)


def test_the_users_own_flags_for_xla_stay(monkeypatch):
    monkeypatch.delenv("XLA_FLAGS")
    assert "xla_backend_optimization_level" in compiler_options("cpu")
    assert set(compiler_options("gpu")) == {"xla_gpu_enable_latency_hiding_scheduler"}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    assert "xla_backend_optimization_level" not in compiler_options("cpu")


@cache
def trained(name):
    """A model, and what one step on one device makes of it."""
    sizes = {"batch": 64, "hidden": 64, "layers": 2} if name == "mlp" else {"layers": 1}
    example = zoo.build(name, dtype="float32", **sizes)
    return example, on_one_device(example)


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("method", "name"),
    [
        (mw.DataParallel(), "mlp"),
        (mw.Zero(1), "mlp"),
        (mw.Zero(2), "mlp"),
        (mw.Zero(3), "gpt-tiny"),
        (mw.TensorParallel(), "gpt-tiny"),
        (mw.TensorParallel(3), "gpt-tiny"),
    ],
    ids=str,
)
def test_every_method_trains_as_on_one_device(method, name):
    example, expected = trained(name)
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=abstract((2, 4)), method=method)
    program = train(example, plan, expected)
    planned, real = by_kind(plan.collectives), by_kind(collectives_of(program.as_text(), plan.mesh.shape))
    assert real["all_gather"] == pytest.approx(planned["all_gather"], rel=0.05, abs=4096)


@pytest.mark.smoke
def test_three_devices_are_enough():
    example = zoo.build("mlp", batch=12, hidden=24, layers=3)
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=abstract((3,)))
    program = train(example, plan)
    assert by_kind(collectives_of(program.as_text(), {"x": 3})) == by_kind(plan.collectives)


def test_dropout_draws_the_same_numbers():
    example = zoo.build("gpt-tiny", dtype="float32", layers=1, dropout=0.1)
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=abstract((8,)))
    train(example, plan)


def test_loops_and_branches_run_as_planned():
    def function(x, w, flag):
        x = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
        return lax.cond(flag, lambda y: y @ w, lambda y: y - 1, x)

    x, w = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8), np.eye(8, dtype=np.float32)[::-1].copy()
    plan = mw.plan(function, x, w, True, mesh=abstract((2, 4)))
    for flag in (True, False):
        result = spmd(plan, function)(x, w, flag)
        np.testing.assert_allclose(result, function(x, w, flag), atol=1e-6)


@pytest.mark.smoke
def test_arguments_and_results_lie_as_the_plan_says():
    def function(x, w):
        return {"y": x @ w, "sum": jnp.sum(x)}

    x, w = np.ones((8, 4), np.float32), np.ones((4, 16), np.float32)
    fix = {"x": P("x"), "w": P(None, "y"), "out/y": P("x", "y")}
    plan = mw.plan(function, x, w, mesh=abstract((2, 4)), method=mw.Auto(fix=fix))
    result = spmd(plan, function)(x, w)
    assert result["y"].sharding.spec == P("x", "y")
    assert {shard.data.shape for shard in result["y"].addressable_shards} == {(4, 4)}
    np.testing.assert_array_equal(result["y"], x @ w)
    assert plan.collectives[0].kind == "all_reduce"  # only the scalar needs all devices
    assert len(plan.collectives) == 1


def test_leaves_that_are_not_arrays_reach_the_function_and_come_back():
    def function(options, x):
        y = options["activation"](x)
        return {"options": options, "y": y + 2 if options["up"] else y * 2}

    options, x = {"activation": jnp.tanh, "up": True}, np.ones((8, 4), np.float32)
    plan = mw.plan(function, options, x, mesh=abstract((4,)))
    assert [t.role for t in plan.arguments] == ["static", "static", "data"]
    assert list(plan.sharding("*")) == ["x", "out/y"]
    program = spmd(plan, function)
    result = program(options, x)
    assert result["options"] == options
    np.testing.assert_allclose(result["y"], np.tanh(x) + 2, rtol=1e-6)
    with pytest.raises(mw.ShardingError, match="made for another function"):  # the plan is for the switch as it was
        program(options | {"up": False}, x)


def times_compiled(name, caplog):
    return sum(f"Finished XLA compilation of jit({name})" in record.message for record in caplog.records)


@pytest.mark.parametrize("host", [True, False], ids=["from NumPy", "from one device"])
def test_a_step_that_feeds_itself_is_compiled_once(host, caplog):
    example = zoo.build("mlp", batch=16, hidden=16, layers=2)
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=abstract((4,)))
    program, state = spmd(plan, example.train_step), example.init(0)
    state = jax.tree.map(np.asarray, state) if host else state
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for seed in range(3):
            state, _ = program(state, example.sample(seed))
    assert times_compiled("train_step", caplog) == 1


def test_arrays_that_lie_elsewhere_are_brought_into_place():
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    plan = mw.plan(lambda x: x + 1, x, mesh=abstract((4,)), method=mw.Auto(fix={"x": P("x")}))
    away = jax.device_put(x, NamedSharding(device_mesh(plan), P(None, "x")))
    result = spmd(plan, lambda x: x + 1)(away)
    assert result.sharding.spec == P("x")
    np.testing.assert_array_equal(result, x + 1)


def test_a_saved_plan_runs_as_the_fresh_one(tmp_path):
    example = zoo.build("mlp", batch=16, hidden=16, layers=2)
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=abstract((4,)))
    plan.save(tmp_path / "plan.json")
    train(example, mw.Plan.load(tmp_path / "plan.json"))


def test_too_few_devices_is_said():
    plan = mw.plan(lambda x: x + 1, np.ones((16, 4), np.float32), mesh=abstract((16,)))
    with pytest.raises(mw.ClusterError, match=r"16 devices and there are 8.*run it where there are enough"):
        spmd(plan, lambda x: x + 1)


OTHERS = {
    "operation": (lambda x: x @ x, jnp.sin),
    "number of operands": (lambda x: jnp.concatenate([x, x])[:8], lambda x: jnp.concatenate([x, x, x])[:8]),
    "number of results": (lambda x: jax.lax.sort((x, x))[0], lambda x: jax.lax.sort(x)),
    "rank": (lambda x: jnp.sum(x[:, None], 1) + x, lambda x: jnp.sum(x[:, None, None], (1, 2)) + x),
    "size": (lambda x: jnp.tanh(jnp.tanh(x)[:4]) @ x[:4].T, lambda x: jnp.tanh(jnp.tanh(x)[:3]).T[:4, :1] @ x[:1, :4]),
    "length": (lambda x: jnp.tanh(jnp.tanh(x)), jnp.tanh),
    "sums that wait": (lambda x: x @ x + (x @ (x + 1)).T, lambda x: x @ x + (x + x @ (x + 1)).T),
    "operands": (lambda x: x - x.T, lambda x: x.T - x),
    "parameters": (lambda x: jax.lax.rev(x, (0,)), lambda x: jax.lax.rev(x, (1,))),
    "operations that follow": (lambda x: jnp.sin(x), lambda x: jnp.sin(x) + x),
    "order of sums": (lambda x: (x @ x).T + x @ x.T, lambda x: x.T + x @ x + x @ x),
}


@pytest.mark.parametrize(("planned", "run"), OTHERS.values(), ids=OTHERS)
def test_a_plan_of_another_function_is_refused(planned, run):
    x = np.ones((8, 8), np.float32)
    plan = mw.plan(planned, x, mesh=abstract((4,)), method=mw.Auto(fix={"x": P(None, "x")}))
    with pytest.raises(mw.ShardingError, match=r"made for another function.* where its program has '.*', this one has"):
        spmd(plan, run)(x)


def test_a_saved_plan_knows_the_program_that_it_was_made_for(tmp_path):
    x, path = np.ones((8, 8), np.float32), tmp_path / "plan.json"
    planned, other = OTHERS["operands"]
    mw.plan(planned, x, mesh=abstract((4,))).save(path)
    with pytest.raises(mw.ShardingError, match=r"'#1 +%2:f32\[8,8\] = sub\(%0, %1\)', this one has '.* sub\(%1, %0\)'"):
        spmd(mw.Plan.load(path), other)(x)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "provenance": data["provenance"] | {"jax": "0.1.2"}}))
    with pytest.raises(mw.ShardingError, match=r"made with jax 0\.1\.2, which may trace a function otherwise"):
        spmd(mw.Plan.load(path), other)(x)
    damaged = {**data, "program": data["program"] | {"fingerprint": "0" * 32}}
    path.write_text(json.dumps(damaged))
    with pytest.raises(mw.PlanFileError, match="'program': its form is not the one of its fingerprint"):
        spmd(mw.Plan.load(path), planned)(x)
    del data["program"]  # as in files of earlier versions
    path.write_text(json.dumps(data))
    np.testing.assert_array_equal(spmd(mw.Plan.load(path), planned)(x), x - x.T)
    with pytest.raises(mw.ShardingError, match="made for another function"):
        spmd(mw.Plan.load(path), OTHERS["operation"][1])(x)


def test_other_shapes_and_structures_than_planned_are_refused():
    def function(state):
        return state["a"] + 1

    program = spmd(mw.plan(function, {"a": np.ones((8, 4), np.float32)}, mesh=abstract((4,))), function)
    program({"a": np.ones((8, 4), np.float32)})
    for other in (np.ones((16, 4), np.float32), np.ones((8, 4), np.int32)):
        with pytest.raises(mw.ShardingError, match=r"the plan has state/a as float32\[8, 4\] and it is"):
            program({"a": other})
    with pytest.raises(mw.ShardingError, match="arguments of 1 leaves and was given 2"):
        program({"a": np.ones((8, 4), np.float32), "b": 1.0})


def test_a_widened_value_that_is_sent_narrow_is_the_same():
    x = normal(64, 32, dtype=jnp.bfloat16)

    def function(x):
        return jnp.cumsum(x.astype(jnp.float32), axis=0)  # needs whole columns

    plan = mw.plan(function, x, mesh=abstract((8,)), method=mw.Auto(fix={"x": P("x"), "out": P(None, "x")}))
    assert [c.bytes for c in plan.collectives] == [64 * 32 * 2]
    program = spmd(plan, function)
    laid_down = [line for line in program.lower(x).as_text().splitlines() if "sharding_constraint" in line]
    assert any("64x32xbf16" in line for line in laid_down)
    assert program(x).dtype == jnp.float32
    np.testing.assert_allclose(program(x), function(x), rtol=1e-6)


def test_a_widened_result_is_brought_to_its_place_narrow():
    x = normal(64, 32, dtype=jnp.bfloat16)

    def function(x):
        return (x * 2).astype(jnp.float32)

    plan = mw.plan(function, x, mesh=abstract((8,)), method=mw.Auto(fix={"x": P("x"), "out": P()}))
    assert [(c.kind, c.bytes) for c in plan.collectives] == [("all_gather", 64 * 32 * 2)]
    program = spmd(plan, function)
    laid_down = [line for line in program.lower(x).as_text().splitlines() if "sharding_constraint" in line]
    assert [
        line for line in laid_down if "[{}, {}]" in line and "64x32xbf16" in line
    ]  # the CPU backend widens it itself
    np.testing.assert_array_equal(program(x), function(x))


PRINTS = {
    "debug_print": lambda x: jax.debug.print("{x}", x=x, ordered=True),
    "debug_callback": lambda x: jax.debug.callback(print, x, ordered=True),
}


@pytest.mark.parametrize("name", PRINTS)
@pytest.mark.parametrize("is_in_loop", [False, True])
def test_what_is_printed_in_order_is_refused_on_several_devices(name, is_in_loop):
    def step(x):
        def body(total, row):
            PRINTS[name](row.sum())
            return total + row, None

        return jax.lax.scan(body, x[0], x)[0] if is_in_loop else body(x, x)[0]

    run = mw.parallelize(step, mesh=mw.Mesh.abstract((4,), alpha=1, beta=0.1))
    with pytest.raises(mw.ShardingError, match=rf"{name} at .*test_spmd\.py.* leave ordered=True out, or use jax\.exp"):
        run(jnp.ones((8, 4)))


def test_an_ordered_io_callback_runs_in_order_on_several_devices():
    counted: list[int] = []

    def step(x):
        def body(number, row):
            io_callback(lambda n: counted.append(int(n)), None, number, ordered=True)
            return number + 1, 2 * row

        return jax.lax.scan(body, 0, x)[1]

    run = mw.parallelize(step, mesh=mw.Mesh.abstract((4,), alpha=1, beta=0.1))
    run(jnp.ones((8, 4)))
    jax.effects_barrier()
    assert counted == list(range(8))
