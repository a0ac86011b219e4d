"""Steps of a replica: what they are priced by, and that measured steps are met."""

from functools import cache

import jax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.small_kernels import small_kernels
from meshwright.serving.planning.split import Degrees, Storage, cache_tokens, weight_bytes

ALONE, HALF = Degrees(), Storage()
TINY = ("llama-tiny", "qwen-tiny", "qwen-moe-tiny", "gemma-tiny", "mixtral-tiny", "gpt-oss-tiny", "gpt-tiny")


@cache
def prices(model, machines="1x8 h200", split=ALONE, storage=HALF, engine="meshwright"):
    return StepPrices(decoder_work(model), mw.cluster(machines), split, storage, find_engine(engine))


@pytest.mark.parametrize("name", [*TINY, "deepseek-tiny"])
def test_all_weights_but_norms_and_biases_are_counted(name):
    example = zoo.build(name)
    leaves = jax.tree_util.tree_flatten_with_path(example.state["params"])[0]
    matrices = [leaf.size for path, leaf in leaves if leaf.ndim > 1 and not path[-1].key.endswith("_bias")]
    assert decoder_work(name).num_weights == sum(matrices)


@pytest.mark.parametrize("name", TINY)
def test_the_layers_attend_in_turn(name):
    work = decoder_work(name)
    assert sum(a.count for a in work.attention) == work.layers
    assert {bool(a.window) for a in decoder_work("gpt-oss-tiny").attention} == {True, False}


def test_what_is_no_decoder_is_refused():
    with pytest.raises(mw.ServingError, match="bert-tiny generates no text"):
        decoder_work("bert-tiny")
    with pytest.raises(mw.ServingError, match="model is 3; give a name of the zoo"):
        decoder_work(3)


#: Steps of Llama-3-8B on one H200 in the engine, with its own kernel: batch and milliseconds at a context of 1,024; and
#: tokens of a prompt and milliseconds alone and beside 256 sequences.
DECODE = {1: 4.27, 64: 6.69, 256: 15.14}
PREFILL = {2048: (47.9, 70.4)}


@pytest.mark.parametrize("batch", DECODE)
def test_measured_steps_of_the_engine_are_met_within_8_percent(batch):
    assert prices("llama3-8b").decode_s(batch, 1024) * 1e3 == pytest.approx(DECODE[batch], rel=0.08)


def test_small_kernels_are_those_of_the_step_itself():
    llama, experts = (small_kernels(decoder_work(name).config, False) for name in ("llama-tiny", "gpt-oss-tiny"))
    # Two norms of two kernels with the sums before them, both rotations and the cut values, two scatters, lengths, and
    # the gate; of experts those that choose and sort besides.
    assert 10 <= llama.layer <= 14 < experts.layer
    assert 3 <= llama.bank <= 6  # two scatters, attention, and its lengths
    own = small_kernels(decoder_work("llama-tiny").config)  # one kernel writes and looks back
    assert own.layer < llama.layer and not own.bank
    assert small_kernels(decoder_work("deepseek-tiny").config) == (12, 6)  # which the engine does not run yet


@pytest.mark.parametrize("tokens", PREFILL)
def test_measured_steps_of_prompts_are_met_within_8_percent(tokens):
    price, (alone, beside) = prices("llama3-8b"), PREFILL[tokens]
    assert price.prefill_s(tokens) * 1e3 == pytest.approx(alone, rel=0.08)
    pairs = tokens * (tokens + 1) / 2
    assert price.step_s(256 + tokens, 257, 256 * tokens, pairs) * 1e3 == pytest.approx(beside, rel=0.08)


def test_a_step_costs_more_with_everything_that_it_does():
    price = prices("mixtral-8x7b", split=Degrees(tensor=2)).step_s
    base = price(64, 64, 64_000, 0)
    assert base < price(65, 64, 64_000, 0) < price(2048, 64, 64_000, 0)
    assert base < price(64, 64, 65_000, 0)
    assert base < price(64, 64, 64_000, 1e6)
    assert price(0, 0, 0, 0) == 0


def test_smaller_types_make_decoding_faster_and_leave_more_room():
    half, eight, four = (Storage(weights=name) for name in ("bfloat16", "float8", "int4"))
    times = [prices("llama3-70b", split=Degrees(tensor=4), storage=s).decode_s(8, 1000) for s in (half, eight, four)]
    assert times[0] > times[1] > times[2]
    sizes = [weight_bytes(decoder_work("llama3-70b"), Degrees(tensor=4), s) for s in (half, eight, four)]
    assert sizes[0] / sizes[1] == pytest.approx(2, rel=0.05)
    rooms = [cache_tokens(decoder_work("llama3-70b"), Degrees(tensor=4), s, 80e9) for s in (half, eight, four)]
    assert rooms[0] < rooms[1] < rooms[2]


def test_more_devices_make_steps_faster_until_collectives_do_not():
    times = [
        prices("llama3-70b", split=Degrees(tensor=n), storage=Storage("float8")).decode_s(8, 1000) for n in (1, 2, 4)
    ]
    assert times == sorted(times, reverse=True)
    across = prices("llama3-8b", "4x8 h200", Degrees(tensor=32)).decode_s(1, 1000)
    assert across > prices("llama3-8b", "4x8 h200", Degrees(tensor=8)).decode_s(1, 1000)


def test_experts_are_read_as_tokens_choose_them():
    work = decoder_work("qwen3-30b-a3b")
    few, many = (prices("qwen3-30b-a3b").decode_s(batch, 1) for batch in (1, 256))
    assert many > 4 * few  # nearly all experts are read, instead of 8 of 128
    assert work.flops_per_token < 2 * work.num_weights / 8


def test_splits_that_cannot_be_are_refused():
    with pytest.raises(mw.ServingError, match="32 heads cannot be spread over 3 devices"):
        prices("llama3-8b", split=Degrees(tensor=3))
    with pytest.raises(mw.ServingError, match="no experts to share"):
        prices("llama3-8b", split=Degrees(tensor=2, data=2))
    few, odd = (
        zoo.build("llama-tiny", **shape).config for shape in ({"hidden": 96, "heads": 6, "kv_heads": 3}, {"ffn": 130})
    )
    with pytest.raises(mw.ServingError, match="3 heads of keys can be neither dealt to 2 devices nor repeated evenly"):
        prices(few, split=Degrees(tensor=2))
    with pytest.raises(mw.ServingError, match="130 columns of 'gate' cannot be cut into 4 equal parts"):
        prices(odd, split=Degrees(tensor=4))
    with pytest.raises(mw.ServingError, match="weights is 'bf17'; give one of"):
        Storage(weights="bf17")
    with pytest.raises(mw.ServingError, match="engine is 'vlm'; give one of"):
        find_engine("vlm")
