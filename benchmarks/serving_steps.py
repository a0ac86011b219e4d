"""Where does the time of a serving step go? Steps of a few layers of Llama-3-8B with one thing left out or changed.

    python benchmarks/serving_steps.py                 # on an H200 about a minute and a half
    python benchmarks/serving_steps.py --model llama-tiny --layers 2 --context 24 --chunk 32 --max-len 64 --batches 1 4

Every row is a bare step: no engine, no draw unless it says so. What a thing takes is the difference to the row
`as it is`. `draw` rows time the draw of the tokens alone. Rows are printed and kept as they come, in `steps.jsonl`.
"""

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from serving import kernel_times, random_params, timed

from meshwright import zoo
from meshwright.serving.models import Decoder, Draw, Kind, SlotCache, StepShape, join_products
from meshwright.serving.models.attention import Scoring, attend_last
from meshwright.serving.models.sampling import draw
from meshwright.serving.models.triton import TritonCache
from meshwright.serving.requests import MOST_LOGPROBS


@dataclass(frozen=True)
class Unwritten(SlotCache):
    """Keeps no keys and values."""

    def write_rows(self, layer, new, rows):
        return layer

    def write_prompts(self, layer, new, prompts):
        return layer


@dataclass(frozen=True)
class Unattended(SlotCache):
    """Mixes nothing."""

    def attend_rows(self, layer, q, rows, options):
        return q

    def attend_prompts(self, layer, q, new, prompts, options):
        return q


@dataclass(frozen=True)
class Products(Unwritten, Unattended):
    """Leaves the products with weights, and what stands between them."""


@dataclass(frozen=True)
class WrittenOut(SlotCache):
    """Scores written out in place of cuDNN's kernel."""

    def attend_rows(self, layer, q, rows, options):
        plain = Scoring("plain", *list(vars(options).values())[1:])
        return attend_last(q, *layer[0], rows.positions, plain)


WAYS = {
    "as it is": SlotCache,
    "no writes": Unwritten,
    "no attention": Unattended,
    "products only": Products,
    "scores written out": WrittenOut,
    "kernel": TritonCache,
    "kernel, single products": TritonCache,
    "kernel, int8": TritonCache,
    "kernel, float8": TritonCache,
}


def step_of(config, params, way, shape, batch, options, small_head=False):
    """A compiled step as a function without arguments; its cache is its own, and `batch` of its rows are sequences."""
    slots = max(shape.rows, 1)
    stored = way.removeprefix("kernel, ") if way.endswith("8") else config.dtype
    cache = WAYS[way]((slots,), options.max_len, stored)
    decoder = Decoder.of(config, cache)
    own = params["single" if way.endswith("single products") else "joined"]
    own = {**own, "head": own["head"][: options.small_head]} if small_head else own
    kinds = decoder.arrays()
    packed = shape.packed(0)
    rows, prompts = shape.unpack(packed)
    rng = np.random.default_rng(0)  # tokens as they come: over equal ones products run at a higher clock
    rows.at[:batch], rows.given[:batch] = options.context, rng.integers(0, config.vocab, batch)
    prompts.tokens[:], prompts.counts[:] = rng.integers(0, config.vocab, prompts.tokens.shape), shape.tokens
    prompts.slots[:] = 0
    last = jnp.zeros(slots, jnp.int32)
    function = jax.jit(partial(decoder.step, shape), donate_argnums=1)
    start = time.perf_counter()
    compiled = function.lower(own, kinds, last, packed).compile()
    compiled_s = time.perf_counter() - start
    state = []

    def run():
        if not state:
            state.append(jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds))
        arrays, scores, of_prompts = compiled(own, state.pop(), last, packed)
        state.append(arrays)
        return of_prompts if shape.prompts else scores

    return run, state, compiled_s


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-len", type=int, default=2176)
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64, 256])
    parser.add_argument("--small-head", type=int, default=128, help="rows of the head where the head is left out")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    path = Path(options.out) / "steps.jsonl"

    def report(**row):
        line = json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
        print(line, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    config = zoo.build(options.model, seq=options.max_len, layers=options.layers).config
    single = random_params(Decoder.of(config, SlotCache((1,), options.max_len, config.dtype)))
    params = {"single": single, "joined": join_products(jax.tree.map(lambda leaf: leaf, single))}
    report(machine=jax.devices()[0].device_kind, jax=jax.__version__, model=options.model, layers=options.layers)
    cases = []
    for batch in options.batches:
        shape = StepShape(batch, 0, 0, False, 0)
        cases += [(way, shape, batch, False) for way in WAYS] + [("as it is", shape, batch, True)]
    cases += [(way, StepShape(rows, 0, 0, False, 0), 1, False) for way in ("as it is", "kernel") for rows in (2, 8)]
    shape = StepShape(0, 1, options.chunk, True, 0)
    ways = ("as it is", "no writes", "no attention", "products only", "kernel, single products")
    cases += [(way, shape, 1, False) for way in ways] + [("as it is", shape, 1, True)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [
            pool.submit(step_of, config, params, way, shape, batch, options, small)
            for way, shape, batch, small in cases
        ]
        for (way, shape, batch, small), one in zip(cases, made, strict=True):
            run, state, compiled_s = one.result()
            seconds = timed(run, 20)
            state.clear()
            report(
                way="small head" if small else way,
                rows=shape.rows,
                batch=batch,
                prompt=shape.tokens,
                ms=1e3 * seconds,
                compiled_s=compiled_s,
            )
    for batch in options.batches:
        scores = jnp.asarray(np.random.default_rng(0).normal(size=(batch, config.vocab)), config.dtype)
        last, packed = jnp.zeros(batch, jnp.int32), Draw.blank(batch, batch)
        packed[:, 0] = np.arange(batch)
        for kind in Kind:
            compiled = jax.jit(partial(draw, kind, MOST_LOGPROBS)).lower(scores, last, packed).compile()
            seconds = timed(lambda run=compiled, s=scores, t=last, p=packed: run(s, t, p)[1], 50)
            report(way=f"draw {kind.name.lower()}", batch=batch, ms=1e3 * seconds)
    if jax.default_backend() == "gpu":
        for (way, shape, batch, small), one in zip(cases, made, strict=True):
            if way in ("kernel", "kernel, single products", "kernel, int8") and not small:
                run, state, _ = one.result()
                kernel_times(report, f"{way}: {batch} of {shape.rows} rows, {shape.tokens} tokens", run)
                state.clear()


if __name__ == "__main__":
    main()
