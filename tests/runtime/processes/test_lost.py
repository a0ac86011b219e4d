"""The first process is killed under `meshwright launch`: all are started again and continue with the same numbers."""

import ast
import os
import subprocess
import sys

import pytest

from tests.compiling import FLAGS
from tests.runtime.processes import in_launch

pytestmark = pytest.mark.devices

STEPS, KILLED_AT, HANG_S = 8, 5, 240


def test_a_run_whose_coordinator_is_killed_continues_from_its_last_checkpoint(tmp_path):
    command = ["launch", "--processes", "2", "--devices-per-process", "2", "--restarts", "1", in_launch.__file__]
    run = [tmp_path / "checkpoints", STEPS, 0, KILLED_AT]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *command, *map(str, run)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=os.environ | {"XLA_FLAGS": FLAGS},
    )
    assert done.returncode == 0, done.stderr
    assert "meshwright launch: process 0 of 2 was killed by SIGKILL" in done.stderr
    assert "starting all 2 processes again (restart 1 of 1)" in done.stderr
    found = [line.split(" ", 3) for line in done.stdout.splitlines() if "losses" in line]
    assert sorted(words[:3] for words in found) == [[f"[{i}]", "losses", "4"] for i in range(2)]
    right = in_launch.train(tmp_path / "undisturbed", STEPS)
    for words in found:
        losses = ast.literal_eval(words[3])
        assert min(losses) in (2, 4), "it continued from a checkpoint"  # the last may have been under way
        assert losses == pytest.approx({step: right[step] for step in losses}, rel=2e-5)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [str(STEPS), "killed"]
