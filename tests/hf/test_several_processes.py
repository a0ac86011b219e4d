"""Several processes load and save one model: each has its own stage's parameters, and the first one writes."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

import meshwright as mw
from meshwright import zoo

pytestmark = [pytest.mark.slow, pytest.mark.devices]


def test_a_model_whose_stages_are_in_two_processes_is_read_trained_and_saved(tmp_path):
    tiny = zoo.build("llama-tiny", layers=2)
    mw.hf.save(tmp_path / "model", tiny.init(0)["params"], tiny.config)
    script = Path(__file__).with_name("in_processes.py")
    command = [sys.executable, "-m", "meshwright", "launch", str(script), str(tmp_path / "model"), str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    model = mw.hf.load(tmp_path / "model", dtype="float32")
    read = mw.hf.load(tmp_path / "read").params
    for one, other in zip(jax.tree.leaves(read), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    example = model.example(batch=4, seq=16)
    state, loss = jax.jit(example.train_step)(example.init(0) | {"params": model.params}, example.sample(0))
    refused = f"cannot write {tmp_path / 'trained'}: it is there already; choose another place, or remove it"
    for process in (0, 1):
        said = [line.removeprefix(f"[{process}] ") for line in done.stdout.splitlines() if line[1] == str(process)]
        assert f"loss {float(loss):.5f}" in said and refused in said
    trained = mw.hf.load(tmp_path / "trained").params
    for one, other in zip(jax.tree.leaves(trained), jax.tree.leaves(state["params"]), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-4)
    assert len(list((tmp_path / "trained").glob("model-*.safetensors"))) > 2
