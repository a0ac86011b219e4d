"""How fast is the engine on one GPU, and how much of a step does the host take? Llama-3-8B, random weights, bfloat16.

    python benchmarks/serving.py                       # all parts; on an H200 about four minutes
    python benchmarks/serving.py --part times --batches 64 --cudnn
    python benchmarks/serving.py --slots 384 --part throughput --chunk 1024 --max-len 2048
    python benchmarks/serving.py --cache-dtype int8 --batches 64 256
    python benchmarks/serving.py --model llama-tiny --slots 8 --context 24 --chunk 32 --max-len 64   # tries it on a CPU

Asked of one H200: a token takes at most 4.8 ms at batch 1, 7.8 at 64 and 16 at 256, at a context of 1,024 inside the
engine; a prompt of 2,048 tokens 48 ms; 1,000 tokens in and 1,000 out, saturated, at least 10,000 tokens/s; the host
at most 5% of a step. Each row is printed and written as soon as it is known, to `serving.jsonl` in `--out`.
"""

import argparse
import itertools
import json
import os
import statistics
import threading
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault(
    "XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92"
)  # a cache of 256 slots takes more than JAX's three quarters

import jax
import jax.numpy as jnp
import numpy as np
from strangers.kernels import kernels

import meshwright as mw
from meshwright import zoo
from meshwright.serving.engine import Engine, Placement
from meshwright.serving.engine.programs import Programs
from meshwright.serving.models import Decoder, Draw, Kind, SlotCache, StepShape, TritonCache, join_products
from meshwright.serving.promised import step_prices
from meshwright.serving.requests import Sampling
from meshwright.serving.scheduling import Limits
from meshwright.serving.scheduling.limits import row_ladder
from meshwright.serving.sizes import banks

STARTED = time.perf_counter()


class Report:
    """Rows that are printed and kept as they come."""

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


def agreement(report, kernel, stored):
    """Do the kernels say what the scores written out say? A small Llama, with a window and without."""
    for window in (None, 40):
        options = {"layers": 2, "hidden": 512, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 512, "window": window}
        config = zoo.build("llama-tiny", seq=128, **options).config
        slots = SlotCache((1, 3), 128, config.dtype)
        banks_of = (TritonCache, (4,)) if kernel else (SlotCache, (1, 3))
        cache = banks_of[0](banks_of[1], 128, stored or config.dtype)
        kernels = Decoder.of(config, cache)
        plain = Decoder.of(replace(config, attention="plain"), slots)
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
            cache=stored or config.dtype,
            likeliest_alike=float((scores["kernels"].argmax(-1) == scores["plain"].argmax(-1)).mean()),
            largest_difference=float(difference),
            largest_score=float(np.abs(scores["plain"]).max()),
        )


def settle(engine):
    """Waits until the engine has nothing on the device."""
    before = -1
    while before != (before := engine.stats().steps):
        time.sleep(0.3)


def bare_step(engine, batch, context):
    """A step of `batch` sequences without an engine's work, as a function that returns what is on its way."""
    programs, buckets = engine._programs, engine._buckets
    shape = next(one for one in sorted(buckets.shapes()) if not one.prompts and one.rows >= batch)
    packed = shape.packed(0)
    rows = shape.unpack(packed)[0]
    rows.at[:batch], rows.given[:batch] = context, np.random.default_rng(0).integers(0, engine.vocab, batch)
    draws = Draw.blank(shape.rows, engine.limits.slots)
    draws[:batch, 0] = np.arange(batch)
    return lambda: programs.draw(Kind.GREEDY, programs.step(shape, packed)[0], draws)


def bare_prompt(engine, tokens, batch=0):
    """A step that begins a prompt beside `batch` sequences, likewise."""
    programs, buckets = engine._programs, engine._buckets
    shapes = [one for one in buckets.shapes() if one.prompts == 1 and one.tokens >= tokens and one.fresh]
    shape = min((one for one in shapes if one.rows >= batch), key=lambda one: (one.tokens, one.rows))
    packed, rng = shape.packed(0), np.random.default_rng(0)
    rows, prompts = shape.unpack(packed)
    rows.at[:batch], rows.given[:batch] = tokens, rng.integers(0, engine.vocab, batch)
    # Tokens as they come: equal ones make equal rows, over which products need less power and run at a higher clock.
    prompts.tokens[0, :tokens] = rng.integers(0, engine.vocab, tokens)
    prompts.counts[0], prompts.slots[0] = tokens, max(batch - 1, 0)
    draws = Draw.blank(1, engine.limits.slots)
    return lambda: programs.draw(Kind.GREEDY, programs.step(shape, packed)[1], draws)


