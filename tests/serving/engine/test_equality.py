"""Texts are those of transformers, token by token, whatever else is in the batch and however prompts are cut.

`tests/hf/make_references.py` made the references, from all tokens anew for each token.
"""

from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw
from meshwright.serving.engine import Engine
from meshwright.serving.models import PagedCache, SlotCache, TritonCache, join_products
from meshwright.serving.requests import Sampling
from meshwright.serving.scheduling import Limits

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCES = Path(__file__).parents[2] / "hf" / "references"
CASES = sorted(path.name for path in REFERENCES.iterdir())
GREEDY = Sampling(64, temperature=0.0)
LENGTH = 96


@cache
def model(name):
    return mw.hf.load(REFERENCES / name)


@cache
def texts(name):
    """Prompts of unequal lengths, each with its continuation."""
    tensors = load_file(REFERENCES / name / "reference.safetensors")
    whole = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    return [(ids[:-64], ids[-64:]) for ids in whole]


def paged(name, chunk=8, blocks=80, slots=4, block=4):
    limits = Limits(slots, block, blocks, chunk, chunk + slots, 100, LENGTH)
    params = join_products(jax.tree.map(lambda leaf: leaf, model(name).params))  # a copy of the tree, not of its arrays
    return Engine(model(name).config, params, limits, PagedCache(blocks, block, "float32"))


def run(engine, prompts, sampling=GREEDY):
    handles = [engine.submit(prompt, sampling) for prompt in prompts]
    return [[token.id for token in handle] for handle in handles]


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", CASES)
def test_every_family_generates_what_transformers_does(name):
    engine = paged(name)
    (first, of_first), (second, of_second) = texts(name)
    try:
        assert run(engine, [first]) == [of_first]  # alone
        others = [first[:3], second[:1], first[2:9]]
        several = run(engine, [second, *others, first, first, second])  # more than there are slots
        assert [several[0], *several[4:]] == [of_second, of_first, of_first, of_second]
        assert engine.stats().prefix_hits > 0
        assert engine.stats().blocks_used == 0
    finally:
        engine.close()


@pytest.mark.sweep(2)
@pytest.mark.parametrize("chunk, blocks", [(1, 80), (5, 80), (32, 80), (8, 24)])
def test_however_prompts_are_cut_and_requests_preempted(chunk, blocks):
    engine = paged("gemma2", chunk, blocks)
    prompts, expected = zip(*texts("gemma2"), strict=True)
    try:
        assert run(engine, prompts * 3) == list(expected) * 3
        assert (engine.stats().preemptions > 0) == (blocks < 80)
    finally:
        engine.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma2"])
@pytest.mark.parametrize("slots", [SlotCache((1, 3), LENGTH, "float32"), TritonCache((4,), LENGTH, "float32")])
def test_contiguous_slots_compute_the_same(name, slots):
    limits = Limits(4, LENGTH, 4, 8, 12, 100, LENGTH)
    engine = Engine(model(name).config, model(name).params, limits, slots)
    prompts, expected = zip(*texts(name), strict=True)
    try:
        assert run(engine, prompts * 3) == list(expected) * 3
    finally:
        engine.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["llama", "gpt-oss"])
def test_slots_that_hold_a_prefix_are_taken_over_or_copied(name):
    limits = Limits(4, LENGTH, 4, 8, 12, 100, LENGTH, reuse=4)
    engine = Engine(model(name).config, model(name).params, limits, SlotCache((1, 3), LENGTH, "float32"))
    (first, of_first), (second, of_second) = texts(name)
    try:
        assert run(engine, [first]) == [of_first]
        before = engine.stats().prefix_hits
        assert run(engine, [first]) == [of_first]  # in the same slot, which is free
        assert engine.stats().prefix_hits == before + (len(first) - 1) // 4 * 4
        handle = engine.submit([*first, *of_first[:4]], Sampling(60, temperature=0.0))
        tokens = iter(handle)
        next(tokens)  # it runs, so that the next ones get copies
        assert run(engine, [first, second, first[:-3], first]) == [
            of_first,
            of_second,
            run(engine, [first[:-3]])[0],
            of_first,
        ]
        assert [token.id for token in tokens] == of_first[5:]
        follow = [*second, *of_second[:40]]  # what was generated is reused as well
        assert run(engine, [follow], Sampling(24, temperature=0.0)) == [of_second[40:]]
        assert engine.stats().prefix_hits > before + 4 * len(first)
    finally:
        engine.close()


def test_a_seed_gives_the_same_text_alone_and_among_others():
    engine = paged("llama")
    (first, _), (second, _) = texts("llama")
    drawn = Sampling(30, temperature=1.5, top_k=20, top_p=0.9, seed=11)
    try:
        alone = run(engine, [first], drawn)[0]
        handles = [engine.submit(second, GREEDY), engine.submit(first, drawn)]
        handles += [engine.submit(second, Sampling(20, logprobs=3)), engine.submit(first, drawn)]
        among = [[token.id for token in handle] for handle in handles]
        assert among[1] == among[3] == alone
        assert run(engine, [first], Sampling(30, temperature=1.5, top_k=20, top_p=0.9, seed=12))[0] != alone
        assert np.unique([run(engine, [first], Sampling(4, seed=None))[0] for _ in range(8)], axis=0).shape[0] > 1
    finally:
        engine.close()
