"""How many numbers of rows should steps be compiled for? What padding to the next one costs, by the engine's prices.

    python benchmarks/serving_rungs.py

A step of n sequences at a context of 1,024 is priced with n rows and with those of the next rung, of which the others
are idle: they cost the products with weights and the draw, and nothing of attention. Each cell is the mean and the
largest extra time over all n, and the number of rungs. `row_ladder` of `serving/scheduling/limits.py` follows from it.
"""

import statistics

from report import table

import meshwright as mw
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.engine_constants import find_engine
from meshwright.serving.planning.prices import StepPrices
from meshwright.serving.planning.split import Degrees, Storage

CONTEXT = 1024
#: Model, chip, devices and slots.
CASES = [
    ("llama3-8b", "h200", 1, 256),
    ("llama3-8b", "h200", 1, 1024),
    ("llama3-8b", "a100-80gb", 1, 256),
    ("llama3-70b", "h200", 4, 256),
    ("qwen3-30b-a3b", "h200", 1, 256),
    ("gpt-oss-20b", "h100", 1, 256),
    ("gemma3-1b", "h200", 1, 256),
    ("qwen3-8b", "tpu-v6e", 1, 128),
]
#: Up to how many rows rungs are how far apart, and how far beyond.
LADDERS = {
    "2 apart": (1, 2, 2),
    "4 apart": (1, 4, 4),
    "8 apart to 8, then 2": (8, 8, 2),
    "8 apart to 64, then 2": (64, 8, 2),
    "8 apart to 64, then 4": (64, 8, 4),
    "64, then 2": (64, 64, 2),
}


def ladder(few, few_apart, many_apart, slots):
    """As `row_ladder`, with other numbers."""
    steps = [1]
    while (following := steps[-1] * (few_apart if steps[-1] < few else many_apart)) < slots:
        steps.append(following)
    return (*steps, slots)


def main():
    lines, means = [], {name: [] for name in LADDERS}
    for model, chip, devices, slots in CASES:
        work, machines = decoder_work(model), mw.cluster(f"1x8 {chip}")
        prices = StepPrices(work, machines, Degrees(devices), Storage(), find_engine("meshwright"))
        cells = []
        for name, numbers in LADDERS.items():
            rungs, extra = ladder(*numbers, slots), []
            for rows in range(1, slots + 1):
                padded = next(rung for rung in rungs if rung >= rows)
                cached = rows * CONTEXT
                extra.append(prices.step_s(padded, padded, cached, 0) / prices.step_s(rows, rows, cached, 0) - 1)
            means[name].append(statistics.mean(extra))
            cells.append(f"{means[name][-1]:.1%}, at most {max(extra):.0%}, {len(rungs)}")
        lines.append([f"{model}, {devices} × {chip}, {slots} slots", *cells])
    lines.append(["mean", *(f"{statistics.mean(values):.1%}" for values in means.values())])
    question = (
        "What padding steps to the next number of rows costs: in the mean over all numbers, at most, and the rungs"
    )
    table("Serving rungs", question, ("model", *LADDERS), lines)


if __name__ == "__main__":
    main()
