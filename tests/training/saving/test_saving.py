"""Saves in the background: nothing that happens meanwhile changes what is saved, and no error goes unseen."""

import asyncio
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.training.saving.files import full_path

pytestmark = pytest.mark.devices

SLOWLY = """
import os, sys, time
import jax.numpy as jnp
import meshwright as mw

def late(source, *rest, rename=os.rename, **options):
    time.sleep(0.5)
    if sys.argv[2:] == ["full"]:
        raise OSError(28, "No space left on device")
    return rename(source, *rest, **options)

mw.save(sys.argv[1], 1, {"w": jnp.arange(1000.0)})
os.rename = os.replace = late
saving = mw.save(sys.argv[1], 2, {"w": jnp.arange(1000.0) + 1}, wait=False)
print(saving.is_done)
if sys.argv[2:] == ["error"]:
    raise KeyError("a mistake")
"""


class Unraisable(NamedTuple):
    """What `sys.unraisablehook` is called with."""

    exc_value: BaseException
    exc_traceback: Any


def steps(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_the_state_of_the_call(tmp_path):
    host = np.arange(100_000.0)
    state = {"device": jnp.asarray(np.random.default_rng(0).normal(size=100_000)), "host": host}
    expected = {name: np.array(leaf) for name, leaf in state.items()}
    saving = mw.save(tmp_path, 1, state, wait=False)
    host[:] = 0
    state["device"].delete()
    found = mw.restore(tmp_path, like=expected)  # which waits
    assert saving.is_done
    for name, leaf in expected.items():
        np.testing.assert_array_equal(found[name], leaf)


def test_the_newest_are_kept_and_what_an_interrupted_removal_left_goes(tmp_path):
    (tmp_path / "0.removed.orbax-checkpoint-tmp").mkdir()
    for step in range(1, 5):
        saving = mw.save(tmp_path, step, {"n": step}, keep=2, wait=False)
    saving.wait()
    assert steps(tmp_path) == ["3", "4"]


def test_an_error_in_the_background_is_raised_once_by_whatever_comes_next(tmp_path):
    state = {"w": jnp.asarray(np.random.default_rng(0).normal(size=100_000), jnp.float32)}
    mw.save(tmp_path, 1, state)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        saving = mw.save(tmp_path, 2, state, wait=False, keep=1)
        with pytest.raises(mw.CheckpointError, match=r"step 2 could not be saved in .*; step 1 there is intact"):
            mw.save(tmp_path, 3, {"n": 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saving.wait()
    assert steps(tmp_path) == ["1"]
    mw.save(tmp_path, 3, state)
    assert steps(tmp_path) == ["1", "3"]


def test_an_error_in_the_background_is_said_before_anything_waits_for_it(tmp_path, caplog, monkeypatch):
    def fail(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    saving = mw.save(tmp_path, 2, {"w": jnp.ones(4)}, wait=False)
    while not saving.is_done:
        time.sleep(0.01)
    [said] = [record.getMessage() for record in caplog.records if record.name == "meshwright"]
    with pytest.raises(mw.CheckpointError, match=r"step 2 could not be saved in .*: the disk is full") as raised:
        saving.wait()
    assert said == str(raised.value)


def test_writes_that_end_after_a_failed_save_print_nothing_and_other_errors_are_printed(tmp_path, monkeypatch):
    """TensorStore calls a closed event loop from a thread of its own; what it raises goes to `sys.unraisablehook`."""
    printed = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: printed.append(unraisable.exc_value))
    mw.save(tmp_path, 1, {"n": 1})
    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as late:
        loop.call_soon_threadsafe(print)
    error = late.value
    sys.unraisablehook(Unraisable(error, error.__traceback__.tb_next))  # without the frame of this test
    assert printed == []
    mistake = KeyError("a mistake")
    sys.unraisablehook(Unraisable(error, error.__traceback__))  # the program's own
    sys.unraisablehook(Unraisable(mistake, None))
    assert printed == [error, mistake]


def test_saving_does_not_disturb_the_agreement_on_preemption(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", asked.append)
    mw.save(tmp_path, 1, {"n": 1}, wait=False).wait()
    assert asked == []


@pytest.mark.parametrize("how", ["well", "error"])
def test_the_end_of_the_program_waits(tmp_path, how):
    done = subprocess.run([sys.executable, "-c", SLOWLY, tmp_path, how], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (how == "error", "False\n")
    assert done.stderr == "" if how == "well" else done.stderr.endswith("KeyError: 'a mistake'\n")
    assert float(mw.restore(tmp_path, like={"w": jnp.zeros(1000)})["w"][0]) == 1


def test_a_program_whose_last_save_fails_says_so_and_fails(tmp_path):
    done = subprocess.run([sys.executable, "-c", SLOWLY, tmp_path, "full"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (1, "False\n")
    [said] = done.stderr.splitlines()
    assert said.startswith(f"meshwright: step 2 could not be saved in {tmp_path}: the disk is full")
    assert steps(tmp_path) == ["1"]


REFUSED = """
import os, pathlib, sys
import numpy as np
import meshwright as mw
directory = pathlib.Path(sys.argv[1])
while (room := os.pathconf(sys.argv[1], "PC_PATH_MAX") - len(str(directory)) - 20) > 0:
    directory /= "d" * min(room, 200)
directory.mkdir(parents=True)
try:
    mw.save(directory, 1, {"w": np.ones(3)})
except mw.CheckpointError as error:
    print(error)
"""


def test_a_program_whose_save_was_refused_can_end(tmp_path):
    """As on a disk that is read-only: the path of the checkpoint is too long. Orbax would wait for twenty minutes."""
    done = subprocess.run([sys.executable, "-c", REFUSED, tmp_path], capture_output=True, text=True, timeout=300)
    assert "step 1 could not be saved in" in done.stdout and "File name too long" in done.stdout
    assert done.returncode == 0, done.stderr  # a thread of Orbax may still log that it came too late


def test_a_folder_is_not_tried_while_orbax_removes_what_it_takes_for_remains(tmp_path, monkeypatch):
    """It does so in a thread that a manager starts: whichever came second would not find the folder."""
    import orbax.checkpoint as ocp

    begun = []
    kind = type(full_path(tmp_path))
    make, start = kind.mkdir, ocp.CheckpointManager.__init__

    def noted(self, **options):
        if "tried" in self.name:
            begun.append("tried")
        make(self, **options)

    def started(self, *args, **options):
        begun.append("removing")
        start(self, *args, **options)

    monkeypatch.setattr(kind, "mkdir", noted)
    monkeypatch.setattr(ocp.CheckpointManager, "__init__", started)
    mw.save(tmp_path, 1, {"n": 1})
    assert begun == ["tried", "removing"]
