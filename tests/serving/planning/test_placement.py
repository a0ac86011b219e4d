"""Several models on one cluster: what bursts find, what is refused, and that each model has a place."""

import json

import pytest

import meshwright as mw


def bursts(count, model="llama2-13b", burstiness=4.0):
    load = {"rate": 0.5, "tokens_in": (256, 768), "tokens_out": (1, 3), "burstiness": burstiness}
    return {f"{model}#{n}": mw.Traffic(**load, seed=n) for n in range(count)}


@pytest.mark.slow
def test_models_placed_together_carry_five_times_the_bursts_of_plain_replication():
    plan = mw.place_models(bursts(8), "1x8 a100-40gb", mw.Slo(ttft_s=0.5, percentile=0.9))
    assert plan.gain >= 5
    assert plan.plain.scale > 0 and plan.plain.size == 1 and plan.chosen.size > 1
    assert {name for group in plan.chosen.groups for name in group.models} == set(plan.loads)
    assert "× the load of plain replication" in str(plan)
    assert json.loads(json.dumps(plan.to_json()))["goodput"] == plan.goodput


def test_small_models_share_one_device_from_the_beginning():
    load = mw.Traffic(rate=1, tokens_in=100, tokens_out=3)
    plan = mw.place_models({"qwen3-0.6b": load, "gemma3-1b": load}, "1x1 h100", mw.Slo(ttft_s=1))
    assert plan.chosen.groups[0].models == ("gemma3-1b", "qwen3-0.6b")
    assert plan.gain == 1 and plan.goodput > 2


def test_models_that_do_not_fit_together_are_refused():
    with pytest.raises(mw.DoesNotFit, match="3 models do not fit on 1x2 a100-40gb together"):
        mw.place_models(bursts(3), "1x2 a100-40gb", mw.Slo(ttft_s=1))


def test_a_promise_that_no_placement_keeps_is_refused():
    with pytest.raises(mw.ServingError, match="no placement on 1x1 h100 keeps the promise"):
        mw.place_models(bursts(1, "llama3-8b"), "1x1 h100", mw.Slo(ttft_s=0.001))


def test_loads_that_are_none_are_refused():
    with pytest.raises(mw.ServingError, match=r"loads is .*; give a mw.Traffic for each model"):
        mw.place_models({"llama3-8b": 20}, "1x1 h100")
