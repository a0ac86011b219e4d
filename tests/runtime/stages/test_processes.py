"""Pipelines whose stages are in several processes, started by `meshwright launch`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import FLAGS

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
