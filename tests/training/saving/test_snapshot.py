"""Copies of a state that is saved in the background: no later step changes them, and a process has none twice."""

from functools import partial
from threading import Event

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright.training.saving import under_way
from meshwright.training.saving.files import try_folder
from meshwright.training.saving.snapshot import snapshot

pytestmark = pytest.mark.devices


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [((), 1), (("x",), 2), (("y",), 4), ((None, "y"), 4), (("x", "y"), 8), ((("y", "x"),), 8)],
)
def test_copies_are_whole_and_one_of_each_part(mesh, spec, parts):
    values = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))
    [copy] = snapshot([array])
    array.delete()
    np.testing.assert_array_equal(copy, values)
    assert len(copy.addressable_shards) == parts
    assert {shard.replica_id for shard in copy.addressable_shards} == {0}


def test_what_is_no_array_of_a_device_is_copied_or_kept():
    host, function = np.ones(3), partial(max, 1)
    copy, same, number = snapshot([host, function, 3])
    host[:] = 0
    assert copy.tolist() == [1, 1, 1] and same is function and number == 3


@pytest.mark.parametrize("spec", [(), ("x",)])
def test_a_step_that_is_still_running_is_waited_for_by_the_copy_alone(mesh, tmp_path, spec):
    """The arrays are the results of one long step, and are given to the next before anything was copied."""
    place = NamedSharding(mesh, PartitionSpec(*spec))

    @partial(jax.jit, donate_argnums=0, out_shardings=place)
    def step(w):
        return jax.lax.fori_loop(0, 30, lambda _, w: jnp.tanh(w @ w.T @ w * 1e-3) + w, w)

    values = np.random.default_rng(0).normal(size=(256, 256)).astype(np.float32)
    expected = np.array(step(jax.device_put(values, place)))
    running = step(jax.device_put(values, place))
    writing = mw.save(tmp_path, 1, {"w": running}, wait=False)
    later = step(running)
    assert running.is_deleted()
    writing.wait()
    like = {"w": jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=place)}
    np.testing.assert_array_equal(mw.restore(tmp_path, like=like)["w"], expected)
    assert not np.array_equal(later, expected)


def test_a_save_goes_to_the_folder_that_was_meant_when_it_was_asked_for(tmp_path, monkeypatch):
    moved = Event()

    def try_later(*given):
        moved.wait(timeout=300)
        try_folder(*given)

    monkeypatch.setattr(under_way, "try_folder", try_later)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    writing = mw.save("checkpoints", 1, {"w": jnp.ones(4)}, wait=False)
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved.set()
    writing.wait()
    assert mw.saved_steps(tmp_path / "checkpoints") == [1]
    assert not (tmp_path / "elsewhere" / "checkpoints").exists()
