"""How fast is the engine on one GPU, and how much of a step does the host take? Llama-3-8B, random weights, bfloat16.

    python benchmarks/serving.py                       # all parts; on an H200 about four minutes
    python benchmarks/serving.py --part decode --batches 64
    python benchmarks/serving.py --part leaks          # on any machine: 10,000 random requests
    python benchmarks/serving.py --model llama-tiny --slots 8 --context 24 --chunk 32 --max-len 64   # tries it on a CPU

Asked of one H200: a token takes at most 4.8 ms at batch 1, 7.8 at 64 and 16 at 256, at a context of 1,024 inside the
engine; a prompt of 2,048 tokens 48 ms; 1,000 tokens in and 1,000 out, saturated, at least 10,000 tokens/s; the host
at most 5% of a step. Each row is printed and written as soon as it is known, to `serving.jsonl` in `--out`.
"""

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from meshwright import zoo
from meshwright.serving.engine import Engine
from meshwright.serving.models import Decoder, Draw, Kind, PagedCache, SlotCache, StepShape
from meshwright.serving.requests import Overloaded, Sampling
from meshwright.serving.scheduling import Limits
from meshwright.serving.sizes import banks

STARTED = time.perf_counter()


class Report:
    """Running that are printed and kept as they come."""

    def __init__(self, folder):
        self.path = Path(folder) / "serving.jsonl"

    def __call__(self, **row):
        row["at_s"] = round(time.perf_counter() - STARTED, 1)
        line = json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()})
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


def random_params(decoder):
    """Random parameters, drawn on the device in the dtype of use; each shape is compiled once."""

    @partial(jax.jit, static_argnums=(1, 2))
    def draw(key, shape, dtype):
        return 0.02 * jax.random.normal(key, shape, dtype) if len(shape) > 1 else jnp.ones(shape, dtype)

    leaves, tree = jax.tree.flatten(decoder.params())
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return jax.tree.unflatten(tree, [draw(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)])


def agreement(report):
    """Do the kernels say what the scores written out say? A small Llama, with a window and without."""
    for window in (None, 40):
        options = {"layers": 2, "hidden": 512, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 512, "window": window}
        config = zoo.build("llama-tiny", seq=128, **options).config
        cache = SlotCache((1, 3), 128, config.dtype)
        kernels, plain = (Decoder.of(replace(config, attention=kind), cache) for kind in (None, "plain"))
        params = random_params(kernels)
        tokens = np.random.default_rng(0).integers(0, 512, 100)
        scores = {}
        for name, decoder in (("kernels", kernels), ("plain", plain)):
            arrays = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), decoder.arrays())
            last, kept = jnp.zeros(4, jnp.int32), []
            for start, end, fresh in ((0, 60, True), (60, 90, False)):
                shape = StepShape(4, 1, 64, fresh, 0)
                packed = shape.packed(0)
                prompts = shape.unpack(packed)[1]
                prompts.tokens[0, : end - start] = tokens[start:end]
                prompts.starts[0], prompts.counts[0], prompts.slots[0] = start, end - start, 2
                arrays, _, of_prompts = jax.jit(partial(decoder.step, shape))(params, arrays, last, packed)
                kept.append(np.asarray(of_prompts[0], np.float32))
            shape = StepShape(4, 0, 0, False, 0)
            step = jax.jit(partial(decoder.step, shape))
            for at in range(90, 100):
                packed = shape.packed(0)
                rows = shape.unpack(packed)[0]
                rows.given[2], rows.at[2] = tokens[at], at
                arrays, of_rows, _ = step(params, arrays, last, packed)
                kept.append(np.asarray(of_rows[2], np.float32))
            scores[name] = np.stack(kept)
        difference = np.abs(scores["kernels"] - scores["plain"]).max()
        report(
            part="agreement",
            window=window,
            largest_difference=float(difference),
            largest_score=float(np.abs(scores["plain"]).max()),
        )


def settle(engine):
    """Waits until the engine has nothing on the device."""
    before = -1
    while before != (before := engine.stats().steps):
        time.sleep(0.3)


