"""Pipelines whose stages are in several processes, started by `meshwright launch`."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshwright as mw
from tests.compiling import FLAGS
from tests.runtime.stages.models import build

pytestmark = pytest.mark.devices

SCRIPT = Path(__file__).parent / "in_processes.py"


def test_stages_of_several_processes_compute_save_and_restore_what_one_device_computes(tmp_path):
    root = Path(__file__).parents[3]
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))  # the script imports tests
    environment = os.environ | {"XLA_FLAGS": FLAGS, "PYTHONPATH": paths}
    command = [sys.executable, "-m", "meshwright", "launch", "--processes", "2", "--devices-per-process", "2"]
    done = subprocess.run(
        [*command, str(SCRIPT), str(tmp_path)], capture_output=True, text=True, timeout=300, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "[0] 0: done" in done.stdout and "[1] 1: done" in done.stdout
    assert "meshwright:" not in done.stderr, "processes that end well end without a word"
    with jax.enable_x64(True):
        _is_restored_by_one_process(tmp_path)


def _is_restored_by_one_process(folder):
    """The checkpoint of interleaved stages, with unequal parts of a stack, on another number of devices."""
    init, train_step, batch = build(5, scan=True)
    expected, one = jax.jit(init)(jax.random.key(0)), jax.jit(train_step)
    for _ in range(3):
        expected, _ = one(expected, batch)
    place = NamedSharding(Mesh(np.array(jax.devices()[:6]), ("x",)), PartitionSpec())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), expected)
    found = mw.restore(folder, like=like)
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert a.sharding == place
        np.testing.assert_allclose(a, b, atol=1e-12)
