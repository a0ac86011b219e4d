"""Does the engine generate what transformers does: every family, every way to share devices, however prompts are cut?

    python benchmarks/serving_equality.py
    python benchmarks/serving_equality.py --families llama gpt2 --ways stages apart   # others stay

Eight virtual CPU devices, float32, greedy, 64 tokens. Each cell first generates one text after the other, with nothing
beside them, then six requests together in two slots, whose prompts begin like those before and so are found in the
cache. The references are those of `tests/hf/references`, made by transformers; of caches in 8 bits they are the texts
of one engine that computes each prompt at once. Nothing is tolerated: a cell says how
many texts are the same token by token. `results/serving-equality.jsonl` has a line for each cell, with how many tokens
of prompts were found in the cache and how many requests were preempted; the table is made of all lines.
"""

import argparse
import json
import os
import sys
import time
from functools import cache
from pathlib import Path

from report import RESULTS, table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.compiling import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {FLAGS}"
os.environ["MESHWRIGHT_MEASURE"] = "never"

import jax
from safetensors.numpy import load_file

import meshwright as mw

REFERENCES = Path(__file__).parents[1] / "tests" / "hf" / "references"
EXPERTS = ("mixtral", "qwen3-moe", "gpt-oss")
SHARED = mw.Manual({f"params/layers/*/{name}": jax.P("x") for name in ("gate", "up", "down")})
#: What `mw.get_model` is told, beside its sizes; the words end with the tokens of a chunk of prompts.
WAYS = {
    "pages, preempted, 1": {"cluster": "1x1 cpu", "chunk": 1, "blocks": 30},
    "pages, 32": {"cluster": "1x1 cpu", "chunk": 32},
    "slots, 5": {"cluster": "1x1 cpu", "chunk": 5, "cache": "slots"},
    "tensor, 8": {"cluster": "1x2 cpu", "method": "tensor"},
    "data, 8": {"cluster": "1x2 cpu", "method": "data"},
    "zero3 of 4, 8": {"cluster": "1x4 cpu", "method": "zero3"},
    "experts, 8": {"cluster": "1x2 cpu", "method": SHARED},
    "2 stages, 8": {"cluster": "1x2 cpu", "stages": 2},
    "2 replicas, 32": {"cluster": "1x2 cpu", "replicas": 2, "chunk": 32},
    "apart, 8": {"cluster": "1x2 cpu", "apart": (1, 1)},
}
#: The same in 8 bits, whose references are the texts that one engine with pages generates alone, prompts uncut.
SMALL = {
    "int8 pages, 5": {"cluster": "1x1 cpu", "chunk": 5},
    "int8 slots, 8": {"cluster": "1x1 cpu", "cache": "slots"},
    "int8 tensor, 8": {"cluster": "1x2 cpu", "method": "tensor"},
    "int8 2 stages, 8": {"cluster": "1x2 cpu", "stages": 2},
    "int8 apart, 8": {"cluster": "1x2 cpu", "apart": (1, 1)},
}
WAYS |= {name: way | {"cache_dtype": "int8"} for name, way in SMALL.items()}
LINES = RESULTS / "serving-equality.jsonl"


def cell(family, options):
    """How many texts are those of the reference, alone and together, and what happened to them."""
    tensors = load_file(REFERENCES / family / "reference.safetensors")
    whole = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    if "cache_dtype" in options:
        whole = in_small(family, whole, options["cache_dtype"])
    sizes = {"max_len": 96, "slots": 2, "chunk": 8} | ({} if options.get("cache") == "slots" else {"block_size": 4})
    with mw.get_model(REFERENCES / family, **sizes | options) as model:
        told = {"max_new_tokens": 64, "eos_token_id": ()}
        alone = [model.generate([text[:-64]], **told)[0] for text in whole]
        before = model.engine.stats().prefix_hits
        together = model.generate([text[:-64] for text in whole] * 3, **told)
        stats = model.engine.stats()
    pairs = list(zip([*alone, *together], whole * 4, strict=True))
    same = sum(row[: len(text)].tolist() == text for row, text in pairs)
    return {
        "same": same,
        "of": len(pairs),
        "found_alone": before,
        "found": stats.prefix_hits - before,
        "preemptions": stats.preemptions,
        "blocks_used": stats.blocks_used,
    }


@cache
def small_engine(family, dtype):
    """The engine whose texts are the references of caches in 8 bits."""
    sizes = {"max_len": 96, "slots": 1, "chunk": 32, "block_size": 4}
    return mw.get_model(REFERENCES / family, cluster="1x1 cpu", cache_dtype=dtype, **sizes)


def in_small(family, whole, dtype):
    """The texts of a family in 8 bits."""
    told, model = {"max_new_tokens": 64, "eos_token_id": ()}, small_engine(family, dtype)
    return [model.generate([text[:-64]], **told)[0].tolist() for text in whole]


def main():
    families = sorted(path.name for path in REFERENCES.iterdir())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=families)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--missing", action="store_true", help="only cells that no line has")
    options = parser.parse_args()
    rows = [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []
    cells = {(row["family"], row["way"]): row for row in rows}
    begun = time.perf_counter()
    for way in options.ways:
        for family in options.families:
            if (way.startswith("experts") and family not in EXPERTS) or (options.missing and (family, way) in cells):
                continue
            if time.perf_counter() - begun > options.seconds:
                break
            row = {"family": family, "way": way, **cell(family, WAYS[way])}
            print(json.dumps(row), flush=True)
            cells[family, way] = row
            LINES.write_text("".join(json.dumps(one) + "\n" for one in cells.values()))
    texts = [
        [
            family,
            *("" if (row := cells.get((family, way))) is None else f"{row['same']} of {row['of']}" for way in WAYS),
        ]
        for family in families
    ]
    question = (
        "Texts of 64 greedy tokens that are those of transformers, in float32 on virtual CPU devices, by family and by "
        "way: the cache or the split, and the tokens of a chunk of prompts. Two texts of each cell are computed alone, "
        "six together in two slots. "
        f"Tokens of prompts found in the cache: {sum(row['found'] for row in cells.values()):,}; "
        f"requests preempted: {sum(row['preemptions'] for row in cells.values())}; "
        f"blocks still taken at the ends: {sum(row['blocks_used'] for row in cells.values())}."
    )
    table("Serving equality", question, ("family", *WAYS), texts)


if __name__ == "__main__":
    main()
