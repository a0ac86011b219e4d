"""Checkpoints of transformers compute the same in the zoo, and come back to the bit; `make_references.py` made them."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw
from meshwright.hf.architectures import ARCHITECTURES
from tests.compiling import QUICK

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCES = Path(__file__).parent / "references"
CASES = sorted(path.name for path in REFERENCES.iterdir())


def same_tensors(first, second):
    one, other = load_file(first), load_file(second)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name], other[name])


def test_every_architecture_has_a_reference():
    kinds = {json.loads((REFERENCES / name / "config.json").read_text())["model_type"] for name in CASES}
    assert kinds == set(ARCHITECTURES)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers_and_the_round_trip_is_exact(name, tmp_path):
    model = mw.hf.load(REFERENCES / name)
    reference = load_file(REFERENCES / name / "reference.safetensors")
    forward = jax.jit(model.forward).lower(model.params, reference["ids"]).compile(compiler_options=QUICK)
    logits = forward(model.params, reference["ids"])
    assert np.abs(reference["logits"]).max() > 0.1
    np.testing.assert_allclose(logits, reference["logits"], rtol=0, atol=1e-5)

    mw.hf.save(tmp_path / "saved", model.params, model.config)
    same_tensors(REFERENCES / name / "model.safetensors", tmp_path / "saved" / "model.safetensors")
    again = mw.hf.load(tmp_path / "saved")
    assert again.config == model.config
    assert again.architecture == model.architecture
