"""How should the last token of each running sequence be kept and mixed on a GPU? Layers of attention by themselves.

    python benchmarks/serving_attention.py                    # on an H200 about two minutes
    python benchmarks/serving_attention.py --tilings          # the kernel's own, each cut up otherwise as well
    python benchmarks/serving_attention.py --interpret        # tries it on a CPU, with small shapes

Heads are those of Llama-3-8B, gpt-oss, Qwen2-7B, Gemma-7B and Llama-2-7B. Ways are cuDNN's kernel over lengths after a
scatter of keys and values, the scores written out after the same, and the Triton kernel of `serving/models/triton.py`;
`floor` is the time to read the keys and values once. All ways are first held against the scores written out in float32.
"""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from serving import timed

from meshwright.serving.models import SlotCache
from meshwright.serving.models.attention import Scoring
from meshwright.serving.models.triton import Tiling, attend_and_keep
from meshwright.serving.models.work import Running
from meshwright.zoo.attention import attend_cached

HEADS = {
    "llama3-8b": (32, 8, 128),
    "gpt-oss": (64, 8, 64),
    "qwen2-7b": (28, 4, 128),
    "gemma-7b": (16, 16, 256),
    "llama2-7b": (32, 32, 128),
}
OTHERWISE = {
    "programs": (132, 264, 1024),
    "numbers": (4096, 16384),
    "warps": (2, 8),
    "stages": (3, 4),
}
MOST_BYTES = 12e9


def of_slots(kind, q, new, cache, at, options):
    rows = Running(at, at, jnp.arange(len(at)), jnp.zeros((len(at), 0), jnp.int32))
    slots = SlotCache((len(at),), cache[0].shape[1], "bfloat16")
    mixed, (cache,) = slots.mix_rows((cache,), q, new, rows, replace(options, kind=kind))
    return mixed, cache


def ways(interpret, tilings):
    """The ways by name."""
    found = {"written out": partial(of_slots, "plain")}
    if not interpret:
        found["cudnn"] = partial(of_slots, None)
    found["kernel"] = partial(attend_and_keep, interpret=interpret)
    if tilings:
        for name, values in OTHERWISE.items():
            for value in values:
                tiling = replace(Tiling(), **{name: value})
                found[f"kernel, {name}={value}"] = partial(attend_and_keep, tiling=tiling, interpret=interpret)
    return found


def drawn(shape, batch, length):
    """Queries, new keys and values, and a cache."""
    (heads, kv_heads, width), keys = shape, jax.random.split(jax.random.key(0), 3)
    q, new = jax.random.normal(keys[0], (batch, heads, width)), jax.random.normal(keys[1], (2, batch, kv_heads, width))
    cache = jax.random.normal(keys[2], (2, batch, length, kv_heads, width), jnp.bfloat16)
    return q.astype(jnp.bfloat16), tuple(new.astype(jnp.bfloat16)), tuple(cache)


def agreement(report, heads, interpret):
    """The largest difference of each way to the scores written out in float32, at contexts of all lengths."""
    for name in heads:
        shape = HEADS[name]
        for window, cap, sinks in ((None, None, False), (128, None, True), (None, 30.0, False)):
            batch, length = 8, 256 if interpret else 3000
            q, new, cache = drawn(shape, batch, length)
            at = np.random.default_rng(0).integers(0, length, batch).astype(np.int32)
            at[0], at[1], at[2] = length - 1, 0, -1
            of_sinks = jax.random.normal(jax.random.key(1), shape[:1]) if sinks else None
            options = Scoring(None, window, shape[2] ** -0.5, of_sinks, cap)
            lines, alive = np.arange(batch)[at >= 0], at >= 0
            k, v = (one.at[lines, at[alive]].set(n[alive]) for one, n in zip(cache, new, strict=True))
            exact = attend_cached(
                *(one.astype(jnp.float32) for one in (q[:, None], k, v)),
                jnp.maximum(at, 0)[:, None],
                **{key: value for key, value in vars(options).items() if key != "kind"},
            )[:, 0]
            for way, run in ways(interpret, False).items():
                mixed, kept = jax.jit(partial(run, options=options))(q, new, cache, jnp.asarray(at))
                same = all(bool((a == b).all()) for a, b in zip(kept, (k, v), strict=True))
                gap = float(jnp.abs(mixed.astype(jnp.float32) - exact)[alive].max())
                finite = bool(jnp.isfinite(mixed.astype(jnp.float32)).all())
                plain = window is None and cap is None
                report(heads=name, plain=plain, way=way, largest_difference=gap, kept_alike=same, finite=finite)


def layers_of(run, options, layers):
    """So many layers one after the other, each with a cache of its own."""

    def chain(caches, q, new, at):
        kept = []
        for cache in caches:
            q, cache = run(q, new, cache, at, options)
            kept.append(cache)
        return kept, q

    return jax.jit(chain, donate_argnums=0)


def measured(report, case, way, compiled_layers):
    name, shape, batch, context, layers, length = case
    q, new, cache = drawn(shape, batch, length)
    state = [[tuple(jnp.copy(one) for one in cache) for _ in range(layers)]]
    at = jnp.full(batch, context, jnp.int32)

    def step():
        kept, mixed = compiled_layers(state.pop(), q, new, at)
        state.append(kept)
        return mixed

    seconds = timed(step, 20) / layers
    num_bytes = 2 * 2 * batch * (context + 1) * shape[1] * shape[2]
    rate = num_bytes / seconds
    report(heads=name, batch=batch, context=context, way=way, us=1e6 * seconds, terabytes_per_s=1e-12 * rate)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tilings", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--heads", nargs="*", default=list(HEADS))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 64, 256])
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    path = Path(options.out) / "attention.jsonl"

    def report(**row):
        line = json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()})
        print(line, flush=True)
        with path.open("a") as file:
            file.write(line + "\n")

    report(machine=jax.devices()[0].device_kind, jax=jax.__version__)
    agreement(report, options.heads, options.interpret)
    cases = []
    for name in options.heads:
        for context in options.contexts:
            for batch in options.batches:
                length = context + 128
                of_layer = 4 * batch * length * HEADS[name][1] * HEADS[name][2]
                if 2 * of_layer <= MOST_BYTES:
                    layers = int(min(16, MOST_BYTES // of_layer))
                    cases.append((name, HEADS[name], batch, context, layers, length))

    def compiled(case, run):
        _, (heads, kv_heads, width), batch, _, layers, length = case
        bf16 = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
        new = bf16((batch, kv_heads, width))
        caches = [(bf16((batch, length, kv_heads, width)),) * 2] * layers
        scoring = Scoring(None, None, width**-0.5, None, None)
        at = jax.ShapeDtypeStruct((batch,), jnp.int32)
        return layers_of(run, scoring, layers).lower(caches, bf16((batch, heads, width)), (new, new), at).compile()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        pending = [
            (case, way, pool.submit(compiled, case, run))
            for case in cases
            for way, run in ways(options.interpret, options.tilings).items()
        ]
    # Nothing is measured while anything compiles: a host that is busy calls short kernels too late.
    for case, way, made in pending:
        try:
            measured(report, case, way, made.result())
        except jax.errors.JaxRuntimeError as error:  # such as more shared memory than there is
            report(heads=case[0], batch=case[2], context=case[3], way=way, failed=str(error)[:200])


if __name__ == "__main__":
    main()