def bare(engine, batch, context, steps):
    """Seconds of a step of `batch` sequences, one sent after the other without an engine's work."""
    programs, buckets = engine._programs, engine._buckets
    shape = next(one for one in sorted(buckets.shapes()) if not one.prompts and one.rows >= batch)
    packed = shape.packed(0)
    rows = shape.unpack(packed)[0]
    rows.at[:batch], rows.given[:batch] = context, 1
    draws = Draw.blank(shape.rows, engine.limits.slots)
    draws[:batch, 0] = np.arange(batch)

    def run(count):
        for _ in range(count):
            drawn = programs.draw(Kind.GREEDY, programs.step(shape, packed)[0], draws)
        np.asarray(drawn)

    run(3)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        run(steps)
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times)


def bare_prompt(engine, tokens, repeats=5):
    """Seconds of one prompt, without an engine's work."""
    programs, buckets = engine._programs, engine._buckets
    shapes = [one for one in buckets.shapes() if one.prompts == 1 and one.tokens >= tokens and one.fresh]
    shape = min(shapes, key=lambda one: (one.tokens, one.rows))
    packed = shape.packed(0)
    shape.unpack(packed)[1].counts[0] = tokens
    draws = Draw.blank(1, engine.limits.slots)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        np.asarray(programs.draw(Kind.GREEDY, programs.step(shape, packed)[1], draws))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def decode(engine, report, batch, context, steps):
    """Time per token of `batch` sequences around a context, in the engine and bare."""
    rng = np.random.default_rng(batch)
    sampling = Sampling(2 * steps + batch + 64, temperature=0.0, ignore_eos=True)
    short = max(1, min(context - steps // 2, engine.limits.max_len - sampling.max_tokens))
    prompts = rng.integers(0, engine.vocab, (batch, short))
    count, ready = [0] * batch, threading.Event()
    first = {}

    def listen(handle, token):
        number = first.setdefault(handle.id, len(first))
        count[number] += 1
        if len(first) == batch and min(count) >= 2:
            ready.set()

    handles = [engine.submit(prompt, sampling, listen) for prompt in prompts]
    ready.wait()
    one, start = engine.stats(), time.perf_counter()
    while engine.stats().steps < one.steps + steps:
        time.sleep(0.002)
    two, end = engine.stats(), time.perf_counter()
    for handle in handles:
        handle.cancel()
    settle(engine)
    engine_s = (end - start) / (two.steps - one.steps)
    bare_s = bare(engine, batch, context, steps)
    report(
        part="decode",
        batch=batch,
        context=context,
        engine_ms=1e3 * engine_s,
        bare_ms=1e3 * bare_s,
        host_gap_percent=100 * (engine_s / bare_s - 1),
        tokens_per_s=(two.tokens_out - one.tokens_out) / (end - start),
    )


def prefill(engine, report, tokens):
    """Time to the first token of one prompt on an idle engine, and of the bare step."""
    prompt = np.random.default_rng(0).integers(0, engine.vocab, tokens)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        next(iter(engine.submit(prompt, Sampling(1, temperature=0.0))))
        times.append(time.perf_counter() - start)
    settle(engine)
    bare_s = bare_prompt(engine, tokens)
    report(part="prefill", tokens=tokens, engine_ms=1e3 * statistics.median(times), bare_ms=1e3 * bare_s)


def throughput(engine, report, length, seconds):
    """Tokens a second with prompts and answers of `length` tokens, all slots taken; begun in the middle of it.

    The first requests stand for some that have generated from none to all of their tokens, so that requests end and
    begin evenly from the start.
    """
    rng, slots, lock = np.random.default_rng(1), engine.limits.slots, threading.Lock()
    stopped, arrived, waits = [False], {}, []

    def submit(done):
        prompt = rng.integers(0, engine.vocab, length + done)
        now = time.perf_counter()
        handle = engine.submit(prompt, Sampling(length - done, temperature=0.0, ignore_eos=True), listen)
        arrived[handle.id] = (now, done)

    def listen(handle, token):
        if token is None and not stopped[0]:
            with lock:
                submit(0)
        elif token is not None and handle.id in arrived:
            since, done = arrived.pop(handle.id)
            if not done:
                waits.append(time.perf_counter() - since)

    for number in range(slots):
        with lock:
            submit(number * length // slots)
    while engine.stats().running < slots or engine.stats().waiting:
        time.sleep(0.05)
    one, start = engine.stats(), time.perf_counter()
    ended = start + seconds
    while time.perf_counter() < ended:
        time.sleep(min(5, ended - time.perf_counter()))
        two, now = engine.stats(), time.perf_counter()
        report(
            part="throughput",
            tokens_in=length,
            tokens_out=length,
            slots=slots,
            seconds=now - start,
            tokens_per_s=(two.tokens_out - one.tokens_out) / (now - start),
            prompt_tokens_per_s=(two.tokens_in - one.tokens_in) / (now - start),
            step_ms=1e3 * (now - start) / (two.steps - one.steps),
            median_first_token_ms=1e3 * statistics.median(waits) if waits else None,
        )
    stopped[0] = True


def leaks(report, requests):
    """Random admissions, cancellations and preemptions on a tiny model with a small cache: is any block left taken?"""
    draw, blocks = random.Random(0), 20
    config = zoo.build("llama-tiny", seq=64, layers=1, dtype="float32").config
    cache = PagedCache(blocks, 4, config.dtype)
    params = random_params(Decoder.of(config, cache))
    engine = Engine(config, params, Limits(4, 4, blocks, 8, 12, 8, 48), cache, eos=[2])
    handles, ends = [], Counter()
    for number in range(requests):
        prompt = [draw.randrange(3)] * draw.randint(1, 20)
        sampling = Sampling(draw.randint(1, 24), temperature=draw.choice([0.0, 1.0]), ignore_eos=draw.random() < 0.5)
        while True:
            try:
                handles.append(engine.submit(prompt, sampling))
                break
            except Overloaded:
                handle = handles.pop(draw.randrange(len(handles)))
                if draw.random() < 0.3:
                    handle.cancel()
                for _ in handle:
                    pass
                ends[handle.finish_reason] += 1
        if number % 1000 == 999:
            stats = engine.stats()
            report(part="leaks", requests=number + 1, preemptions=stats.preemptions, prefix_hits=stats.prefix_hits)
    ended = engine.drain(60)
    stats = engine.stats()
    report(part="leaks", requests=requests, ended=ended, blocks_used=stats.blocks_used, blocks=stats.blocks, **ends)
    engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", choices=("all", "agreement", "decode", "prefill", "throughput", "leaks"), default="all"
    )
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--max-len", type=int, default=2176)
    parser.add_argument("--length", type=int, default=1000, help="of prompts and of answers, for the throughput")
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--requests", type=int, default=10_000, help="of the part `leaks`, which no other run includes")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    report = Report(options.out)
    device = jax.devices()[0]
    report(part="machine", device=device.device_kind, jax=jax.__version__, model=options.model)
    if options.part == "leaks":
        leaks(report, options.requests)
        return
    if options.part == "agreement":
        agreement(report)
        return
    config = zoo.build(options.model, seq=options.max_len).config
    cache = SlotCache(banks(options.slots), options.max_len, config.dtype)
    params = random_params(Decoder.of(config, cache))
    budget = options.chunk + options.slots
    limits = Limits(
        slots=options.slots,
        block_size=options.max_len,
        blocks=options.slots,
        chunk=options.chunk,
        token_budget=budget,
        queue=10 * options.slots,
        max_len=options.max_len,
    )
    start = time.perf_counter()
    engine = Engine(config, params, limits, cache, lengths=[options.chunk // 2])
    report(part="start", compiled=len(engine._buckets.shapes()), seconds=time.perf_counter() - start)
    if options.part in ("all", "prefill"):
        prefill(engine, report, options.chunk)
        prefill(engine, report, options.chunk // 2)
    if options.part in ("all", "decode"):
        for batch in options.batches:
            if batch <= options.slots:
                decode(engine, report, batch, options.context, options.steps)
    if options.part in ("all", "throughput"):
        throughput(engine, report, options.length, options.seconds)
    engine.close()
    if options.part == "all":
        agreement(report)


if __name__ == "__main__":
    main()
