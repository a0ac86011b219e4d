"""What do caches of 8 bits do to answers? Small models of every family, against a cache of their own type.

    python benchmarks/serving_cache.py
    python benchmarks/serving_cache.py --families llama gpt-oss

The models are those of `tests/hf/references`, in float32: two texts each, of which 64 tokens were generated greedily by
transformers. Engines score each of these tokens after all before it, from blocks that earlier chunks have filled; a row
says how far the logarithm of the likeliest token's probability is off, how often another token is the likeliest, and
how many greedy tokens are the same before the first other one. The models have random weights, whose scores lie closer
together than those of trained ones, so that more tokens change than a user will see.
"""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.compiling import FLAGS

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ["MESHWRIGHT_MEASURE"] = "never"

import numpy as np
from report import table
from safetensors.numpy import load_file

import meshwright as mw
from meshwright.serving.engine import Engine
from meshwright.serving.models import PagedCache
from meshwright.serving.requests import Sampling
from meshwright.serving.scheduling import Limits

REFERENCES = Path(__file__).parents[1] / "tests" / "hf" / "references"
TOKENS, LENGTH, BLOCKS, CHUNK = 64, 96, 240, 8
HEADER = ("family", "cache", "logprob off, mean", "worst", "another token is likeliest", "same before another")


def generated(folder, texts, dtype):
    """What greedy texts are, and the likeliest token with its logarithm of probability at each place of the texts."""
    model = mw.hf.load(folder)
    cache = PagedCache(BLOCKS, 4, dtype)
    limits = Limits(4, 4, BLOCKS, CHUNK, CHUNK + 4, 1000, LENGTH)
    engine = Engine(model.config, model.params, limits, cache, lengths=[CHUNK])
    greedy, one = Sampling(TOKENS, temperature=0.0), Sampling(1, temperature=0.0, logprobs=1)
    out = [engine.submit(text[:-TOKENS], greedy) for text in texts]
    places = [text[:end] for text in texts for end in range(len(text) - TOKENS, len(text))]
    tops = [engine.submit(place, one) for place in places]
    found = [[token.id for token in handle] for handle in out], [next(iter(handle)).top[0] for handle in tops]
    engine.close()
    return found


def rows_of(folder):
    tensors = load_file(folder / "reference.safetensors")
    texts = [tensors[key].tolist() for key in sorted(tensors) if key.startswith("text")]
    _, exact = generated(folder, texts, "float32")
    for dtype in ("int8", "float8"):
        out, tops = generated(folder, texts, dtype)
        pairs = list(zip(tops, exact, strict=True))
        off = [abs(one[1] - other[1]) for one, other in pairs if one[0] == other[0]]
        others = len(pairs) - len(off)
        same = [
            next((n for n in range(TOKENS) if row[n] != text[n - TOKENS]), TOKENS)
            for row, text in zip(out, texts, strict=True)
        ]
        told = " and ".join(map(str, same))
        yield [folder.name, dtype, f"{np.mean(off):.4f}", f"{max(off):.4f}", f"{others} of {len(pairs)}", told]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=sorted(path.name for path in REFERENCES.iterdir()))
    rows = []
    for family in parser.parse_args().families:
        for row in rows_of(REFERENCES / family):
            print(*row, flush=True)
            rows.append(row)
    question = (
        "What do caches of 8 bits do to answers? Two texts of 64 tokens a family, random weights, float32 otherwise."
    )
    table("Serving cache", question, HEADER, rows)


if __name__ == "__main__":
    main()
