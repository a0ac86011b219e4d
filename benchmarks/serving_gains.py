"""When does it pay to compute prompts and answers apart, and several models on shared devices? Simulated goodput.

The first table plans each case together and apart, and has the ratio of what they carry; the second places models on
groups of devices, against plain replication, in which each device is one model's.

    python benchmarks/serving_gains.py
"""

import os

os.environ["MESHWRIGHT_MEASURE"] = "never"

from report import table

import meshwright as mw

#: Model, type of weights, machines, tokens in and out, promised seconds to the first token and for later ones.
CASES = (
    ("llama3-70b", "float8", "1x8 h100", (500, 1500), (100, 500), 0.5, 0.03),
    ("llama3-70b", "float8", "1x8 h100", (2000, 6000), (50, 150), 1.0, 0.025),
    ("llama3-70b", "bfloat16", "1x8 h200", (1000, 3000), (100, 300), 0.6, 0.03),
    ("llama3-8b", "bfloat16", "1x8 h200", (500, 1500), (100, 500), 0.5, 0.03),
    ("llama3-8b", "bfloat16", "1x8 h100", 4000, 100, 0.5, 0.012),
    ("llama3-8b", "bfloat16", "1x8 h100", 200, 500, 2.0, 0.1),
)
#: Number of models, model, machines, burstiness, share of requests and promised seconds to the first token.
TOGETHER = (
    (8, "llama2-13b", "1x8 a100-40gb", 4.0, 0.9, 0.5),
    (8, "llama2-13b", "1x8 a100-40gb", 6.0, 0.9, 0.7),
    (8, "llama3-8b", "1x8 l40s", 4.0, 0.9, 0.5),
    (8, "llama2-13b", "1x8 a100-40gb", 1.0, 0.9, 0.5),
)


def apart_or_together() -> list[list[str]]:
    """A row for each case, planned both ways."""
    rows = []
    for model, weights, machines, into, out, ttft_s, tpot_s in CASES:
        load = mw.Traffic(rate=10, tokens_in=into, tokens_out=out)
        plan = mw.plan_serving(model, machines, load, mw.Slo(ttft_s, tpot_s, 0.9), weights=weights)
        gain = plan.gain_of_parting
        verdict = "one of both is not possible" if gain is None else "apart" if plan.chosen.apart else "together"
        case = f"{model} {weights}, {machines}, {load.mean_in:g} in, {load.mean_out:g} out"
        promise, ratio = f"{ttft_s:g} s, {tpot_s * 1e3:g} ms", "" if gain is None else f"{gain:.2f}"
        rows.append([case, promise, f"{plan.goodput:.3g}", f"{plan.bound:.3g}", ratio, f"{verdict}: {plan.chosen}"])
    return rows


def models_on_groups() -> list[list[str]]:
    """A row for each case, placed jointly and replicated."""
    rows = []
    for count, model, machines, burstiness, share, ttft_s in TOGETHER:
        shape = {"rate": 0.5, "tokens_in": (256, 768), "tokens_out": (1, 3), "burstiness": burstiness}
        loads = {f"{model}#{n}": mw.Traffic(**shape, seed=n) for n in range(count)}
        plan = mw.place_models(loads, machines, mw.Slo(ttft_s=ttft_s, percentile=share))
        case = f"{count} × {model}, {machines}, burstiness {burstiness:g}, {share:.0%} within {ttft_s:g} s"
        groups = f"{len(plan.chosen.groups)} × {plan.chosen.size}"
        plain = f"{plan.rate * plan.plain.scale:.3g}"
        rows.append([case, f"{plan.goodput:.3g}", plain, f"{plan.gain:.1f}", groups])
    return rows


if __name__ == "__main__":
    header = ("case", "promise to 90%", "requests/s", "bound", "apart ÷ together", "chosen")
    table("Serving apart", "When does it pay to compute prompts and answers apart?", header, apart_or_together())
    header = ("case", "requests/s", "plain replication", "ratio", "groups")
    table("Serving several models", "What do several models carry on shared devices?", header, models_on_groups())
