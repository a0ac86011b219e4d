"""How much busier may a replica be for a prompt that it knows? Simulated with the router and scheduler of the engine.

    python benchmarks/serving_routing.py
    python benchmarks/serving_routing.py --requests 300 --parts 1 8

Four replicas of Llama-3-8B, one H100 each, under loads whose prompts begin alike in several ways. A replica that knows
the prompt may have a part of its slots more requests than the least busy one: a row has the mean time to a first token
for each such part, from all slots (only what a prompt finds counts) to one request, and under "never" that of a router
which goes by the number of requests alone. Each load comes at two rates: one that keeps the replicas about half busy
where nothing is found, and one at which they are full.
"""

import argparse
import statistics
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

import numpy as np
from report import table

import meshwright as mw
from meshwright.serving.engine import fleet
from meshwright.serving.promised import step_prices
from meshwright.serving.scheduling import Limits, Request
from meshwright.serving.simulation.replica import Replica
from meshwright.zoo import build

REPLICAS, SLOTS, OUT, VOCAB = 4, 64, 100, 10_000
#: Of 64 slots these are 64, 32, 16, 8, 4, 2 and 1.
PARTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Engine:
    """What the router sees of a replica."""

    replica: Replica

    @property
    def load(self):
        return self.replica.load

    @property
    def limits(self):
        return self.replica.limits

    def found(self, names):
        return self.replica.scheduler.found(names)


def one_system_prompt(rng, number):
    """All prompts begin with the same 1,024 tokens."""
    system = rng.integers(0, VOCAB, 1024)
    return [np.concatenate([system, rng.integers(0, VOCAB, 256)]) for _ in range(number)]


def documents(rng, number):
    """Questions about one of 40 documents, some of which are asked about more often than others."""
    texts = [rng.integers(0, VOCAB, 3000) for _ in range(40)]
    chosen = rng.zipf(1.3, number) % len(texts)
    return [np.concatenate([texts[n], rng.integers(0, VOCAB, 64)]) for n in chosen]


def applications(rng, number):
    """Eight applications, each with a long prompt of its own; one of them sends half of all requests."""
    texts = [rng.integers(0, VOCAB, 2000) for _ in range(8)]
    chosen = np.where(rng.random(number) < 0.5, 0, rng.integers(1, 8, number))
    return [np.concatenate([texts[n], rng.integers(0, VOCAB, 128)]) for n in chosen]


def chats(rng, number):
    """Conversations of eight turns, each turn with all before it; many of them at once."""
    open_chats, prompts = [], []
    for _ in range(number):
        if len(open_chats) < 60:
            open_chats.append([rng.integers(0, VOCAB, 300), 0])
        place = rng.integers(len(open_chats))
        text, turns = open_chats[place]
        text = np.concatenate([text, rng.integers(0, VOCAB, 250)])
        prompts.append(text)
        open_chats[place] = [text, turns + 1]
        if turns == 7:
            open_chats.pop(place)
    return prompts


def nothing_alike(rng, number):
    """Prompts of 1,000 tokens that have nothing in common."""
    return [rng.integers(0, VOCAB, 1000) for _ in range(number)]


#: Each load with its two rates in requests a second.
LOADS = {
    one_system_prompt: (80, 160),
    documents: (30, 120),
    applications: (40, 160),
    chats: (40, 140),
    nothing_alike: (20, 70),
}


def first_token_s(prompts, rate, choose):
    """The mean time to a first token, of all requests but the first fifth."""
    config = build("llama3-8b").config
    prices = step_prices(config, mw.cluster("1x1 h100"), 1)
    limits = Limits(SLOTS, 16, 24_000, 2048, 2048 + SLOTS, 100_000, 8192)
    engines = [Engine(Replica(prices, limits)) for _ in range(REPLICAS)]
    came = np.cumsum(np.random.default_rng(1).exponential(1 / rate, len(prompts)))
    order, events, waits, busy = count(), [], {}, set()
    for number, at_s in enumerate(came):
        heappush(events, (float(at_s), next(order), number, None))

    def begin(engine, now_s):
        if id(engine) not in busy and engine.replica.start(now_s):
            busy.add(id(engine))
            heappush(events, (engine.replica.ends_s, next(order), -1, engine))

    while events:
        now_s, _, number, engine = heappop(events)
        if engine is None:
            prompt = prompts[number].tolist()
            engine = choose(engines, prompt)
            engine.replica.scheduler.add(Request(number, prompt, OUT, now_s))
        else:
            busy.discard(id(engine))
            engine.replica.finish(lambda request, now_s=now_s: waits.setdefault(request.id, now_s - request.arrival_s))
        begin(engine, now_s)
    return statistics.mean(waits[number] for number in range(len(prompts) // 5, len(prompts)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--parts", type=int, nargs="*", default=PARTS)
    options = parser.parse_args()
    rows = []
    for load, rates in LOADS.items():
        for rate in rates:
            prompts = load(np.random.default_rng(0), options.requests)
            waits = []
            for part in options.parts:
                fleet._UNEVEN = part
                waits.append(first_token_s(prompts, rate, fleet._chosen))
            waits.append(first_token_s(prompts, rate, lambda engines, prompt: fleet._least(engines)))
            rows.append([load.__name__.replace("_", " "), rate, *(f"{1e3 * wait:.0f}" for wait in waits)])
            print(*rows[-1], flush=True)
    header = ("prompts", "requests/s", *(f"slots / {part}" for part in options.parts), "never")
    question = (
        "How much busier may a replica be for a prompt that it knows? Mean milliseconds to a first token, simulated: "
        f"{REPLICAS} replicas of Llama-3-8B with {SLOTS} slots, one H100 each, {options.requests} requests."
    )
    table("Serving routing", question, header, rows)


if __name__ == "__main__":
    main()
