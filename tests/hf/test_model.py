"""Parameters are read in the shardings of a plan, in the checkpoint's dtype or another one, and can be trained."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

import meshwright as mw
from meshwright import zoo
from tests.hf.test_references import REFERENCES, same_tensors

pytestmark = [pytest.mark.slow, pytest.mark.devices]


@cache
def planned(name, **options):
    """A model that is loaded into the shardings of a step that is parallelised by ZeRO."""
    model = mw.hf.load(REFERENCES / name, **options)
    example = model.example(batch=8, seq=16)
    step = mw.parallelize(example.train_step, method="zero3")
    step.plan(example.state, example.batch)
    return model, step, mw.hf.load(REFERENCES / name, like=step, **options)


@pytest.mark.parametrize(("name", "scan"), [("mixtral", False), ("gpt2", True)])
def test_parameters_are_read_into_the_shardings_of_a_step(name, scan):
    model, step, spread = planned(name, scan=scan)
    shardings = {tensor.path: tensor.spec for tensor in step.last_plan.arguments}
    assert any(any(spec) for path, spec in shardings.items() if "/params/" in path)
    split = 0
    for (path, whole), part in zip(
        jax.tree_util.tree_flatten_with_path(model.params)[0], jax.tree.leaves(spread.params), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(whole), np.asarray(part), err_msg=str(path))
        assert len(part.sharding.device_set) == 8
        split += not part.sharding.is_fully_replicated
    assert split > 3


def test_a_step_runs_on_loaded_parameters_and_what_is_trained_is_saved(tmp_path):
    model, step, spread = planned("mixtral", scan=False)
    example = model.example(batch=8, seq=16)
    state = mw.create_state(example.init, jax.random.key(0), like=step)
    state, _ = step(state | {"params": spread.params}, example.sample(1))
    state = jax.block_until_ready(state)
    mw.hf.save(tmp_path / "trained", state["params"], model.config, source=REFERENCES / "mixtral")
    again = mw.hf.load(tmp_path / "trained")
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(state["params"]), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_stack_of_layers_is_read_from_and_written_to_tensors_of_its_layers(tmp_path):
    model = mw.hf.load(REFERENCES / "qwen3-moe", scan=True)
    assert model.params["layers"]["gate"].shape == (2, 6, 16, 12)
    mw.hf.save(tmp_path / "saved", model.params, model.config)
    same_tensors(REFERENCES / "qwen3-moe/model.safetensors", tmp_path / "saved/model.safetensors")


def test_bfloat16_stays_and_is_widened_where_it_is_asked_for(tmp_path):
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), mw.hf.load(REFERENCES / "llama").params)
    mw.hf.save(tmp_path / "half", params, mw.hf.load(REFERENCES / "llama").config)
    model = mw.hf.load(tmp_path / "half")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert model.config.dtype == "bfloat16"
    types = jax.tree.leaves(model.example(batch=2, seq=8).state["params"])
    assert {leaf.dtype.name for leaf in types} == {"bfloat16"}
    wide = mw.hf.load(tmp_path / "half", param_dtype="float32")
    for one, other in zip(jax.tree.leaves(wide.params), jax.tree.leaves(params), strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other, np.float32))


def test_large_models_are_written_in_several_files(tmp_path):
    model = mw.hf.load(REFERENCES / "llama")
    mw.hf.save(tmp_path / "saved", model.params, model.config, shard_bytes=6000)
    files = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert len(files) > 4 and files[1].startswith("model-00001-of-0") and "model.safetensors.index.json" in files
    again = mw.hf.load(tmp_path / "saved")
    for one, other in zip(jax.tree.leaves(again.params), jax.tree.leaves(model.params), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_the_source_gives_the_numbers_of_special_tokens(tmp_path):
    model = mw.hf.load(REFERENCES / "llama")
    for source, expected in ((None, None), (REFERENCES / "llama", 2)):
        mw.hf.save(tmp_path / str(expected), model.params, model.config, source=source)
        text = (tmp_path / str(expected) / "config.json").read_text()
        assert f'"eos_token_id": {"null" if expected is None else expected}' in text


def test_the_source_says_of_which_architecture_a_model_is_that_fits_several(tmp_path):
    """Mistral without windows computes what Llama does, and its configuration has a key that Llama's has not."""
    config = replace(mw.hf.load(REFERENCES / "mistral").config, window=None)
    params = mw.hf.load(REFERENCES / "mistral").params
    mw.hf.save(tmp_path / "llama", params, config)
    mw.hf.save(tmp_path / "mistral", params, config, source=REFERENCES / "mistral")
    for name in ("llama", "mistral"):
        model = mw.hf.load(tmp_path / name)
        assert (model.architecture.model_type, model.config) == (name, config)
    mw.hf.save(tmp_path / "other", params, config, source=REFERENCES / "gpt2")
    assert mw.hf.load(tmp_path / "other").architecture.model_type == "llama"


def test_models_of_the_zoo_are_saved(tmp_path):
    tiny = zoo.build("gemma-tiny")
    mw.hf.save(tmp_path / "tiny", tiny.init(0)["params"], tiny.config)
    assert mw.hf.load(tmp_path / "tiny", dtype="bfloat16").config == tiny.config