def timed(step, steps, repeats=5):
    """Seconds of a step, of so many that are sent one after the other."""
    for _ in range(3):
        drawn = step()
    times = []
    for _ in range(repeats):
        np.asarray(drawn)
        start = time.perf_counter()
        for _ in range(steps):
            drawn = step()
        np.asarray(drawn)
        times.append((time.perf_counter() - start) / steps)
    return statistics.median(times)


def decode(engine, prices, report, batch, context, steps):
    """Time per token of `batch` sequences around a context, in the engine and bare."""
    rng = np.random.default_rng(batch)
    begun = batch * context // engine.limits.chunk  # steps until the last one runs, in which the first ones go on
    sampling = Sampling(2 * steps + 2 * begun + 64, temperature=0.0, ignore_eos=True)
    short = max(1, min(context - (steps + begun) // 2, engine.limits.max_len - sampling.max_tokens))
    prompts = rng.integers(0, engine.vocab, (batch, short))
    count, ready = Counter(), threading.Event()

    def listen(handle, token):
        count[handle.id] += 1
        if token is None or (len(count) == batch and min(count.values()) >= 3):
            ready.set()

    handles = [engine.submit(prompt, sampling, listen) for prompt in prompts]
    ready.wait()
    one, before, start = engine.stats(), count.total(), time.perf_counter()
    while engine.stats().steps < one.steps + steps and not any(handle.finish_reason for handle in handles):
        time.sleep(0.002)
    two, after, end = engine.stats(), count.total(), time.perf_counter()
    for handle in handles:
        if handle.finish_reason:
            raise RuntimeError(f"a sequence has ended too early: {handle.finish_reason} {handle.error}")
        handle.cancel()
    settle(engine)
    engine_s = (end - start) / (two.steps - one.steps)
    middle = short + round((before + after) / 2 / batch)
    bare_s = timed(bare_step(engine, batch, middle), steps)
    predicted_s = prices.decode_s(batch, middle)
    report(
        part="decode",
        batch=batch,
        context=middle,
        engine_ms=1e3 * engine_s,
        bare_ms=1e3 * bare_s,
        host_gap_percent=100 * (engine_s / bare_s - 1),
        predicted_ms=1e3 * predicted_s,
        predicted_percent=100 * (predicted_s / engine_s - 1),
        tokens_per_s=(two.tokens_out - one.tokens_out) / (end - start),
    )


def prefill(engine, prices, report, tokens):
    """Time to the first token of one prompt on an idle engine, and of the bare step."""
    prompt = np.random.default_rng(0).integers(0, engine.vocab, tokens)
    times, moments, programs = [], {}, engine._programs
    kept = programs.step, programs.draw

    def told(name, call):
        def run(*given):
            moments[f"{name}_called_ms"] = 1e3 * (time.perf_counter() - start)
            result = call(*given)
            moments[f"{name}_sent_ms"] = 1e3 * (time.perf_counter() - start)
            return result

        return run

    programs.step, programs.draw = told("step", kept[0]), told("draw", kept[1])
    for _ in range(5):
        start = time.perf_counter()
        next(iter(engine.submit(prompt, Sampling(1, temperature=0.0))))
        times.append(time.perf_counter() - start)
    settle(engine)
    programs.step, programs.draw = kept
    bare_s, alone_s = (timed(bare_prompt(engine, tokens), steps) for steps in (5, 1))
    engine_s, predicted_s = statistics.median(times), prices.prefill_s(tokens)
    report(
        part="prefill",
        tokens=tokens,
        engine_ms=1e3 * engine_s,
        bare_ms=1e3 * bare_s,
        alone_ms=1e3 * alone_s,
        predicted_ms=1e3 * predicted_s,
        predicted_percent=100 * (predicted_s / engine_s - 1),
        **moments,
    )
    beside = engine.limits.slots
    bare_s = timed(bare_prompt(engine, tokens, beside), 5)
    predicted_s = prices.step_s(beside + tokens, beside + 1, beside * tokens, tokens * (tokens + 1) / 2)
    report(part="mixed", batch=beside, tokens=tokens, bare_ms=1e3 * bare_s, predicted_ms=1e3 * predicted_s)


def kernel_times(report, name, step):
    """Which kernels take the time of a bare step, by JAX's profiler."""
    np.asarray(step())
    with TemporaryDirectory() as folder:
        sums, counts = Counter(), Counter()
        for kernel, (count, seconds) in kernels(step, Path(folder)).items():
            alike = "".join(letter for letter in kernel if not letter.isdigit())
            sums[alike] += seconds
            counts[alike] += count
    for kernel, seconds in sums.most_common(20):
        rest = {"kernel": kernel, "times": counts[kernel], "ms": 1e3 * seconds}
        report(part="kernels", step=name, all_ms=1e3 * sums.total(), **rest)


def variants(config, params, report, options):
    """Bare steps with the slots dealt to banks in several ways, without and with the draw of the tokens."""
    for of_banks, batch, prompts in (
        ((1,), 1, (0, 1)),
        ((1, 7, 56, 192), 256, (256,)),
        ((256,), 256, (256,)),
        ((64,), 64, ()),
        ((1, 7, 56), 64, ()),
        ((8,), 8, ()),
    ):
        shapes = [StepShape(sum(of_banks), 0, 0, False, 0)]
        shapes += [StepShape(rows, 1, options.chunk, True, 0) for rows in prompts]
        variant(config, params, report, options, of_banks, batch, shapes)


def variant(config, params, report, options, of_banks, batch, shapes):
    """One way to deal slots to banks; its cache is gone when this returns."""
    slots = sum(of_banks)
    decoder = Decoder.of(config, SlotCache(of_banks, options.max_len, config.dtype))
    programs = Programs(decoder, params, slots, [Placement.single(decoder)])
    start = time.perf_counter()
    programs.compile(shapes, [slots], options.max_len, lambda _: None)
    compiled_s = time.perf_counter() - start
    draws = Draw.blank(slots, slots)
    draws[:batch, 0] = np.arange(batch)
    for shape in shapes:
        packed = shape.packed(0)
        rows, prompts = shape.unpack(packed)
        rows.at[:batch], rows.given[:batch] = options.context, 1
        prompts.counts[:], prompts.slots[:] = shape.tokens, slots - 1
        wanted = int(shape.prompts > 0)

        def step(shape=shape, packed=packed, wanted=wanted):
            return programs.step(shape, packed)[wanted]

        row = {"banks": str(of_banks), "batch": batch, "rows": shape.rows, "tokens": shape.tokens}
        row["step_ms"] = 1e3 * timed(step, 20)
        if not shape.prompts:
            row["with_draw_ms"] = 1e3 * timed(lambda step=step: programs.draw(Kind.GREEDY, step(), draws), 20)
        report(part="variants", **row, compiled_s=compiled_s)
        if jax.default_backend() == "gpu":
            kernel_times(report, f"{of_banks} {batch} {shape.rows}+{shape.tokens}", step)


def compiled_sizes(engine, report):
    """What each compiled step takes beside its arguments; a copy of the cache would be seen here."""
    for shape in engine._buckets.shapes():
        analyse = getattr(engine._programs._compiled[shape][0], "memory_analysis", None)  # a CPU's steps take turns
        if analyse is not None:
            report(part="compiled", shape=str(shape), temporary_gib=analyse().temp_size_in_bytes / 2**30)


def throughput(engine, report, length):
    """Tokens a second with prompts and answers of `length` tokens, all slots taken; begun in the middle of it.

    The first requests stand for some that have generated from none to all of their tokens, so that requests end and
    begin evenly. It is measured over `length` steps: each slot begins one request in them, wherever it stood, and there
    are as many tokens of prompts as of answers. (While the slots fill, the first ones run ahead of the last ones, so
    that for a part of these steps 1.2 to 1.4 times as many requests begin.)
    """
    slots, draws = engine.limits.slots, itertools.count()
    stopped, open_requests, waits, failed = [False], {}, [], []

    def submit(done):
        prompt = np.random.default_rng(next(draws)).integers(0, engine.vocab, length + done)
        now = time.perf_counter()
        handle = engine.submit(prompt, Sampling(length - done, temperature=0.0, ignore_eos=True), listen)
        open_requests[handle.id] = [handle, None if done else now]

    def listen(handle, token):
        if token is not None and handle.id in open_requests and open_requests[handle.id][1] is not None:
            waits.append(time.perf_counter() - open_requests[handle.id][1])
            open_requests[handle.id][1] = None
        elif token is None and handle.finish_reason == "error":
            failed.append(handle.error)
        elif token is None and not stopped[0]:
            open_requests.pop(handle.id, None)
            submit(0)

    for number in range(slots):
        submit(number * length // slots)
    while ((stats := engine.stats()).running < slots or stats.waiting) and not failed:
        time.sleep(0.05)
    one, start = engine.stats(), time.perf_counter()
    while (two := engine.stats()).steps < one.steps + length and not failed:
        time.sleep(0.01)
    now = time.perf_counter()
    report(
        part="throughput",
        tokens_in=length,
        tokens_out=length,
        slots=slots,
        cache=engine._programs.decoder.cache.dtype,
        chunk=engine.limits.chunk,
        seconds=now - start,
        tokens_per_s=(two.tokens_out - one.tokens_out) / (now - start),
        prompt_tokens_per_s=(two.tokens_in - one.tokens_in) / (now - start),
        step_ms=1e3 * (now - start) / (two.steps - one.steps),
        median_first_token_ms=1e3 * statistics.median(waits) if waits else None,
    )
    stopped[0] = True
    for handle, _ in list(open_requests.values()):
        handle.cancel()
    if failed:
        raise RuntimeError(failed[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part",
        choices=("all", "agreement", "times", "throughput", "variants"),
        default="all",
    )
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--cudnn", action="store_true", help="mix by cuDNN's kernel, not `serving/models/triton.py`")
    parser.add_argument("--cache-dtype", choices=("int8", "float8"), help="of 8 bits")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--lengths", type=int, nargs="*", default=[1024], help="of chunks that are compiled as well")
    parser.add_argument("--max-len", type=int, default=2176)
    parser.add_argument("--length", type=int, default=1000, help="of prompts and of answers, for the throughput")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    report = Report(options.out)
    device = jax.devices()[0]
    report(part="machine", device=device.device_kind, jax=jax.__version__, model=options.model)
    kernel = not options.cudnn
    if options.part == "agreement":
        agreement(report, kernel, options.cache_dtype)
        return
    layers = {} if options.layers is None else {"layers": options.layers}
    config = zoo.build(options.model, seq=options.max_len, **layers).config
    of_banks = (options.slots,) if kernel else banks(row_ladder(options.slots))
    cache = (TritonCache if kernel else SlotCache)(of_banks, options.max_len, options.cache_dtype or config.dtype)
    params = join_products(random_params(Decoder.of(config, cache)))
    if options.part == "variants":
        variants(config, params, report, options)
        return
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
    engine = Engine(config, params, limits, cache, lengths=options.lengths)
    report(part="start", compiled=len(engine._buckets.shapes()), seconds=time.perf_counter() - start)
    compiled_sizes(engine, report)
    prices = step_prices(config, mw.cluster("1x1 h200"), 1, cache=options.cache_dtype)
    batches = [batch for batch in options.batches if batch <= options.slots]
    if options.part in ("all", "times"):
        for batch in batches:
            decode(engine, prices, report, batch, options.context, options.steps)
        prefill(engine, prices, report, options.chunk)
        prefill(engine, prices, report, options.chunk // 2)
    if options.part in ("all", "throughput"):
        throughput(engine, report, options.length)
        settle(engine)
    engine.close()
    if options.part == "all":
        agreement(report, kernel, options.cache_dtype)


if __name__ == "__main__":
    main()
