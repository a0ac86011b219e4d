"""Batches: in order, in place, fetched ahead, and nothing left behind."""

import gc
import logging
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw

pytestmark = pytest.mark.devices

CPU = "1x8 cpu"
HANG_S = 60


def step_of(**settings):
    def train_step(state, batch):
        loss = lambda w: jnp.mean((batch["x"] @ w - batch["y"]) ** 2)  # noqa: E731
        value, grad = jax.value_and_grad(loss)(state)
        return state - 0.1 * grad, value

    return mw.parallelize(train_step, cluster=CPU, **{"method": mw.DataParallel()} | settings)


def batch(seed=0, size=16):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(size, 8)).astype("f4"), "y": rng.normal(size=(size, 4)).astype("f4")}


def state():
    return jnp.ones((8, 4))


def is_placed(found):
    return isinstance(found["x"], jax.Array) and not found["x"].sharding.is_fully_replicated


def threads():
    return [t for t in threading.enumerate() if t.name == "meshwright-batches"]


def assert_no_threads():
    deadline = time.monotonic() + HANG_S
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_a_loop_trains_as_without_it():
    step, plain = step_of(), jax.jit(step_of().function)
    many, one, seen = state(), state(), []
    for given in mw.batches((batch(i) for i in range(6)), step):
        seen.append(is_placed(given))
        many, value = step(many, given)
    for i in range(6):
        one, expected = plain(one, batch(i))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(many, one, rtol=1e-5)
    assert seen == [False, True, True, True, True, True], "there is no plan yet for the first one"
    assert_no_threads()


def test_batches_of_a_planned_function_are_all_in_place():
    step = step_of()
    plan = step.plan(state(), batch())
    for i, given in enumerate(mw.batches([batch(i) for i in range(3)], step)):
        assert given["x"].sharding.spec == plan.in_shardings[1]["x"] and is_placed(given)
        np.testing.assert_array_equal(given["x"], batch(i)["x"])
    assert i == 2


def test_a_smaller_last_batch_is_planned_for_and_said(caplog):
    step, now = step_of(method=mw.Auto()), state()
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for epoch in range(2):
            for given in mw.batches([batch(size=16), batch(size=16), batch(size=5)], step):
                now, _ = step(now, given)
            if epoch:
                assert isinstance(given["x"], jax.Array), "by now it has a plan, too"
    assert [r.getMessage().count("batch/x changed") for r in caplog.records if r.name == "meshwright"] == [1]


def test_two_batches_are_fetched_ahead_and_no_more():
    fetched = []

    def loader():
        for i in range(10):
            fetched.append(i)
            yield batch(i)

    found = mw.batches(loader(), step_of())
    next(found)
    deadline = time.monotonic() + HANG_S
    while len(fetched) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert fetched == [0, 1, 2]
    found.close()
    found.close()
    assert list(found) == [] and not threads()


def test_an_error_comes_after_the_batches_before_it():
    def loader():
        yield batch(0)
        yield batch(1)
        raise OSError("the disk is gone")

    found, seen = mw.batches(loader(), step_of()), []
    with pytest.raises(OSError, match="the disk is gone"):
        for given in found:
            seen.append(given)
    assert len(seen) == 2 and list(found) == []
    assert_no_threads()


def test_stopping_early_ends_the_thread_and_closes_the_loader():
    closed = []

    def loader():
        try:
            while True:
                yield batch()
        finally:
            closed.append(True)

    for _ in mw.batches(loader(), step_of()):
        break
    with pytest.raises(ZeroDivisionError):
        for _ in mw.batches(loader(), step_of()):
            _ = 1 / 0
    gc.collect()
    assert_no_threads()
    assert closed == [True, True]


def test_a_loader_may_reuse_its_buffers():
    def loader():
        buffer = batch()
        for i in range(6):
            buffer["x"][:] = i
            yield buffer

    step = step_of()
    for planned in range(2):
        assert [float(given["x"][3, 3]) for given in mw.batches(loader(), step)] == list(range(6)), planned
        step.plan(state(), batch())


def test_leaves_of_other_kinds_go_through():
    def step(state, batch, flag):
        return state + batch["x"].sum() * batch["scale"], flag

    many = mw.parallelize(step, cluster=CPU, static_argnums=(2,))
    items = [{"x": jnp.ones((8, 2)), "scale": 0.5, "none": None, "tag": np.float64(1)} for _ in range(3)]
    total = jnp.zeros(())
    for given in mw.batches(items, many):
        assert given["scale"] == 0.5 and type(given["scale"]) is float and given["none"] is None
        total, _ = many(total, given, True)
    assert float(total) == 24 and len(many.plans) == 1


def test_what_converts_to_arrays_is_taken():
    class Tensor:
        def __array__(self, dtype=None, copy=None):
            return np.ones((16, 8), np.float32)

    (given,) = mw.batches([{"x": Tensor(), "y": batch()["y"]}], step_of())
    assert isinstance(given["x"], np.ndarray)


def test_what_cannot_be():
    with pytest.raises(mw.ShardingError, match=r"that mw\.parallelize made, not for <function"):
        mw.batches([], lambda state, batch: state)
    with pytest.raises(mw.ShardingError, match="has no batch: batch_argnums is empty"):
        mw.batches([], step_of(batch_argnums=()))
    with pytest.raises(TypeError, match="not iterable"):
        mw.batches(3, step_of())
    assert list(mw.batches([], step_of())) == []


def test_python_ends_with_batches_half_used():
    code = (
        "import itertools, numpy as np, meshwright as mw\n"
        "step = mw.parallelize(lambda w, x: (w + x.sum(), x.max()), cluster='1x1 cpu')\n"
        "found = mw.batches(itertools.repeat(np.ones(4, 'f4')), step)\n"
        "print(next(found).sum())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["4.0"]), done.stderr
