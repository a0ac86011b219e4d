"""Arguments of parallelised functions: static by name, a state of one array or in several arguments, Python numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from tests.runtime.steps import CPU

pytestmark = pytest.mark.devices

X = np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8)


def loss(params, batch):
    return jnp.mean((batch @ params["w"]) ** 2)


def step(params, momentum, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


def init(key):
    params = {"w": jax.random.normal(key, (8, 8))}
    return params, jax.tree.map(jnp.zeros_like, params)


def scaled(w, x, *, double, times=1):
    return w * times * (2 if double else 1) + x.sum()


def test_static_arguments_go_by_name():
    w, x = np.ones((8, 8), np.float32), np.zeros((8, 8), np.float32)
    found = mw.parallelize(scaled, cluster=CPU, static_argnames=("double", "times"))
    assert [float(found(w, x, double=d, times=n)[0, 0]) for d, n in ((True, 1), (False, 1), (True, 3))] == [2, 1, 6]
    assert len(found.plans) == 3 and [t.path for t in found.plans[0].arguments] == ["w", "x"]
    named = mw.parallelize(lambda w, n: w * n, cluster=CPU, static_argnames="n")
    assert named.settings.static_argnums == (1,) and float(named(w, 3)[0, 0]) == float(named(w, n=3)[0, 0]) == 3
    with pytest.raises(mw.ShardingError, match=r"names 'dubble'; the function's arguments are w, x, double, times"):
        mw.parallelize(scaled, static_argnames="dubble")


def test_a_state_may_be_in_several_arguments(tmp_path):
    found = mw.parallelize(step, cluster=CPU, method="zero3", state_argnums=(0, 1))
    assert found.settings.batch_argnums == (2,)
    params, momentum = mw.create_state(init, jax.random.key(0), like=found, example=(X,))
    expected = jax.tree.map(np.asarray, step(*init(jax.random.key(0)), X))
    given = (params, momentum)
    made = found(*given, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)) and len(found.plans) == 1
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    mw.save(tmp_path / "run", 1, made[:2])
    again = mw.restore(tmp_path / "run", like=found)
    assert jax.tree.map(lambda a: a.sharding, again) == jax.tree.map(lambda a: a.sharding, made[:2])
    assert float(mw.follow(loss, found)(again[0], X)) == pytest.approx(float(loss(made[0], X)), rel=1e-5)
    with pytest.raises(mw.ShardingError, match="init must return a tuple of 2, and it returned a dict"):
        mw.create_state(lambda key: init(key)[0], jax.random.key(0), like=found, example=(X,))


def test_state_and_batch_cannot_be_the_same():
    with pytest.raises(mw.ShardingError, match="argument 1 is both state and batch"):
        mw.parallelize(step, state_argnums=(0, 1), batch_argnums=1)


def plain(w, x):
    """A step that takes no gradient by JAX."""
    return w - 0.1 * (x.T @ (x @ w)), jnp.sum(w)


def differentiated(w, x):
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, value


@pytest.mark.parametrize(("function", "options"), [(plain, {"donate_argnums": 0}), (differentiated, {})])
def test_a_lone_array_that_comes_back_is_donated_and_keeps_its_sharding(function, options):
    found = mw.parallelize(function, cluster=CPU, method="zero3", **options)
    first, _ = found(np.ones((8, 8), np.float32), X)
    second, _ = found(first, X)
    plan = found.last_plan
    assert first.is_deleted() and first.sharding == second.sharding and len(found.plans) == 1
    assert plan.arguments[0].donated and plan.arguments[0].spec == plan.results[0].spec
    assert plan.results[0].role == "state"


def test_a_count_that_begins_as_a_number_is_planned_once():
    def count(state, x):
        return {"step": state["step"] + 1, "w": state["w"] - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])}

    found, state = mw.parallelize(count, cluster=CPU), {"step": 0, "w": np.ones((8, 8), np.float32)}
    for _ in range(3):
        state = found(state, X)
    assert int(state["step"]) == 3 and len(found.plans) == 1
    made = mw.parallelize(count, cluster=CPU)
    state = mw.create_state(lambda: {"step": 0, "w": jnp.ones((8, 8))}, like=made, example=(X,))
    assert int(made(made(state, X), X)["step"]) == 2 and len(made.plans) == 1


def test_a_number_that_the_functions_own_code_reads_stays_one():
    found = mw.parallelize(lambda n, w: w * (1 if n > 1 else 2), cluster=CPU)
    assert [float(found(n, X)[0, 0]) for n in (0, 5, 0)] == [-2, -1, -2]
    assert len(found.plans) == 2, "a plan for each of them, since the code may do anything with it"
    with pytest.raises(mw.TraceError):
        found(jnp.asarray(0), X)


@pytest.mark.parametrize("options", [{"microbatches": 2}, {"method": mw.ThreeD(pipeline=2, microbatch=4)}], ids=str)
def test_what_cannot_be_cut_like_a_batch_is_refused_with_what_to_do(options):
    params, momentum = init(jax.random.key(0))
    momentum["v"] = jnp.zeros((4, 8))
    many = mw.parallelize(step, cluster="1x2 cpu", **options)
    with pytest.raises(mw.ShardingError, match=r"first dims of 4 and 8.*argument 1 is.*state_argnums=\(0, 1\)"):
        many.plan(params, momentum, X)
    many = mw.parallelize(lambda w, batch: step(w, w, batch["x"]), cluster="1x2 cpu", **options)
    with pytest.raises(mw.ShardingError, match=r"first dims of 3 and 16.*an argument of its own"):
        many.plan(params, {"x": X, "table": np.ones((3, 8))})
