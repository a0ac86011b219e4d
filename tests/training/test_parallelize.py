"""The decorator: what `jax.jit` takes, it takes, with one device's numbers."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.runtime import spmd
from tests.runtime.handed_back import state_that_calls
from tests.runtime.steps import CPU, batch, params, train_step

pytestmark = pytest.mark.devices


def assert_same(one, many):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6, err_msg=jax.tree_util.keystr(path))


def test_a_decorated_train_step_trains_as_one_device_does():
    @mw.parallelize(cluster=CPU)
    def step(state, batch):
        return train_step(state, batch)

    many, one = params(), params()
    for _ in range(3):
        many, metrics = step(many, batch())
        one, expected = jax.jit(train_step)(one, batch())
        assert_same(expected, metrics)
    assert_same(one, many)
    assert step.__name__ == "step"


@pytest.mark.parametrize("mesh", [(8,), (4, 2), (2, 2, 2)])
def test_it_runs_on_the_mesh_it_is_told(mesh):
    step = mw.parallelize(train_step, cluster=CPU, mesh=mesh)
    new, _ = step(params(), batch())
    assert_same(jax.jit(train_step)(params(), batch())[0], new)
    assert tuple(step.plan(params(), batch()).mesh.sizes) == mesh


def test_arguments_that_were_not_in_place_can_be_used_again():
    step = mw.parallelize(train_step, cluster=CPU)
    state = params()
    first = step(state, batch())[0]
    for _ in range(3):
        assert_same(first, step(state, batch())[0])
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_a_state_that_came_back_is_donated_and_others_are_not():
    step = mw.parallelize(train_step, cluster=CPU)
    state, _ = step(params(), batch())
    given = jax.device_put(batch(), jax.tree.map(lambda x: x.sharding, batch_in_place(step)))
    step(state, given)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))


@pytest.mark.parametrize("called", [0, 1])
def test_a_state_that_was_donated_is_refused(called):
    step = mw.parallelize(train_step, cluster=CPU)
    evaluate = mw.follow(lambda params, batch: batch["x"] @ params["in"], step, batch_argnums=1)
    state, _ = step(params(), batch())
    new, _ = step(state, batch())
    for _ in range(called):  # the quick way and the other
        evaluate(new, batch())
    for function in (step, evaluate):
        with pytest.raises(mw.ShardingError, match="params/in is gone: it was donated to an earlier call"):
            function(state, batch())
    step(new, batch())


def batch_in_place(step):
    plan = step.plan(params(), batch())
    mesh = step.recent.mesh
    return jax.tree.map(
        lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)), batch(), plan.in_shardings[1]
    )


def test_nothing_is_donated_where_that_is_asked_for():
    step = mw.parallelize(train_step, cluster=CPU, donate_argnums=())
    state, _ = step(params(), batch())
    step(state, batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))


def test_another_batch_size_is_planned_once_and_said(caplog):
    step = mw.parallelize(train_step, cluster=CPU)
    state, _ = step(params(), batch(16))
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for size in (8, 16, 8, 16):
            state, _ = step(state, batch(size))
    said = [r.getMessage() for r in caplog.records if r.name == "meshwright"]
    assert len(said) == 1 and "batch/x changed from float32[16, 16] to float32[8, 16]" in said[0]


def test_keyword_static_and_default_arguments():
    def scaled(x, factor=2.0, *, power, shift=0.0):
        return {"y": factor * x**power + shift}

    many = mw.parallelize(scaled, cluster=CPU, static_argnums=(2,))
    x = jnp.arange(8.0)
    for args, kwargs in [((x,), {"power": 2}), ((x, 3.0), {"power": 3}), ((x,), {"power": 2, "shift": 1.0})]:
        assert_same(scaled(*args, **kwargs), many(*args, **kwargs))
    assert_same(scaled(x=x, factor=4.0, power=2), many(x=x, factor=4.0, power=2))


def test_a_static_argument_that_cannot_be_hashed_is_named():
    many = mw.parallelize(lambda x, sizes: x * sizes[0], cluster=CPU, static_argnums=(1,))
    with pytest.raises(mw.ShardingError, match=r"static argument sizes is \[1\], which cannot be hashed"):
        many(jnp.ones(8), [1])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"microbatches": 0}, "microbatches is 0"),
        ({"donate_argnums": (7,)}, "donate_argnums names argument 7; the function has 2"),
        ({"static_argnums": "batch"}, "static_argnums is 'batch'"),
        ({"method": "best"}, "method is 'best'"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(mw.ShardingError, match=message):
        mw.parallelize(train_step, **settings)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda step: mw.parallelize(3), "parallelize was given 3; give a function"),
        (lambda step: mw.create_state(params, like=train_step), "like is <function train_step .*mw.parallelize made"),
        (lambda step: mw.create_state(params, like=step, example=batch()), "example is a dict; give a tuple"),
        (lambda step: mw.follow(train_step, train_step), "the leader is <function train_step .*mw.parallelize made"),
        (lambda step: step(params(), np.array(["a"])), "must be hashable.*'numpy.ndarray'"),
    ],
)
def test_what_is_not_what_it_should_be_is_named(call, message):
    with pytest.raises(mw.ShardingError, match=message):
        call(mw.parallelize(train_step, cluster=CPU))


def test_what_jit_takes():
    def step(state, numbers, key, nothing, flag):
        noise = jax.random.normal(key, (8, 4))
        return {"w": state["w"] + noise * numbers["scale"], "n": state["n"] + 1, "empty": ()}, noise.sum(), flag

    state = {"w": np.ones((8, 4), np.float32), "n": np.int32(0), "empty": ()}
    args = (state, {"scale": 0.5}, jax.random.key(3), None, True)
    many = mw.parallelize(step, cluster=CPU, batch_argnums=())
    for _ in range(2):
        assert_same(jax.jit(step)(*args), many(*args))


def test_lower_and_compiled_as_jit_has_them():
    step = mw.parallelize(train_step, cluster=CPU)
    types = jax.eval_shape(lambda: (params(), batch()))
    assert "sharding" in step.lower(*types).as_text()
    assert step.compiled(*types).memory_analysis().argument_size_in_bytes > 0


def test_lowering_takes_arrays_that_lie_elsewhere():
    whole = mw.parallelize(train_step, cluster=CPU, method=mw.DataParallel())
    state, _ = whole(params(), batch())
    split = mw.parallelize(train_step, cluster=CPU, method=mw.Zero(stage=3))
    assert split.compiled(state, batch()).memory_analysis().argument_size_in_bytes > 0


def test_arguments_keep_their_names_in_microbatches():
    step = mw.parallelize(
        train_step, cluster=CPU, microbatches=2, method=mw.Auto(fix={"params/in": jax.sharding.PartitionSpec("x")})
    )
    assert step.plan(params(), batch()).sharding("params/in") == jax.sharding.PartitionSpec("x")


def test_more_devices_than_there_are():
    step = mw.parallelize(train_step, cluster="4x8 h100")
    assert step.plan(params(), batch(64)).mesh.num_devices == 32
    with pytest.raises(mw.ClusterError, match="32 devices and there are 8"):
        step(params(), batch(64))


def test_a_state_is_born_in_parts():
    step = mw.parallelize(train_step, cluster=CPU, method=mw.Zero(stage=3))
    state = mw.create_state(lambda key: params(hidden=64), jax.random.key(0), like=step, example=(batch(),))
    assert_same(params(hidden=64), jax.tree.map(jnp.copy, state))  # what NumPy looked at on a CPU is not donated
    plan = step.plan(state, batch())
    specs = jax.tree.leaves(plan.in_shardings[0], is_leaf=lambda s: isinstance(s, jax.sharding.PartitionSpec))
    assert [x.sharding.spec for x in jax.tree.leaves(state)] == specs
    assert all(len(x.addressable_shards[0].data.ravel()) * 8 == x.size for x in jax.tree.leaves(state))
    step(state, batch())
    assert all(x.is_deleted() for x in jax.tree.leaves(state)), "it lay in place, so it was donated"


def test_a_state_of_another_tree_is_refused():
    step = mw.parallelize(train_step, cluster=CPU)
    step.plan(params(), batch())
    with pytest.raises(mw.ShardingError, match="params/in"):
        mw.create_state(lambda key: params(hidden=24), jax.random.key(0), like=step)
    fresh = mw.parallelize(train_step, cluster=CPU)
    with pytest.raises(mw.ShardingError, match="has no plan yet"):
        mw.create_state(params, 0, like=fresh)


def test_a_follower_finds_the_parameters_where_training_keeps_them():
    example = zoo.build("gpt-tiny", batch=16, layers=1)
    step = mw.parallelize(example.train_step, cluster=CPU, mesh=(2, 4), method=mw.Zero(stage=3))
    evaluate = mw.follow(lambda params, batch: example.loss(params, batch), step)
    with pytest.raises(mw.ShardingError, match="has no plan yet"):
        evaluate(example.init(0)["params"], example.sample(1))
    state, _ = step(example.init(0), example.sample(1))
    found = evaluate(state["params"], example.sample(2))
    one, _ = jax.jit(example.train_step)(example.init(0), example.sample(1))
    np.testing.assert_allclose(found, jax.jit(example.loss)(one["params"], example.sample(2)), rtol=1e-4)
    plan = evaluate.plan(state["params"], example.sample(2))
    assert plan.mesh.shape == step.recent.plan.mesh.shape
    for tensor in plan.arguments:
        if tensor.path.startswith("params/"):
            assert tensor.spec == next(t.spec for t in step.recent.plan.arguments if t.path == f"state/{tensor.path}")


@pytest.mark.parametrize("lost", [False, True])
def test_running_out_of_memory_says_what_to_do_and_what_became_of_the_arguments(monkeypatch, lost):
    step = mw.parallelize(train_step, cluster=CPU)
    state, _ = step(params(), batch())

    def full(*args):
        if lost:
            jax.tree.leaves(args)[0].delete()
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes")

    monkeypatch.setattr(step.recent, "quick", full)
    said = "some of its arguments were donated and are gone" if lost else "its arguments are intact"
    with pytest.raises(mw.DeviceOutOfMemory, match=f"allocating 7 bytes.*{said}.*microbatches"):
        step(state, batch())


def test_too_little_memory_shows_before_the_state_is_donated(monkeypatch):
    step = mw.parallelize(train_step, cluster=CPU)
    state, _ = step(params(), batch())
    try_memory = spmd._try_memory

    def more(compiled, mesh):
        """As if the program took more than any machine has."""
        memory = SimpleNamespace(temp_size_in_bytes=2**50, output_size_in_bytes=0, alias_size_in_bytes=0)
        try_memory(SimpleNamespace(memory_analysis=lambda: memory), mesh)

    with monkeypatch.context() as patched:
        patched.setattr(spmd, "_try_memory", more)
        with pytest.raises(mw.DeviceOutOfMemory, match="its arguments are intact"):
            step(state, batch(32))
    step(state, batch(32))


def test_other_errors_at_run_time_stay_what_they_are(monkeypatch):
    step = mw.parallelize(train_step, cluster=CPU)
    state, _ = step(params(), batch())

    def fail(*args):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(step.recent, "quick", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else") as error:
        step(state, batch())
    assert error.value.__cause__ is None


@pytest.mark.parametrize("called", [False, True], ids=["at once", "after a call"])
def test_it_must_be_the_outermost_function(called):
    def loss(x):
        return (x * x).sum()

    x, many = jnp.ones((8, 4)), mw.parallelize(loss, cluster=CPU)
    if called:
        many(x)
    for around in (jax.jit(many), jax.grad(many), jax.vmap(many), jax.jit(lambda _: many(x))):
        with pytest.raises(mw.TraceError, match=r"mw.parallelize\(jax.grad\(loss\)\)"):
            around(x)
    np.testing.assert_array_equal(mw.parallelize(jax.grad(loss), cluster=CPU)(x), 2 * x)


def lose_the_other_end(steps):
    """A collective whose other end is gone after three steps."""
    if steps == 3:
        raise ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer")


Fragile = state_that_calls(lose_the_other_end)


def test_an_error_of_the_run_is_not_taken_for_one_of_the_arguments():
    step = mw.parallelize(lambda state, x: (Fragile(state.steps + 1), x.sum()), cluster="1x2 cpu")
    state = Fragile(jnp.zeros(2))
    given = mw.batches([np.ones(4, np.float32)] * 3, step)
    for _ in range(2):
        state, _ = step(state, next(given))
    with pytest.raises(jax.errors.JaxRuntimeError, match="Connection closed by peer"):
        step(state, next(given))


@pytest.mark.parametrize("method", [mw.DataParallel(), mw.ThreeD(pipeline=2, microbatch=4)], ids=["whole", "stages"])
def test_another_switch_or_function_in_the_state_is_planned_again(method):
    """A pipeline had gone on with those of its first call, and a plan without stages was refused."""

    def step(state, x):
        def loss(ws):
            h = x
            for w in ws:
                h = state["activation"](h @ w) * (2 if state["doubles"] else 1)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(state["ws"])
        return {**state, "ws": [w - 0.1 * grad for w, grad in zip(state["ws"], grads, strict=True)]}, value

    ws = [np.linspace(-1, 1, 64, dtype=np.float32).reshape(8, 8)] * 2
    x = np.ones((8, 8), np.float32)
    planned = mw.parallelize(step, cluster="1x2 cpu", method=method, donate_argnums=())
    for activation, doubles in [(jnp.tanh, True), (jnp.sin, True), (jnp.tanh, False), (jnp.tanh, True)]:
        state = {"activation": activation, "doubles": doubles, "ws": ws}
        np.testing.assert_allclose(planned(state, x)[1], step(state, x)[1], rtol=1e-5)
    assert len(planned.plans) == 3


def test_a_counter_that_starts_as_a_python_number_is_planned_once_beside_a_switch():
    def step(state, x):
        scale = 2.0 if state["doubles"] else 1.0
        return {"doubles": state["doubles"], "count": state["count"] + 1}, scale * x.sum() + state["count"]

    planned = mw.parallelize(step, cluster="1x2 cpu", donate_argnums=())
    state = {"doubles": True, "count": 0}
    for count in range(3):
        state, found = planned(state, np.ones(4, np.float32))
        assert (found, state["doubles"]) == (8 + count, True)
    assert len(planned.plans) == 1
