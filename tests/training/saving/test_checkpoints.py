"""Checkpoints: what was saved comes back, on any mesh, and no fault costs an earlier one."""

import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.training.saving import checkpoints

pytestmark = pytest.mark.devices


def train_step(state, batch):
    def loss(params):
        return jnp.mean((jax.nn.relu(batch @ params["in"]) @ params["out"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    new = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": new, "step": state["step"] + 1}, value


def init(seed=0, hidden=24):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"params": {"in": draw(12, hidden), "out": draw(hidden, 12)}, "step": jnp.int32(0)}


BATCH = np.random.default_rng(0).normal(size=(24, 12)).astype("f4")


def planned(cluster="1x8 cpu", function=train_step, state=None, **settings):
    step = mw.parallelize(function, cluster=cluster, **{"method": mw.Zero(stage=3)} | settings)
    step.plan(init() if state is None else state, BATCH)
    return step


def apart(tree):
    """A copy: an array that NumPy has looked at on a CPU is not donated any more."""
    return jax.tree.map(jnp.copy, tree)


def assert_equal(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with the state after two steps on eight devices, and the state."""
    directory = tmp_path_factory.mktemp("trained")
    step = planned()
    state = init()
    for _ in range(2):
        state, _ = step(state, BATCH)
    mw.save(directory, 2, state)
    return directory, state


@pytest.mark.parametrize(
    ("cluster", "mesh"),
    [("1x8 cpu", None), ("1x8 cpu", (2, 4)), ("1x4 cpu", None), ("1x6 cpu", (2, 3)), ("1x1 cpu", None)],
)
def test_it_comes_back_on_any_mesh_where_the_plan_wants_it(trained, cluster, mesh):
    directory, state = trained
    step = planned(cluster, mesh=mesh)
    found = mw.restore(directory, like=step)
    assert_equal(state, apart(found))
    new, _ = step(found, BATCH)
    assert all(x.is_deleted() for x in jax.tree.leaves(found)), "it lay in place, so it was donated"
    one, _ = jax.jit(train_step)(jax.tree.map(np.asarray, state), BATCH)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(new), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_a_state_may_be_donated_as_soon_as_it_is_saved(tmp_path):
    step = planned()
    state, _ = step(init(), BATCH)
    expected = apart(state)
    mw.save(tmp_path, 1, state)
    step(state, BATCH)
    for leaf in jax.tree.leaves(state):
        leaf.delete()  # where saving let NumPy look at it, some releases of JAX keep it
    assert_equal(expected, mw.restore(tmp_path, like=step))
    with pytest.raises(mw.CheckpointError, match="params/in of the state is deleted: it was donated"):
        mw.save(tmp_path, 2, state)


def odd_state():
    return {
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4, impl="rbg"), 8),
        "half": jnp.ones((8, 2), jnp.bfloat16),
        "eighth": jnp.ones(4, jnp.float8_e4m3fn),
        "mask": np.array([True, False]),
        "host": np.arange(3.0),
        "empty": np.zeros((0, 4), np.float32),
        "count": np.int32(3),
        "weak": jnp.asarray(2),
        "number": 7,
        "nothing": None,
        "tuple": (),
        "a": {"b": jnp.zeros(2)},
        "a/b": jnp.ones(2),
        "activation": jax.nn.relu,
    }


def odd_step(state, batch):
    return state | {"half": state["half"] * 2}, state["activation"](batch).sum()


def test_every_kind_of_leaf_comes_back(tmp_path):
    state = odd_state()
    mw.save(tmp_path, 0, state)
    step = planned("1x4 cpu", odd_step, state, method=mw.Auto())
    found = mw.restore(tmp_path, like=step)
    assert jax.tree.structure(state) == jax.tree.structure(found)
    assert found["activation"] is jax.nn.relu and found["nothing"] is None and found["tuple"] == ()
    assert found["weak"].weak_type and int(found["number"]) == 7
    for name, leaf in state.items():
        if name in ("activation", "nothing", "tuple", "a"):
            continue
        assert found[name].dtype == jax.typeof(leaf).dtype, name
        data = jax.random.key_data if name.startswith("key") else np.asarray
        np.testing.assert_array_equal(data(leaf), data(found[name]), err_msg=name)
    assert_equal(state["a"], found["a"])
    step(found, BATCH)


def test_numbers_that_python_reads_stay_numbers(tmp_path):
    def step(state, batch):
        scale = 2.0 if state["switch"] else 1.0
        return state | {"w": state["w"] * scale}, batch.sum()

    state = {"w": jnp.ones(8), "switch": True, "rate": 0.1}
    mw.save(tmp_path, 1, state)
    found = mw.restore(tmp_path, like=planned("1x4 cpu", step, state | {"rate": 0.5}, method=mw.Auto()))
    assert found["switch"] is True and float(found["rate"]) == np.float32(0.1)


def test_a_module_with_functions_among_its_leaves(tmp_path):
    eqx = pytest.importorskip("equinox")

    def step(model, batch):
        grads = eqx.filter_grad(lambda m: jnp.mean(jax.vmap(m)(batch) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, grads)), batch.sum()

    model = eqx.nn.MLP(12, 4, 8, 1, key=jax.random.key(0))
    mw.save(tmp_path, 1, model)
    other = eqx.nn.MLP(12, 4, 8, 1, key=jax.random.key(1))
    found = mw.restore(tmp_path, like=planned("1x4 cpu", step, other))
    assert found.activation is other.activation
    assert_equal(eqx.filter(model, eqx.is_array), eqx.filter(found, eqx.is_array))
    np.testing.assert_allclose(jax.vmap(model)(BATCH), jax.vmap(found)(BATCH), rtol=1e-5, atol=1e-6)


def test_a_tree_of_arrays_or_types_says_where_as_well(tmp_path):
    state = init()
    mw.save(tmp_path, 1, state | {"name": "first", "rate": 0.25})
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.P(None, "x"))
    like = state | {"name": "second", "rate": 0.0}
    like["params"] = {
        "in": jax.ShapeDtypeStruct((12, 24), "float32", sharding=sharding),
        "out": jax.device_put(state["params"]["out"], sharding),
    }
    found = mw.restore(tmp_path, like=like)
    assert found["name"] == "second" and found["rate"] == 0.25
    assert found["params"]["in"].sharding == found["params"]["out"].sharding == sharding
    assert_equal(state["params"], found["params"])


def test_a_state_without_arrays(tmp_path):
    mw.save(tmp_path, 1, {"epoch": 3})
    assert mw.restore(tmp_path, like={"epoch": 0}) == {"epoch": 3}


def test_the_newest_is_restored_unless_told_and_old_ones_go_when_told(tmp_path):
    for number in (1, 10, 9):
        mw.save(tmp_path, number, {"n": number})
    assert mw.restore(tmp_path, like={"n": 0}) == {"n": 10}
    assert mw.restore(str(tmp_path), like={"n": 0}, step=9) == {"n": 9}
    with pytest.raises(mw.CheckpointError, match="no checkpoint of step 7; it holds steps 1, 9, 10"):
        mw.restore(tmp_path, like={"n": 0}, step=7)
    mw.save(tmp_path, 11, {"n": 11}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["10", "11"]
    mw.save(tmp_path, 5, {"n": 5}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["11", "5"]
    mw.save(tmp_path, 6, {"n": 6}, keep=9)
    assert len(list(tmp_path.iterdir())) == 3


def test_a_checkpoint_that_a_run_removes_while_it_is_read_gives_way_to_the_newest(tmp_path, monkeypatch):
    mw.save(tmp_path, 1, {"w": np.ones(3)})
    compare = checkpoints.check_alike

    def meanwhile(*args):
        if mw.saved_steps(tmp_path) == [1]:
            mw.save(tmp_path, 2, {"w": np.full(3, 2.0)}, keep=1)
        compare(*args)

    monkeypatch.setattr(checkpoints, "check_alike", meanwhile)
    assert mw.restore(tmp_path, like={"w": np.zeros(3)})["w"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(mw.CheckpointError, match="no checkpoint of step 1"):
        mw.restore(tmp_path, like={"w": np.zeros(3)}, step=1)


def test_a_step_is_saved_once(tmp_path):
    mw.save(tmp_path, 1, {"n": 1})
    with pytest.raises(mw.CheckpointError, match="has step 1 already"):
        mw.save(tmp_path, 1, {"n": 2})
    assert mw.restore(tmp_path, like={"n": 0}) == {"n": 1}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": jnp.float32(0)}, r"has step as int32\[\] and it is float32\[\] here"),
        ({"params": init(hidden=48)["params"]}, r"has params/in as float32\[12, 24\] and it is float32\[12, 48\] here"),
        ({"extra": jnp.ones(3)}, r"has no extra, which is float32\[3\] here"),
        ({"step": None}, r"has step as int32\[\] and there is no such leaf here"),
        ({"step": jax.nn.relu}, r"has step as int32\[\] and it is a \w+ here"),
        ({"step": 3}, r"has step as int32\[\] and it is the int 3 here"),
    ],
)
def test_another_state_is_refused_by_its_first_difference(trained, change, message):
    with pytest.raises(mw.CheckpointError, match=message):
        mw.restore(trained[0], like=init() | change)


def test_what_is_asked_for_must_be_there(tmp_path):
    like = {"n": 0}
    with pytest.raises(mw.CheckpointError, match=r"no directory .*nowhere"):
        mw.restore(tmp_path / "nowhere", like=like)
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(mw.CheckpointError, match="holds no finished checkpoint"):
        mw.restore(tmp_path, like=like)
    with pytest.raises(mw.CheckpointError, match=r"has no plan yet.*call train_step\.plan"):
        mw.restore(tmp_path, like=mw.parallelize(train_step))
    for step in (-1, 1.5, True, "1"):
        with pytest.raises(mw.CheckpointError, match="give a whole number"):
            mw.save(tmp_path, step, like)
    with pytest.raises(mw.CheckpointError, match="keep is 0"):
        mw.save(tmp_path, 1, like, keep=0)


def test_a_checkpoint_of_someone_else_or_a_damaged_one_is_said_to_be(tmp_path):
    state = {"w": jnp.ones((4, 4))}
    mw.save(tmp_path, 1, state)
    mw.save(tmp_path, 2, state)
    for file in (tmp_path / "2" / "arrays").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(mw.CheckpointError, match=r"step 2 .* cannot be read: .*; step 1 can be tried"):
        mw.restore(tmp_path, like=state)
    (tmp_path / "2" / "leaves" / "metadata").write_text("{}")
    with pytest.raises(mw.CheckpointError, match=r"not written by mw.save, or is damaged"):
        mw.restore(tmp_path, like=state)
    assert_equal(state, mw.restore(tmp_path, like=state, step=1))


KILLED = """
import os, sys, time
import jax.numpy as jnp
import meshwright as mw

mw.save(sys.argv[1], 1, {"w": jnp.arange(1000.0)})

def stall(source, *rest, rename=os.rename, **options):
    if str(source).rstrip("/").endswith("2.orbax-checkpoint-tmp"):
        print("stalled", flush=True)
        time.sleep(600)
    return rename(source, *rest, **options)

os.rename = os.replace = stall
mw.save(sys.argv[1], 2, {"w": jnp.arange(1000.0) + 1})
"""


def test_a_process_killed_in_a_save_leaves_the_last_good_one(tmp_path):
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert child.stdout.readline() == "stalled\n", child.communicate(timeout=60)
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    left = [p.name for p in tmp_path.iterdir() if p.name != "1"]
    assert len(left) == 1 and "tmp" in left[0]
    like = {"w": jnp.zeros(1000)}
    np.testing.assert_array_equal(mw.restore(tmp_path, like=like)["w"], np.arange(1000.0))
    mw.save(tmp_path, 2, {"w": jnp.arange(1000.0) + 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1", "2"]
    np.testing.assert_array_equal(mw.restore(tmp_path, like=like)["w"], np.arange(1000.0) + 1)


def test_a_write_that_fails_loses_nothing(tmp_path):
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=100_000), jnp.float32)}
    mw.save(tmp_path, 1, {"w": state["w"] + 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # no file may grow beyond: writes fail as on a disk
    try:
        with pytest.raises(mw.CheckpointError) as caught:
            mw.save(tmp_path, 2, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(caught.value)
    assert f"step 2 could not be saved in {tmp_path}" in said and "step 1 there is intact" in said
    assert "Nothing of the state is lost" in said
    assert [p.name for p in tmp_path.iterdir()] == ["1"], "what the failed save left behind takes no room"
    mw.save(tmp_path, 2, state)
    assert_equal(state, mw.restore(tmp_path, like=state))


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), ValueError("RESOURCE_EXHAUSTED: … [OS error 28: ENOSPC No space]")],
)
def test_a_full_disk_is_said(tmp_path, monkeypatch, error):
    import orbax.checkpoint as ocp

    def fail(*args, **options):
        raise RuntimeError("could not be written") from error

    monkeypatch.setattr(ocp.CheckpointManager, "save", fail)
    with pytest.raises(mw.CheckpointError, match=r"step 1 could not be saved .*: the disk is full: make room"):
        mw.save(tmp_path, 1, {"w": jnp.ones(4)})


def test_a_checkpoint_that_the_disk_did_not_take_is_not_left(tmp_path, monkeypatch):
    def fail(number):
        raise OSError(28, "No space left on device")

    mw.save(tmp_path, 1, {"w": jnp.ones(4)})
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(mw.CheckpointError, match=r"the disk is full.*step 1 there is intact"):
        mw.save(tmp_path, 2, {"w": jnp.ones(4)}, keep=1)
    assert [p.name for p in tmp_path.iterdir()] == ["1"]


def test_a_file_is_no_directory_to_save_in(tmp_path):
    (tmp_path / "state").write_text("something else")
    with pytest.raises(mw.CheckpointError, match="state is a file; give a directory"):
        mw.save(tmp_path / "state", 1, {"w": jnp.ones(4)})
    assert (tmp_path / "state").read_text() == "something else"


def test_without_orbax_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(mw.CheckpointError, match=r"pip install 'meshwright\[train\]'"):
        mw.save(tmp_path, 1, {"w": 1})


def test_a_relative_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mw.save("runs/first", 1, {"n": 1})
    assert mw.restore(Path("runs/first"), like={"n": 0}) == {"n": 1}
    assert (tmp_path / "runs" / "first" / "1").is_dir()


@pytest.mark.parametrize(
    ("directory", "said"),
    [
        (None, "the directory is None; give a path"),
        (5, "the directory is 5; give a path"),
        (b"here", "the directory is b'here'; give a path"),
        ("hdfs://here/there", "hdfs://here/there is of a kind that Orbax cannot reach"),
        ("file://elsewhere/there", "file://elsewhere/there is of a kind that Orbax cannot reach"),
        ("gs://bucket/there", "gs://bucket/there cannot be reached: ImportError: .*gcsfs"),
        (Path("gs://bucket/there"), "gs:/bucket/there lacks a slash"),
    ],
)
def test_what_is_no_directory_is_refused_by_all(directory, said, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    for call in (
        lambda: mw.save(directory, 1, {}),
        lambda: mw.restore(directory, like={}),
        lambda: mw.saved_steps(directory),
    ):
        with pytest.raises(mw.CheckpointError, match=said):
            call()


def test_a_directory_may_be_a_url_of_a_file(tmp_path):
    url = (tmp_path / "a folder").as_uri()
    mw.save(url, 1, {"step": 3})
    assert mw.restore(url, like={"step": 0}) == {"step": 3}
    assert mw.saved_steps(tmp_path / "a folder") == mw.saved_steps(url) == [1]
