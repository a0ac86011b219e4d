"""`mw.get_model` with several engines: replicas, stages, prompts and answers apart, and what a plan chose."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw
from meshwright import zoo
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.split import Degrees, Storage, weight_bytes

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCES = Path(__file__).parents[1] / "hf" / "references"
SIZES = {"max_len": 96, "slots": 2, "chunk": 8, "block_size": 4}


def texts(model, name):
    """Checks the texts of a family that are computed together."""
    tensors = load_file(REFERENCES / name / "reference.safetensors")
    whole = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    out = model.generate([text[:-64] for text in whole] * 2, max_new_tokens=64, eos_token_id=())
    assert [row[: len(text)].tolist() for row, text in zip(out, whole * 2, strict=True)] == whole * 2


def check(name, **options):
    with mw.get_model(REFERENCES / name, **options) as model:
        texts(model, name)
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


@cache
def planned(name, degrees, count):
    """A plan of serving with so many replicas that are split so, whatever it would choose."""
    traffic = mw.Traffic(rate=1, tokens_in=20, tokens_out=64)
    cluster = f"1x{degrees.num_devices * count} cpu"
    plan = mw.plan_serving(mw.hf.load(REFERENCES / name).config, cluster, traffic, apart=False, weights="float32")
    (group,) = plan.chosen.groups
    old = group.kind.prices
    kind = replace(group.kind, prices=StepPrices(old.work, old.cluster, degrees, old.storage, old.engine), batch=4)
    group = replace(group, kind=kind, count=count, limits=kind.limits(84, 8))
    return replace(plan, chosen=replace(plan.chosen, groups=(group,)))


@pytest.mark.sweep(3)
@pytest.mark.parametrize(
    ("name", "degrees", "count"),
    [
        ("mixtral", Degrees(tensor=2, data=2, expert=4), 1),
        ("llama", Degrees(tensor=4), 2),
        ("gpt-oss", Degrees(tensor=2, data=2), 2),
        ("gpt-oss", Degrees(data=4, expert=4), 1),
        ("qwen3-moe", Degrees(tensor=2, expert=2, pipeline=2), 1),
        ("mixtral", Degrees(data=2, expert=2, pipeline=2), 1),
        ("qwen3", Degrees(tensor=2), 4),
        ("gemma2", Degrees(tensor=2, pipeline=2), 2),
    ],
)
def test_replicas_are_laid_out_as_a_plan_says(name, degrees, count):
    plan = planned(name, degrees, count)
    work = plan.chosen.groups[0].kind.prices.work
    with mw.get_model(REFERENCES / name, cluster=plan.cluster, plan=plan) as model:
        texts(model, name)
        engines = getattr(model.engine, "_fronts", (model.engine,))
        programs = engines[0]._programs
    assert len({id(engine._programs._compiled) for engine in engines}) == count
    on_one = [on_a_device(programs, number) for number in range(degrees.pipeline)]
    dtype = Storage("float32", "float32")
    assert len(programs._stages) == degrees.pipeline
    whole = sum(leaf.nbytes for stage in programs._stages for leaf in jax.tree.leaves(stage.arrays))
    parts = min(degrees.tensor, work.kv_heads) * degrees.data
    assert sum(cache for _, cache in on_one) * parts == whole
    assert max(weights for weights, _ in on_one) == pytest.approx(weight_bytes(work, degrees, dtype), rel=0.001)
    assert model.plan.limits.slots % degrees.data == 0
    assert model.plan.prices.split == degrees


def on_a_device(programs, number):
    """Bytes of products' weights and tables, and of the cache, on the first device of a stage."""
    stage, paths = programs._stages[number], jax.tree_util.tree_leaves_with_path(programs.decoder.params())
    names = [jax.tree_util.keystr(paths[leaf][0]) for leaf in programs._parts_of_params[number]]
    weights = zip(names, jax.tree.leaves(stage.params), strict=True)

    def held(leaves):
        device = min(stage.placement.rest.device_set, key=lambda device: device.id)
        shards = (shard for leaf in leaves for shard in leaf.addressable_shards)
        return sum(shard.data.nbytes for shard in shards if shard.device == device)

    products = [leaf for name, leaf in weights if leaf.ndim > 1 and "_bias" not in name]
    return held(products), held(jax.tree.leaves(stage.arrays))


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
