"""Copies of checkpoints in memory: they are read where all parts are there, and never in place of what was saved."""

import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.training.in_memory import files
from tests.runtime.processes.launched import two_processes

pytestmark = pytest.mark.devices


def mesh(**sizes):
    axes = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=axes)


def state():
    place = NamedSharding(mesh(x=4, y=2), P("x", "y"))
    return {
        "w": jax.device_put(np.arange(96, dtype=np.float32).reshape(8, 12), place),
        "b": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), NamedSharding(place.mesh, P("y"))),
        "key": jax.random.key(3),
        "scale": np.float32(2.5),
        "step": 7,
    }


def elsewhere(saved):
    """The types of the state on another mesh."""
    places = {"w": P(None, "y"), "b": P(), "key": P()}
    other = mesh(x=2, y=4)
    types = {
        name: jax.ShapeDtypeStruct(saved[name].shape, saved[name].dtype, sharding=NamedSharding(other, spec))
        for name, spec in places.items()
    }
    return types | {"scale": saved["scale"], "step": 0}


def same(found, saved):
    plain = [
        [np.asarray(jax.random.key_data(x) if name == "key" else x) for name, x in sorted(tree.items())]
        for tree in (found, saved)
    ]
    return all(a.dtype == b.dtype and (a == b).all() for a, b in zip(*plain, strict=True))


@pytest.fixture
def memory(tmp_path, monkeypatch):
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv(files.FOLDER, str(folder))
    return folder


def without_arrays(directory, step):
    """The checkpoint without the bytes of its arrays, so that only memory has them."""
    shutil.rmtree(directory / str(step) / "arrays")


def test_a_state_is_read_from_memory_onto_another_mesh(tmp_path, memory):
    saved, directory = state(), tmp_path / "saved"
    mw.save(directory, 1, saved)
    without_arrays(directory, 1)
    assert same(mw.restore(directory, like=elsewhere(saved)), saved)


def test_the_newest_checkpoint_alone_is_kept(tmp_path, memory):
    saved, directory = state(), tmp_path / "saved"
    for step in (1, 2):
        mw.save(directory, step, saved, wait=False)
    mw.saved_steps(directory)
    assert sorted(path.name for path in memory.glob("*/*")) == ["2-0.data", "2-0.json"]


@pytest.mark.parametrize("what", ["a piece is lost", "a bit flips", "another checkpoint"])
def test_what_is_not_whole_in_memory_is_read_from_disk(tmp_path, memory, what, caplog):
    saved, directory = state(), tmp_path / "saved"
    mw.save(directory, 1, saved)
    [told], [data] = memory.glob("*/*.json"), memory.glob("*/*.data")
    if what == "a piece is lost":
        told.write_text(told.read_text().replace('["w", [[0, 2], [0, 6]], ', '["gone", [[0, 2], [0, 6]], '))
    elif what == "a bit flips":
        bits = bytearray(data.read_bytes())
        bits[3] ^= 1
        data.write_bytes(bits)
    else:
        shutil.rmtree(directory)
        changed = saved | {"w": saved["w"] + 1}
        mw.save(directory, 1, saved)
        shutil.copytree(directory, tmp_path / "other")
        shutil.rmtree(directory)
        mw.save(directory, 1, changed)
        shutil.rmtree(directory)
        shutil.move(tmp_path / "other", directory)  # memory has the step of the same number of another run
    assert same(mw.restore(directory, like=elsewhere(saved)), saved)
    assert ("is damaged in" in caplog.text) == (what == "a bit flips")


def test_more_than_its_share_of_the_memory_is_not_taken(tmp_path, memory, monkeypatch):
    real = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else real(name))
    saved, directory = {"w": jnp.zeros(2048)}, tmp_path / "saved"
    mw.save(directory, 1, saved)
    assert not list(memory.glob("*/*.data")) and same(mw.restore(directory, like=saved), saved)


TWO_HOSTS = """
import os, shutil, sys, tempfile
from pathlib import Path
process = int(os.environ["JAX_PROCESS_ID"])
root = Path(__file__).parent
os.environ["MESHWRIGHT_MEMORY"] = str(root / f"memory{process}")  # as on two hosts
(root / f"memory{process}").mkdir()
import jax, numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import meshwright as mw

mw.initialize()
rows = Mesh(np.array(jax.devices()).reshape(2, 2), ("host", "device"))
columns = Mesh(np.array(jax.devices())[[3, 1, 2, 0]], ("x",))
whole = np.arange(64, dtype=np.float32).reshape(8, 8)
split = mw.reshard(whole, NamedSharding(rows, P("host")))
copied = mw.reshard(whole, NamedSharding(rows, P(None, "device")))
directory = root / "saved"
mw.save(directory, 1, {"split": split, "copied": copied})
sync_global_devices("saved")
if process == 0:
    shutil.rmtree(directory / "1" / "arrays")
sync_global_devices("removed")
like = {name: jax.ShapeDtypeStruct((8, 8), np.float32, sharding=NamedSharding(columns, P(None, "x")))
        for name in ("split", "copied")}
found = mw.restore(directory, like=like)
for array in found.values():
    for shard in array.addressable_shards:
        assert (np.asarray(shard.data) == whole[shard.index]).all()
sync_global_devices("read")
if process == 1:
    shutil.rmtree(root / "memory1")  # the host is another one now
sync_global_devices("lost")
try:
    mw.restore(directory, like=like)
except mw.CheckpointError as error:
    assert "cannot be read" in str(error) or "damaged" in str(error), error
else:
    raise SystemExit("a part of what was split is in no memory, and not on disk")
print("done", flush=True)
"""


@pytest.mark.slow
def test_two_hosts_give_each_other_what_they_lack(tmp_path):
    two_processes(tmp_path, TWO_HOSTS, "--devices-per-process", "2")
