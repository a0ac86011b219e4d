"""`mw.get_model` with several engines: replicas, stages, prompts and answers apart, and what a plan chose."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw
from meshwright import zoo
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.split import Degrees

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


def test_experts_that_a_plan_deals_to_devices_are_there():
    traffic = mw.Traffic(rate=1, tokens_in=20, tokens_out=64)
    plan = mw.plan_serving(mw.hf.load(REFERENCES / "mixtral").config, "1x2 cpu", traffic, apart=False)
    (group,) = plan.chosen.groups
    old = group.kind.prices
    prices = StepPrices(old.work, old.cluster, Degrees(tensor=2, expert=2), old.storage, old.engine)
    dealt = replace(group, kind=replace(group.kind, prices=prices), count=1)
    plan = replace(plan, chosen=replace(plan.chosen, groups=(dealt,)))
    with mw.get_model(REFERENCES / "mixtral", cluster="1x2 cpu", plan=plan) as model:
        experts = {t.path: t.spec for t in model.plan.decode.arguments if t.path.endswith(("/gate", "/up", "/down"))}
    assert experts and all(spec[0] == ("x",) and not any(spec[1:]) for spec in experts.values())
    check("mixtral", cluster="1x2 cpu", plan=plan)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"replicas": 0}, "replicas is 0"),
        ({"replicas": 3}, "3 replicas cannot share 8 devices"),
        ({"apart": (1,)}, "apart is"),
        ({"apart": (1, 1), "replicas": 2}, "leave out replicas"),
        ({"traffic": mw.Traffic(rate=1), "stages": 2}, "leave out replicas, stages, apart"),
        ({"traffic": "20 requests/s"}, "traffic is '20 requests/s'; give mw.Traffic"),
        ({"plan": "1x8 h100"}, "plan is '1x8 h100'; give what mw.plan_serving returns"),
        ({"stages": 8}, "2 layers cannot be cut into 8 stages"),
        ({"cache_dtype": "int4"}, "cache_dtype is 'int4'; give 'int8' or 'float8' for 8 bits"),
    ],
)
def test_what_cannot_be_arranged_is_refused(options, message):
    with pytest.raises(mw.ServingError, match=message):
        mw.get_model(REFERENCES / "llama", **options)


def test_a_model_that_fits_no_other_way_is_cut_into_stages_unasked(tmp_path):
    machines = mw.cluster("1x2 cpu")
    # Layers so wide that their weights take most of the memory, and not what a step computes.
    wide = zoo.build("llama-tiny", layers=2, hidden=256, ffn=1024, vocab=128)
    mw.hf.save(tmp_path / "wide", wide.init(0)["params"], wide.config)
    options = {"method": "data", "max_len": 16, "slots": 1, "chunk": 1, "block_size": 4}

    def limited(memory_bytes):
        return replace(machines, chip=replace(machines.chip, memory_bytes=memory_bytes))

    with pytest.raises(mw.DoesNotFit, match="whole or in stages of layers: a device needs") as caught:
        mw.get_model(tmp_path / "wide", cluster=limited(2000), **options)
    enough = int(caught.value.needed_bytes * 1.3 / 0.9)  # for a stage, and not for the whole
    texts, said = [], []
    for cluster in ("1x1 cpu", limited(enough)):
        with mw.get_model(tmp_path / "wide", cluster=cluster, **options) as model:
            texts.append(model.generate([[5, 6, 7]], max_new_tokens=8).tolist())
            said.append(str(model.plan))
    assert "in 2 stages of layers" in said[1] and "stages" not in said[0]
    assert texts[0] == texts[1]


def test_a_load_is_planned_for_and_sizes_that_are_given_stay():
    load = mw.Traffic(rate=1, tokens_in=20, tokens_out=64)
    said = check("llama", cluster="1x2 cpu", traffic=load, slots=2, chunk=8)
    assert "2 replicas" in said and "at most 2 sequences of 84 tokens at once, 8 tokens of prompts" in said


def test_caches_of_8_bits_are_alike_in_one_engine_and_apart():
    texts, said = [], []
    for options in ({"cluster": "1x1 cpu"}, {"cluster": "1x2 cpu", "apart": (1, 1)}):
        with mw.get_model(REFERENCES / "llama", cache_dtype="int8", **SIZES, **options) as model:
            texts.append(model.generate([list(range(3, 30))], max_new_tokens=32, eos_token_id=()).tolist())
            said.append(str(model.plan))
    assert texts[0] == texts[1]
    assert all("of cache in int8" in one for one in said)
