"""Training on Ray: a worker is killed, and the run ends with the numbers of an undisturbed one.

This is not in a folder tests/ray, which would be imported in place of Ray.
"""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import meshwright as mw
from tests.compiling import FLAGS

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"
STEPS, EVERY = 30, 5
HANG_S = 400


def test_without_ray_it_says_what_to_install():
    code = "import sys; sys.modules['ray'] = None; import meshwright.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "pip install 'meshwright[ray]'" in done.stderr.splitlines()[-1]


def test_devices_that_cannot_be_given_are_refused():
    train = pytest.importorskip("ray.train")
    from meshwright.ray import Trainer

    with pytest.raises(mw.ProcessError, match="devices_per_worker is 0; give 1 or more"):
        Trainer(lambda: None, devices_per_worker=0)
    with pytest.raises(mw.ProcessError, match="devices_per_worker is 2, which is for CPUs; give the accelerators"):
        Trainer(lambda: None, train.ScalingConfig(use_gpu=True), devices_per_worker=2)


def undisturbed(monkeypatch):
    """The losses of the example's loop in this process, by step."""
    import meshwright.ray

    found = {}
    monkeypatch.setattr(meshwright.ray, "restore", lambda like: None)
    monkeypatch.setattr(meshwright.ray, "save", lambda step, state, metrics: found.update({step: metrics["loss"]}))
    spec = importlib.util.spec_from_file_location("ray_train", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.train_loop({"steps": STEPS, "every": EVERY})
    return found


@pytest.mark.slow
@pytest.mark.devices
def test_a_run_continues_after_a_worker_was_killed(tmp_path, monkeypatch):
    pytest.importorskip("ray.train")
    options = ("--workers", 2, "--devices", 2, "--steps", STEPS, "--every", EVERY, "--storage", tmp_path)
    run = subprocess.Popen(
        [sys.executable, EXAMPLE, *map(str, options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"XLA_FLAGS": FLAGS, "RAY_DEDUP_LOGS": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "1"},
    )
    lines = []
    try:
        for line in run.stdout:
            lines.append(line)
            if found := re.search(r"worker 1 of 2 \(process (\d+)\): 4 devices, from step 0", line):
                wait_for(tmp_path / "ray_train" / "checkpoints" / str(EVERY))
                os.kill(int(found[1]), signal.SIGKILL)
        assert run.wait(HANG_S) == 0, "".join(lines)
    finally:
        run.kill()
        run.stdout.close()
    printed = "".join(lines)
    assert re.search(r"worker 0 of 2 \(process \d+\): 4 devices, from step [1-9]", printed), printed
    assert "process 1 was killed or crashed" in printed
    losses = {int(step): float(loss) for step, loss in re.findall(r"^step (\d+): loss ([\d.]+)$", printed, re.M)}
    right = undisturbed(monkeypatch)
    assert max(losses) == STEPS and len(losses) == 3
    for step, loss in losses.items():
        assert loss == pytest.approx(right[step], abs=1e-5)  # as many digits as are printed
    kept = sorted(int(path.name) for path in (tmp_path / "ray_train" / "checkpoints").iterdir())
    assert kept == sorted(losses)


def wait_for(path):
    deadline = time.monotonic() + HANG_S
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
