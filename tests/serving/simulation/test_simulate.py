"""Simulated loads: what must hold whatever the times are, and what small loads can be worked out by hand."""

import json
from dataclasses import replace

import pytest

import meshwright as mw
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.split import Degrees, Storage
from meshwright.serving.planning.traffic import Arrival
from meshwright.serving.scheduling import Limits
from meshwright.serving.simulation.replica import Replica
from meshwright.serving.simulation.simulate import Simulation

LIMITS = {"slots": 32, "block_size": 16, "blocks": 4000, "chunk": 512, "token_budget": 600, "queue": 1000}


def replica(role="both", number=0, **limits):
    prices = StepPrices(
        decoder_work("llama3-8b"), mw.cluster("1x8 h200"), Degrees(), Storage(), find_engine("meshwright")
    )
    if role == "decode":
        limits |= {"chunk": 1 << 20, "token_budget": 1 << 21}
    return Replica(prices, Limits(**LIMITS | {"max_len": 8192} | limits), role, number)


def simulate(replicas, arrivals, slo=None, transfer=lambda tokens: 0.0, clients=0):
    return Simulation(replicas, slo or mw.Slo(), transfer).serve(arrivals, clients=clients)


def test_a_lone_request_takes_what_its_steps_take():
    one = replica()
    served = simulate([one], [Arrival(1.0, 300, 5)]).requests[0]
    late = one.prices.engine.request_s
    assert served.ttft_s == pytest.approx(one.prices.prefill_s(300) + late)
    assert served.tpot_s == pytest.approx(sum(one.prices.decode_s(1, 300 + n) for n in range(1, 5)) / 4, rel=1e-3)
    assert len(one.steps) == 5


def test_long_prompts_are_cut_into_chunks():
    one = replica()
    simulate([one], [Arrival(0.0, 1300, 1)])
    assert [step.tokens for step in one.steps] == [512, 512, 276]


def test_every_token_is_computed_once_and_every_request_ends():
    load = mw.Traffic(rate=30, tokens_in=(10, 900), tokens_out=(1, 60), burstiness=2)
    arrivals = load.arrivals(150)
    one = replica()
    outcome = simulate([one], arrivals)
    assert sum(step.tokens for step in one.steps) == sum(a.tokens_in + a.tokens_out - 1 for a in arrivals)
    assert len(outcome.requests) == 150 and all(r.ttft_s > 0 for r in outcome.requests)
    assert one.scheduler.pool.used == 0
    ends = [step.start_s + step.seconds for step in one.steps]
    assert all(a <= b.start_s + 1e-12 for a, b in zip(ends, one.steps[1:], strict=False))


def test_more_load_makes_latencies_longer_and_more_replicas_shorter():
    load = mw.Traffic(rate=5, tokens_in=700, tokens_out=(20, 80))
    slow, fast = (simulate([replica()], load.at(rate).arrivals(200)) for rate in (5, 60))
    assert slow.ttft_s(0.9) < fast.ttft_s(0.9) and slow.tpot_s(0.5) < fast.tpot_s(0.5)
    two = simulate([replica(), replica(number=1)], load.at(60).arrivals(200))
    assert two.ttft_s(0.9) < fast.ttft_s(0.9)
    assert 0 < min(two.utilisation) <= max(two.utilisation) <= 1


def test_prompts_and_answers_apart_wait_for_the_cache_between():
    load = mw.Traffic(rate=4, tokens_in=600, tokens_out=30).arrivals(40)
    apart = lambda: [replica("prefill"), replica("decode", 1)]  # noqa: E731
    near, far = (simulate(apart(), load, transfer=lambda tokens, s=s: s) for s in (0.0, 0.29))
    assert near.ttft_s(0.5) == far.ttft_s(0.5)
    assert far.tpot_s(0.5) - near.tpot_s(0.5) == pytest.approx(0.01, rel=0.2)
    prefill, decode = near.replicas
    assert sum(step.tokens for step in prefill.steps) == 40 * 600
    assert sum(step.tokens for step in decode.steps) == 40 * 29
    assert decode.scheduler.pool.used == 0


def test_tokens_that_are_sent_together_come_later():
    one = replica()
    engine = replace(one.prices.engine, stream=5)
    late = Replica(replace(one.prices, engine=engine), one.limits)
    first, fifth = (simulate([r], [Arrival(0.0, 300, 20)]).requests[0] for r in (one, late))
    assert fifth.ttft_s == pytest.approx(first.ttft_s + 4 * first.tpot_s, rel=0.02)
    assert fifth.end_s == pytest.approx(first.end_s)


def test_clients_send_one_request_after_another():
    outcome = simulate([replica()], [Arrival(0.0, 100, 10)] * 30, clients=4)
    ends = sorted(r.end_s for r in outcome.requests)
    starts = sorted(r.arrival_s for r in outcome.requests)
    assert starts[4:] == pytest.approx(ends[:-4])


def test_a_full_queue_refuses_and_no_promise_is_kept_for_those():
    outcome = simulate([replica(queue=3)], [Arrival(0.0, 500, 50)] * 60, mw.Slo(ttft_s=100))
    assert 0 < outcome.refused < 60
    assert outcome.attained == pytest.approx(1 - outcome.refused / 60)
    assert not outcome.keeps_promise


def test_requests_that_run_out_of_cache_are_computed_again():
    one = replica(blocks=60)
    outcome = simulate([one], [Arrival(0.0, 200, 100)] * 6)
    assert one.scheduler.preemptions > 0 and outcome.refused == 0
    assert sum(step.tokens for step in one.steps) > 6 * 299


def test_an_outcome_is_printed_and_written(tmp_path):
    outcome = simulate([replica()], mw.Traffic(rate=9, tokens_in=50, tokens_out=9).arrivals(20), mw.Slo(ttft_s=1))
    assert "20 requests simulated; 100.0% kept the promise" in str(outcome)
    assert json.loads(json.dumps(outcome.to_json()))["num_requests"] == 20
    outcome.save_timeline(tmp_path / "timeline.json")
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(outcome.replicas[0].steps)
