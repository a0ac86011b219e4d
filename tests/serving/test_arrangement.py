"""`mw.get_model` with several engines: replicas, stages, prompts and answers apart, and what a plan chose."""

from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCES = Path(__file__).parents[1] / "hf" / "references"
SIZES = {"max_len": 96, "slots": 2, "chunk": 8, "block_size": 4}


def check(name, **options):
    tensors = load_file(REFERENCES / name / "reference.safetensors")
    whole = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    with mw.get_model(REFERENCES / name, **options) as model:
        out = model.generate([text[:-64] for text in whole] * 2, max_new_tokens=64, eos_token_id=())
        assert [row[: len(text)].tolist() for row, text in zip(out, whole * 2, strict=True)] == whole * 2
        return str(model.plan)


def test_replicas_of_several_devices_each():
    said = check("llama", cluster="1x4 cpu", replicas=2, method="tensor", **SIZES)
    assert "2 replicas" in said and "2 CPU devices" in said


def test_stages_that_are_split_over_devices_each():
    assert "in 2 stages of layers" in check("qwen3", cluster="1x4 cpu", stages=2, method="tensor", **SIZES)


def test_what_a_plan_chose_is_run():
    traffic = mw.Traffic(rate=1, tokens_in=20, tokens_out=64)
    plan = mw.plan_serving(mw.hf.load(REFERENCES / "llama").config, "1x2 cpu", traffic, apart=True)
    assert plan.chosen.apart
    assert "for prompts" in check("llama", cluster="1x2 cpu", plan=plan)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 3}, "3 stages of replicas cannot share 8 devices"),
        ({"apart": (1,)}, "apart is"),
        ({"apart": (1, 1), "replicas": 2}, "leave out replicas"),
    ],
)
def test_what_cannot_be_arranged_is_refused(options, message):
    with pytest.raises(mw.ServingError, match=message):
        mw.get_model(REFERENCES / "llama", **options)
