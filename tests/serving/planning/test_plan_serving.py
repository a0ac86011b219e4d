"""Plans to serve a model: what they choose, that simulations bear them out, and what is refused with what would do."""

import json

import pytest

import meshwright as mw
from meshwright.serving.planning.candidates import assess, degrees
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.plan_serving import plan_serving
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.split import Degrees, Storage

CHAT = mw.Traffic(rate=4, tokens_in=(100, 300), tokens_out=(10, 30))


@pytest.fixture(scope="module")
def plan():
    return mw.plan_serving("llama3-8b", "1x2 h200", CHAT, mw.Slo(ttft_s=0.3, tpot_s=0.01))


def test_a_plan_keeps_its_promise_at_its_goodput_and_none_exceeds_the_bound(plan):
    assert 0 < plan.goodput <= plan.bound
    assert all(other.goodput <= plan.bound for other in plan.alternatives)
    assert plan.simulate(CHAT.at(0.9 * plan.goodput), 300).keeps_promise
    assert not plan.simulate(CHAT.at(2 * plan.bound), 600).keeps_promise


def test_a_plan_says_what_it_chose_and_why(plan):
    text = str(plan)
    assert "llama3-8b on 1x2 h200" in text and "requests/s" in text and "price: $7.18 an hour" in text
    assert any("apart" in sentence for sentence in plan.why)
    assert any("No arrangement carries more than" in sentence for sentence in plan.why)
    assert json.loads(json.dumps(plan.to_json()))["goodput"] == plan.goodput
    group = plan.chosen.groups[0]
    assert group.limits.slots <= group.kind.batch and group.kind.prices.split.num_devices <= 2


def test_the_same_question_has_the_same_answer(plan):
    again = mw.plan_serving("llama3-8b", "1x2 h200", CHAT, mw.Slo(ttft_s=0.3, tpot_s=0.01))
    assert again.to_json() == plan.to_json()


def test_a_looser_promise_carries_more(plan):
    looser = mw.plan_serving("llama3-8b", "1x2 h200", CHAT, mw.Slo(ttft_s=2, tpot_s=0.1), apart=False)
    assert looser.goodput > plan.goodput


def test_by_cost_no_more_devices_are_used_than_the_load_needs():
    cheap = mw.plan_serving("llama3-8b", "1x8 h200", CHAT, mw.Slo(ttft_s=0.3, tpot_s=0.02), objective="cost")
    assert cheap.num_devices == 1 and cheap.enough
    assert cheap.dollars_per_hour == pytest.approx(3.59)


def test_a_load_that_is_too_large_is_said():
    load = mw.Traffic(rate=10_000, tokens_in=200, tokens_out=20)
    plan = mw.plan_serving("llama3-8b", "1x1 h200", load, mw.Slo(ttft_s=0.5, tpot_s=0.05), apart=False)
    assert not plan.enough
    assert any("needs" in sentence and "times these machines" in sentence for sentence in plan.why)


def test_a_model_that_fits_nowhere_is_refused_with_what_would_do():
    with pytest.raises(mw.DoesNotFit, match=r"llama3-70b fits nowhere on 1x1 h100.*weights='float8'") as caught:
        mw.plan_serving("llama3-70b", "1x1 h100", CHAT)
    assert caught.value.needed_bytes > caught.value.limit_bytes
    fits = mw.plan_serving("llama3-70b", "1x2 h200", CHAT, mw.Slo(ttft_s=2, tpot_s=0.1), weights="float8")
    assert fits.goodput > 0


def test_a_promise_that_nothing_keeps_is_refused_with_what_could_be_kept():
    with pytest.raises(
        mw.ServingError, match=r"nothing on 1x2 h200 keeps the promise .* alone, a first token takes at"
    ):
        mw.plan_serving("llama3-8b", "1x2 h200", CHAT, mw.Slo(ttft_s=0.001))
    with pytest.raises(mw.ServingError, match="each later one"):
        mw.plan_serving("llama3-8b", "1x2 h200", CHAT, mw.Slo(tpot_s=0.0005))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "speed"}, "objective is 'speed'; choose one of goodput, cost"),
        ({"weights": "int3"}, "weights is 'int3'"),
        ({"engine": "none"}, "engine is 'none'"),
        ({"traffic": 20}, "traffic is 20; give mw.Traffic"),
        ({"slo": 0.5}, "slo is 0.5; give mw.Slo"),
        ({"cluster": "1x1 h100 + 1x1 h200"}, "hosts of several kinds"),
        ({"model": "gpt2-125m", "traffic": mw.Traffic(rate=1, tokens_in=1000, tokens_out=100)}, "1024 positions"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(options, message):
    given = {"model": "llama3-8b", "cluster": "1x1 h200", "traffic": CHAT, **options}
    with pytest.raises(mw.ServingError, match=message):
        plan_serving(**given)


def test_replicas_with_experts_are_spread_in_groups_that_share_them():
    work, machines = decoder_work("qwen3-30b-a3b"), mw.cluster("2x8 h200")
    ways = list(degrees(work, machines))
    assert any(way.data > 1 and way.expert == way.tensor * way.data for way in ways)
    assert all(way.num_devices <= 16 and not way.problem(work) for way in ways)
    dense = list(degrees(decoder_work("llama3-8b"), machines))
    assert all(way.data == way.expert == 1 for way in dense)


def test_a_batch_is_as_large_as_the_promise_or_the_cache_allows():
    prices = StepPrices(
        decoder_work("llama3-8b"), mw.cluster("1x1 h100"), Degrees(), Storage(), find_engine("meshwright")
    )
    strict = assess(prices, CHAT, mw.Slo(tpot_s=0.008), "both", CHAT.longest)
    open_ = assess(prices, mw.Traffic(rate=1, tokens_in=20_000, tokens_out=2000), mw.Slo(), "both", 22_000)
    assert strict.limit == "the time per token" and strict.token_s <= 0.008
    assert open_.limit == "the cache" and open_.batch * 20_000 <= open_.room
    assert assess(prices, mw.Traffic(rate=1, tokens_in=1_000_000), mw.Slo(), "both", 1_000_256) is None
