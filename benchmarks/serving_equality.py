"""Does the engine generate what transformers does: every family, every way to share devices, however prompts are cut?

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/serving_equality.py
    … --families llama gpt2 --ways stages apart

Eight virtual CPU devices, float32, greedy. Each cell generates 64 tokens for six requests, whose prompts begin alike in
pairs, in two slots. The references are those of `tests/hf/references`. Prints a row for each cell, with how many tokens
of prompts were found in the cache and how many requests were preempted, then the table. Nothing is tolerated.
"""

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from safetensors.numpy import load_file

import meshwright as mw

REFERENCES = Path(__file__).parents[1] / "tests" / "hf" / "references"
EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss")
SHARED = mw.Manual({f"params/layers/*/{name}": jax.P("x") for name in ("gate", "up", "down")})
#: What `mw.get_model` is told, beside its sizes.
WAYS = {
    "stages": {"cluster": "1x2 cpu", "stages": 2},
    "tensor": {"cluster": "1x2 cpu", "method": "tensor"},
    "preempted, chunks of 1": {"cluster": "1x1 cpu", "chunk": 1, "blocks": 30},
    "slots, chunks of 5": {"cluster": "1x1 cpu", "chunk": 5, "cache": "slots"},
    "apart": {"cluster": "1x2 cpu", "apart": (1, 1)},
    "data": {"cluster": "1x2 cpu", "method": "data"},
    "weights split": {"cluster": "1x4 cpu", "method": "zero3"},
    "experts": {"cluster": "1x2 cpu", "method": SHARED},
    "replicas, chunks of 32": {"cluster": "1x2 cpu", "replicas": 2, "chunk": 32},
}


def cell(family, options):
    """How many of six texts are those of the reference, and what happened to them."""
    tensors = load_file(REFERENCES / family / "reference.safetensors")
    whole = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    sizes = {"max_len": 96, "slots": 2, "chunk": 8} | ({} if options.get("cache") == "slots" else {"block_size": 4})
    with mw.get_model(REFERENCES / family, **sizes | options) as model:
        out = model.generate([text[:-64] for text in whole] * 3, max_new_tokens=64, eos_token_id=())
        stats = model.engine.stats()
    same = sum(row[: len(text)].tolist() == text for row, text in zip(out, whole * 3, strict=True))
    return {"same": same, "of": 3 * len(whole), "prefix_hits": stats.prefix_hits, "preemptions": stats.preemptions}


def main():
    families = sorted(path.name for path in REFERENCES.iterdir())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=families)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    table = {}
    for way in options.ways:
        for family in options.families:
            if way == "experts" and family not in EXPERTS:
                continue
            start = time.perf_counter()
            row = cell(family, WAYS[way])
            table[family, way] = row
            line = json.dumps({"family": family, "way": way, **row, "seconds": round(time.perf_counter() - start, 1)})
            print(line, flush=True)
            with (Path(options.out) / "serving-equality.jsonl").open("a") as file:
                file.write(line + "\n")
    print(f"| | {' | '.join(options.ways)} |\n|---|{'---|' * len(options.ways)}")
    for family in options.families:
        rows = [table.get((family, way)) for way in options.ways]
        cells = ["" if row is None else "{same} of {of}".format(**row) for row in rows]
        print(f"| {family} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
