"""Several engines as one, on virtual devices: the texts are those of transformers."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs safetensors, tokenizers and jinja2: the extra [hf]")

from safetensors.numpy import load_file

import meshwright as mw
from meshwright.serving.engine import Engine, Fleet, Placement
from meshwright.serving.models import Decoder, PagedCache, SlotCache
from meshwright.serving.requests import Sampling
from meshwright.serving.scheduling import Limits, Request

pytestmark = [pytest.mark.slow, pytest.mark.devices]
REFERENCES = Path(__file__).parents[2] / "hf" / "references"
LENGTH, GREEDY = 96, Sampling(64, temperature=0.0)


@cache
def model(name):
    return mw.hf.load(REFERENCES / name)


@cache
def texts(name):
    tensors = load_file(REFERENCES / name / "reference.safetensors")
    whole = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    return [(ids[:-64], ids[-64:]) for ids in whole]


def make(name, devices, contiguous=False, slots=4, chunk=8):
    """An engine with a stage on each of some devices."""
    limits = Limits(slots, 4, 80, chunk, chunk + slots, 100, LENGTH)
    cache = PagedCache(80, 4, "float32")
    if contiguous:
        limits, cache = replace(limits, block_size=LENGTH, blocks=slots), SlotCache((1, slots - 1), LENGTH, "float32")
    decoder = Decoder.of(model(name).config, cache)
    places = [Placement.single(decoder, jax.devices()[number]) for number in devices]
    params = jax.device_put(model(name).params, jax.devices()[devices[0]])
    return Engine(model(name).config, params, limits, cache, placements=places, lengths=[chunk])


def check(engine, name, times=3):
    prompts, expected = zip(*texts(name), strict=True)
    try:
        handles = [engine.submit(prompt, GREEDY) for prompt in prompts * times]
        assert [[token.id for token in handle] for handle in handles] == list(expected) * times
    finally:
        engine.close()


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["gpt2", "gpt-oss"])
def test_stages_of_layers_compute_the_same(name):
    check(make(name, [1, 2]), name, times=2)


def test_replicas_share_the_requests():
    engine = Fleet([make("llama", [0]), make("llama", [1])])
    prompts, expected = zip(*texts("llama"), strict=True)
    handles = [engine.submit(prompt, GREEDY) for prompt in prompts * 2]
    assert [one.stats().running + one.stats().waiting for one in engine._fronts] == [2, 2]
    assert [[token.id for token in handle] for handle in handles] == list(expected) * 2
    assert engine.stats().tokens_out == 4 * 64
    engine.close()


def test_twins_take_turns_on_the_stages_of_a_pipeline():
    engine = make("llama", [0, 1], contiguous=True)
    check(Fleet([engine, engine.twin()]), "llama")


def test_prompts_and_answers_apart():
    front, back = make("llama", [0]), make("llama", [1], contiguous=True)
    for one in (front, back):
        one.compile_transfers([24, LENGTH])
    engine = Fleet([front], [back])
    first = engine.submit(texts("llama")[0][0], Sampling(64, temperature=1.0, seed=3))
    alone = make("llama", [2])
    same = alone.submit(texts("llama")[0][0], Sampling(64, temperature=1.0, seed=3))
    assert [token.id for token in first] == [token.id for token in same]
    alone.close()
    cancelled = engine.submit(texts("llama")[0][0], GREEDY)
    next(iter(cancelled))
    cancelled.cancel()
    assert len(list(cancelled)) < 63 and cancelled.finish_reason == "cancelled"
    check(engine, "llama")
    assert front.stats().tokens_out == 8 and back.stats().steps >= 63
    assert front.stats().blocks_used == back.stats().blocks_used == 0


class Desk:
    """Stands in for an engine that keeps every request open and every prompt in its cache."""

    def __init__(self, slots):
        self.limits = Limits(slots, 4, 80, 8, 8 + slots, 100, LENGTH)
        self.vocab, self.eos = 64, ()
        self.load, self._names = 0, []

    def checked(self, prompt):
        return list(prompt)

    def found(self, names):
        return next((count for count in range(len(names), 0, -1) if names[count - 1] in self._names), 0)

    def submit(self, prompt, sampling, listener=None):
        self.load += 1
        self._names += Request(0, prompt, 1).names(4)


def test_a_prompt_goes_where_its_beginning_is_known_unless_that_replica_is_busier():
    desks = [Desk(slots=8) for _ in range(3)]
    fleet = Fleet(desks)

    def loads_after(prompt):
        fleet.submit(prompt, GREEDY)
        return [desk.load for desk in desks]

    known, other = list(range(16)), list(range(16, 32))
    assert [loads_after(known), loads_after(other)] == [[1, 0, 0], [1, 1, 0]]
    assert loads_after([*other, 1, 2]) == [1, 2, 0]
    assert loads_after(other) == [1, 3, 0]
    assert loads_after(other) == [1, 3, 1]  # that replica has three more than another by now
    assert loads_after([*known[:8], 63]) == [2, 3, 1]
    for desk in desks:
        desk.load = 8
    desks[2].load = 7
    assert loads_after(known) == [8, 8, 8]  # where there is a slot
    assert loads_after(known) == [9, 8, 8]  # all wait: the first of those with the fewest
    assert loads_after(known) == [9, 9, 8]
