"""Does any block of the cache stay taken after random admissions, cancellations and preemptions? On any machine.

python benchmarks/serving_leaks.py                 # 10,000 random requests to a tiny model with a small cache
"""

import argparse
import os
import random
from collections import Counter

from serving import Report, random_params

from meshwright import zoo
from meshwright.serving.engine import Engine
from meshwright.serving.models import Decoder, PagedCache
from meshwright.serving.requests import Overloaded, Sampling
from meshwright.serving.scheduling import Limits


def leaks(report, requests):
    """Rows of how requests ended, and at last of the blocks that are still taken."""
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
            report(requests=number + 1, preemptions=stats.preemptions, prefix_hits=stats.prefix_hits)
    ended = engine.drain(60)
    stats = engine.stats()
    report(requests=requests, ended=ended, blocks_used=stats.blocks_used, blocks=stats.blocks, **ends)
    engine.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    options = parser.parse_args()
    leaks(Report(options.out), options.requests)


if __name__ == "__main__":
    main()
