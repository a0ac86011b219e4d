"""`meshwright train` in several processes: it learns what one learns, and continues on another number of them."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.devices]

RUN = """
model = "llama-tiny"
shape = { layers = 1 }
data = "text.txt"
seq = 16
batch_tokens = 128
precision = "float32"
method = "zero3"
steps = 4
optimizer = { learning_rate = 1e-2 }
checkpoints = { every = 2 }
log = { every = 1 }
"""


def train(folder, *settings, processes=1, devices=4):
    """What `meshwright train` prints, alone or under `meshwright launch`."""
    given = [word for setting in settings for word in ("--set", setting)]
    alone = [sys.executable, "-m", "meshwright", "train", "run.toml", "--devices", str(devices), *given]
    launched = ["launch", "--processes", str(processes), "--devices-per-process", str(devices), "-m", "meshwright"]
    several = [sys.executable, "-m", "meshwright", *launched, "train", "run.toml", *given]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = alone if processes == 1 else several
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def steps(folder, run):
    lines = map(json.loads, (folder / run / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def test_a_run_of_two_processes_continues_in_one_with_the_same_batches(tmp_path):
    words = np.random.default_rng(0).choice(["mesh", "ship", "a", "the", "of"], 2000)
    (tmp_path / "text.txt").write_text(" ".join(words))
    (tmp_path / "run.toml").write_text(RUN)
    train(tmp_path, "folder=whole")
    said = train(tmp_path, "folder=run", "steps=2", processes=2, devices=2)
    assert "2x2 cpu" in said and not any(line.startswith("[1] step") for line in said.splitlines())
    assert "continuing from step 2 of 4" in train(tmp_path, "folder=run")
    np.testing.assert_allclose(steps(tmp_path, "run"), steps(tmp_path, "whole"), rtol=2e-4)
