"""Requests that come, leave and are preempted: nothing leaks, nothing is compiled late, and failures are told."""

import random
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

import meshwright as mw
from meshwright import zoo
from meshwright.serving.engine import Engine
from meshwright.serving.models import PagedCache
from meshwright.serving.requests import EngineStopped, Overloaded, Sampling
from meshwright.serving.scheduling import Limits

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCE = Path(__file__).parents[2] / "hf" / "references" / "llama"
SLOTS, BLOCKS, QUEUE = 4, 20, 6


def make(queue=QUEUE):
    model = mw.hf.load(REFERENCE)
    limits = Limits(SLOTS, 4, BLOCKS, 8, 12, queue, 48)
    return Engine(model.config, model.params, limits, PagedCache(BLOCKS, 4, "float32"), eos=[2])


@pytest.fixture(scope="module")
def engine():
    made = make()
    yield made
    made.close()


def settled(engine):
    """How the engine does once nothing is open: `drain` would refuse later requests."""
    with engine._lock:
        assert engine._lock.wait_for(lambda: not engine._clients, 60)
    return engine.stats()


def test_random_requests_leave_no_block_behind(engine):
    draw = random.Random(0)
    open_handles, ended, refused = [], 0, 0
    while ended < 300:
        prompt = [draw.randrange(4)] * draw.randint(1, 20)  # many begin alike
        sampling = Sampling(draw.randint(1, 24), temperature=draw.choice([0.0, 1.0]), ignore_eos=draw.random() < 0.5)
        try:
            open_handles.append(engine.submit(prompt, sampling))
        except Overloaded:
            refused += 1
            handle = open_handles.pop(draw.randrange(len(open_handles)))
            if draw.random() < 0.5:
                handle.cancel()
            tokens = list(handle)
            ended += 1
            assert handle.finish_reason in ("stop", "length", "cancelled")
            assert len(tokens) >= 1 or handle.finish_reason == "cancelled"
    for handle in open_handles:
        handle.cancel()
    stats = settled(engine)
    assert stats.preemptions > 0
    assert stats.prefix_hits > 0
    assert refused > 0
    assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
    assert engine._scheduler.pool.available == BLOCKS


def test_nothing_is_compiled_once_the_engine_runs(engine):
    compiled = []

    def listen(event, duration, **about):
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    samplings = [
        Sampling(5, temperature=0.0),
        Sampling(5, top_k=3, seed=1),
        Sampling(5, temperature=0.5, logprobs=4, min_tokens=3),
        Sampling(3, logprobs=0),
        Sampling(5, presence_penalty=1.0),
    ]
    for length in (1, 2, 7, 8, 9, 30):
        handles = [engine.submit([3] * length, sampling) for sampling in samplings]
        for handle in handles:
            list(handle)
    before = len(compiled)
    assert compiled == []
    jax.jit(lambda x: x * 3.5)(1.25)
    assert len(compiled) > before  # the listener hears of compilations


def test_probabilities_are_told_as_asked(engine):
    asked = Sampling(4, temperature=0.0, logprobs=3, ignore_eos=True)
    for token in engine.submit([5, 6, 7], asked):
        assert len(token.top) == 3
        assert token.top[0] == (token.id, token.logprob)
        assert [value for _, value in token.top] == sorted((value for _, value in token.top), reverse=True)
    assert [token.top for token in engine.submit([5, 6, 7], Sampling(2, logprobs=0, ignore_eos=True))] == [(), ()]
    assert next(iter(engine.submit([5, 6, 7], Sampling(2)))).logprob is None


def test_penalties_count_the_tokens_of_their_own_sequence(engine):
    model, length = mw.hf.load(REFERENCE), 48
    scores_of = jax.jit(lambda tokens: zoo.llama.logits(model.config, model.params, tokens[None])[0])

    def expected(prompt, asked):
        tokens = list(prompt)
        for _ in range(asked.max_tokens):
            scores = np.array(scores_of(np.array(tokens + [0] * (length - len(tokens)))))[len(tokens) - 1]
            for token, favour in asked.logit_bias:
                scores[token] += favour
            there = np.isin(np.arange(len(scores)), tokens)
            bent = np.where(scores > 0, scores / asked.repetition_penalty, scores * asked.repetition_penalty)
            count = np.bincount(tokens[len(prompt) :], minlength=len(scores))
            scores = np.where(there, bent, scores) - asked.frequency_penalty * count
            tokens.append(int(np.argmax(scores - asked.presence_penalty * (count > 0))))
        return tokens[len(prompt) :]

    options = {"temperature": 0.0, "ignore_eos": True}
    asked = [
        Sampling(24, **options, repetition_penalty=1.7),
        Sampling(24, **options, frequency_penalty=0.6, presence_penalty=0.4),
        Sampling(24, **options, logit_bias=((7, 3.0), (9, -100.0))),
        Sampling(24, **options),
    ]
    prompts = [[5, 6, 7, 6], [5, 6, 7], [8, 9] * 6, [5, 6, 7]]
    before = engine.stats().preemptions
    handles = [engine.submit(*pair) for pair in zip(prompts, asked, strict=True)]
    texts = [[token.id for token in handle] for handle in handles]
    assert texts == [expected(*pair) for pair in zip(prompts, asked, strict=True)]
    assert texts[1] != texts[3]
    assert engine.stats().preemptions > before  # what was there is counted anew


def test_what_cannot_be_served_is_refused_in_a_sentence(engine):
    for prompt, sampling, message in (
        ([], Sampling(1), "number of tokens in the prompt is 0"),
        ([64], Sampling(1), "vocabulary goes from 0 to 63"),
        ([-1], Sampling(1), "vocabulary goes from 0 to 63"),
        ([1] * 40, Sampling(9), "at most 48 can be served"),
        ([1], Sampling(1, logit_bias=((64, 1.0),)), "logit_bias has token 64"),
        ([1], Sampling(9, min_tokens=1, stop_token_ids=tuple(range(9))), "9 tokens would end the text"),
    ):
        with pytest.raises(mw.ServingError, match=message):
            engine.submit(prompt, sampling)


def test_an_engine_that_is_drained_ends_what_is_open_and_takes_no_more():
    draining = make()
    handles = [draining.submit([1, 2, 3], Sampling(30, temperature=0.0, ignore_eos=True)) for _ in range(5)]
    assert draining.drain(60)
    assert [len(list(handle)) for handle in handles] == [30] * 5
    with pytest.raises(EngineStopped, match="drained"):
        draining.submit([1], Sampling(1))
    draining.close()
    assert not any(
        thread.name == "meshwright engine" and thread is draining._thread for thread in threading.enumerate()
    )


def test_a_failing_device_ends_all_requests_with_what_it_was(caplog):
    failing = make()

    def fail(*_):
        raise RuntimeError("the device is gone")

    failing._programs.step = fail
    handle = failing.submit([1, 2], Sampling(3))
    with pytest.raises(EngineStopped, match="the device is gone"):
        list(handle)
    assert handle.finish_reason == "error"
    with pytest.raises(EngineStopped, match="the device is gone"):
        failing.submit([1], Sampling(1))
    failing.close()
