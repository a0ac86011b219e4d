"""The examples: each runs, and its loss falls."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiling import FLAGS

pytestmark = pytest.mark.devices

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *options):
    """What an example prints."""
    return printed(str(EXAMPLES / f"{name}.py"), *options)


def printed(*command):
    """What Python prints when it is started like this."""
    environment = os.environ | {"XLA_FLAGS": FLAGS}  # an example counts its own devices
    command = [sys.executable, "-W", "error::UserWarning", *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "planned again" not in done.stderr, done.stderr
    assert "nvoluntary full rematerialization" not in done.stderr, done.stderr
    return done.stdout


def learned(name, *options):
    """What an example prints that plans for eight devices and lowers its loss."""
    text = run(name, *options)
    assert re.search(r"^plan +Auto on mesh .*=", text) and "1x8 cpu" in text
    assert len(losses(text)) > 1 and losses(text)[-1] < losses(text)[0]
    return text


def losses(text):
    return [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)$", text, re.MULTILINE)]


def test_the_mlp_learns():
    """That the numbers of such a model are those of one device, `tests/frameworks/test_equinox.py` checks."""
    learned("equinox_mlp", "--steps", 15)


@pytest.mark.nightly
def test_the_vision_transformer_learns():
    """That the numbers of such a model are those of one device, `tests/frameworks/test_nnx.py` checks."""
    learned("nnx_vit", "--steps", 10, "--batch", 16)


def test_the_gpt_goes_on_from_its_checkpoint_on_fewer_devices(tmp_path):
    """That what is restored is what was saved, on any devices, `tests/training/saving/test_checkpoints.py` checks."""
    (tmp_path / "text").write_text("a mesh of ships and a ship of meshes. " * 200)
    options = ("--text", tmp_path / "text", "--batch", 8)
    script = "import sys; sys.path.insert(0, sys.argv.pop(1)); import flax_gpt; flax_gpt.LAYERS = 1; flax_gpt.main()"
    shallow = ("-c", script, EXAMPLES, *options)  # its two layers take half as long again to compile, each time
    begun = printed(*shallow, "--steps", 5, "--checkpoints", tmp_path / "saved")
    assert re.search(r"^plan +Auto on mesh .*=", begun) and "1x8 cpu" in begun
    resumed = printed(*shallow, "--steps", 11, "--checkpoints", tmp_path / "saved", "--devices", 4)
    assert "going on from step 5" in resumed
    assert losses(resumed)[-1] < losses(begun)[-1] < losses(begun)[0]
    assert resumed.splitlines()[-1].startswith("held out: loss")


@pytest.mark.nightly
def test_the_moe_learns_and_compares_methods():
    text = learned("moe", "--steps", 10, "--compare")
    assert re.search(r"^Zero-3 +8 .* → .* → .* → ", text, re.MULTILINE)


def test_the_pipeline_trains():
    text = run("pipeline")
    first, last = map(float, re.search(r"^loss ([\d.]+) → ([\d.]+) in 20 steps", text, re.MULTILINE).groups())
    assert last < first / 4
    assert "send shared parameters to stage 3" in text


@pytest.mark.sweep(1)
@pytest.mark.parametrize("recipe", ["finetune_llama", "pretrain_qwen", "train_mixtral"])
def test_the_recipe_trains_on_eight_devices(recipe, tmp_path):
    run("made_up_text", tmp_path / "corpus")
    settings = (f"data.path={tmp_path / 'corpus'}", f"folder={tmp_path / 'run'}")
    chosen = [word for setting in settings for word in ("--set", setting)]
    text = printed("-m", "meshwright", "train", EXAMPLES / f"{recipe}.toml", "--devices", 8, *chosen)
    assert re.search(r"^plan +Auto on mesh ", text, re.MULTILINE) and "1x8 cpu" in text
    found = [float(value) for value in re.findall(r"^step \d+: loss ([\d.]+)", text, re.MULTILINE)]
    assert len(found) == 4 and found[-1] < found[0]
