"""Are blocks found in any model, do segments not depend on depth, and does a profile of few layers serve many?

`blocks` counts the blocks of a layer and compares 8 with 80 layers. `hits` plans models of 2 and of 8 layers for eight
devices and says how much of the deeper plan's compute consists of parts, under shardings, that the shallow one has:
that share needs no measurement. `enumerate` measures combinations of a segment's strategies (a random sample) on eight
virtual CPU devices, each in five rounds for the profile and, in turn, five for the kernel time, and says how well the
bytes sent, the planner's price and the profile predict the kernel time, by rank, and what choosing by each costs.

`plans` plans models for the same eight devices by the model and by measurement (`mw.Auto(profile=True)`) and runs both
plans, and a second copy of the model's plan, in turn. The ratio is the median over rounds of one plan's step time
divided by the other's in the same round. The noise is the largest departure from 1 within the 95% bootstrap interval of
the same median for the two copies of one plan. `wrong` does the same with a model that is wrong: it takes collectives
to be 50 times as fast as they are.

python benchmarks/profile.py [blocks] [hits] [enumerate] [plans] [wrong] [MODEL ...]
"""

import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent))
from report import RESULTS, table

sys.path.pop(0)  # this file has the name of a module of Python's own
sys.path[:] = [place for place in sys.path if Path(place).resolve() != Path(__file__).parent.resolve()]

import numpy as np

import meshwright as mw
from meshwright import zoo
from meshwright.hardware import Cluster
from meshwright.rehearsal.parts import parts_of
from meshwright.rehearsal.whole_steps import Step

LAYERS = {
    "gpt3-1.3b": "4",
    "llama2-7b": "4",
    "bert-large": "4",
    "gshard-moe-2.4b": "5 and 4",
    "mixtral-8x7b": "-",
    "wide-resnet-50-2": "53 convolutions and a head",
    "unet-cifar10": "-",
    "vit-l16": "-",
}
HITS = ("gpt2-125m", "llama-tiny", "bert-tiny", "moe-tiny")
ENUMERATED = (
    ("gpt-tiny", {"batch": 32, "seq": 64, "layers": 2}, 1, 48),
    ("moe-tiny", {"batch": 64, "seq": 64, "layers": 4, "experts": 8}, 1, 72),
)
PLANS = {
    "mlp": {"batch": 512},
    "gpt-tiny": {"batch": 32},
    "moe-tiny": {"batch": 32},
    "wide-resnet-tiny": {"batch": 32},
}
PROFILE_S = 40  # of each model
ROUNDS = 150
WRONG = 50


def blocks_rows() -> None:
    """Blocks of one layer, and segments of 8 and of 80 layers."""
    header = ("model", "blocks a layer", "wanted", "search space", "unique segments", "alike at 8 and 80", "the deeper")
    rows = []
    for name, expected in LAYERS.items():
        deep = name not in ("wide-resnet-50-2", "unet-cifar10")
        found, seconds = [], 0.0
        for layers in (8, 80) if deep else (None,):
            model = zoo.build(name, layers=layers)
            started = time.perf_counter()
            found.append(mw.find_blocks(model.train_step, model.state, model.batch))
            seconds = time.perf_counter() - started
        segment = max(found[0].segments, key=lambda s: len(s.occurrences) * len(s.blocks))
        alike = len(found) == 1 or [s.fingerprint for s in found[0].segments] == [
            s.fingerprint for s in found[1].segments
        ]
        blocks = len(segment.blocks) if deep else len(found[0].blocks)
        counts = " and ".join(str(len(one.segments)) for one in found)
        rows.append((name, blocks, expected, segment.space, counts, "yes" if alike else "no", f"{seconds:.1f} s"))
        table("Profile blocks", __doc__ or "", header, rows)


def hits_rows() -> None:
    """The share of a deeper plan's compute whose parts a shallow plan has."""
    rows = []
    for name in HITS:
        known: set[tuple[str, str]] = set()
        for layers in (2, 4, 8):
            layers = 2 * layers if name == "moe-tiny" else layers
            model = zoo.build(name, layers=layers, batch=32)
            plan = mw.plan(model.train_step, model.state, model.batch, cluster="1x8 h200", mesh=(8,))
            parts = [part for part in parts_of(plan, plan.origin.graph) if part.is_segment]
            total = sum(p.count * p.modelled_s for p in parts)
            hit = sum(p.count * p.modelled_s for p in parts if (p.fingerprint, p.shardings) in known)
            rows.append((name, layers, len(parts), f"{hit / total:.1%}" if known else "first"))
            known |= {(p.fingerprint, p.shardings) for p in parts}
    table("Profile hits", __doc__ or "", ("model", "layers", "parts", "compute known from fewer layers"), rows)


def enumerate_rows() -> None:
    """Rank correlations and regrets over the combinations of a segment."""
    from meshwright.passes.enumeration import PREDICTORS, enumerate_segment, write_page
    from meshwright.profiler.measurements import open_database

    os.environ["MESHWRIGHT_MEASURE"] = os.environ.get("MESHWRIGHT_MEASURE", "once")
    rows = []
    for name, sizes, segment, sample in ENUMERATED:
        if not _is_wanted(name):
            continue
        model = zoo.build(name, **sizes)
        with open_database() as database:
            found = enumerate_segment(
                model.train_step,
                model.state,
                model.batch,
                segment=segment,
                cluster=mw.cluster("local"),
                database=database,
                sample=sample,
                model=name,
                say=lambda text: print(text, file=sys.stderr),
            )
        write_page(found, RESULTS / f"enumeration-{name}.html")
        for predictor, words in PREDICTORS.items():
            figures = f"{found.correlation(predictor):.3f}", f"{found.regret(predictor):.1%}"
            rows.append((name, found.space, len(found.rows), words, *figures, f"{found.seconds:.0f}"))
        header = ("model", "search space", "measured", "predictor", "rank correlation", "regret", "s")
        table("Profile enumeration", __doc__ or "", header, rows)


def plans_rows() -> None:
    """Steps of plans by the model and by measurement."""
    _compare("Profile plans", mw.cluster("local"))


def wrong_rows() -> None:
    """The same with a model that prices collectives too low."""
    known = mw.cluster("local")
    intra = replace(
        known.intra,
        bandwidth=WRONG * known.intra.bandwidth,
        timings=tuple(replace(t, alpha_s=t.alpha_s / WRONG, beta_s=t.beta_s / WRONG) for t in known.intra.timings),
    )
    host = replace(known.host, intra=intra)
    _compare("Profile plans of a wrong model", replace(known, host=host, chip=replace(known.chip, intra=intra)))


def _compare(title: str, cluster: Cluster) -> None:
    header = ("model", "model's plan, ms", "measured plan, ms", "ratio", "noise", "slower by more than noise", "s", "")
    rows = []
    for name, sizes in PLANS.items():
        if not _is_wanted(name):
            continue
        os.environ["MESHWRIGHT_CACHE"] = tempfile.mkdtemp()
        model = zoo.build(name, **sizes)
        args = (model.train_step, model.state, model.batch)
        modelled = mw.plan(*args, cluster=cluster)
        started = time.perf_counter()
        measured = mw.plan(*args, cluster=cluster, method=mw.Auto(profile=True, profile_seconds=PROFILE_S))
        took = time.perf_counter() - started
        times = _rounds([Step(plan, measured.origin) for plan in (modelled, measured, modelled)])
        ratio, noise = float(np.median(times[1] / times[0])), _noise(times[2] / times[0])
        same = "the same plan" if measured.ops == modelled.ops else f"{modelled.verdict} → {measured.verdict}"
        figures = f"{ratio:.3f}", f"{noise:.3f}", "yes" if ratio > 1 + noise else "no"
        milliseconds = [f"{1e3 * np.median(times[number]):.2f}" for number in (0, 1)]
        rows.append((name, *milliseconds, *figures, f"{took:.0f}", f"{same}. {measured.provenance.get('profile', '')}"))
        table(title, __doc__ or "", header, rows)


def _rounds(steps: list[Step]) -> np.ndarray:
    """Seconds of each step in each round; every other round runs them in the opposite order."""
    found = np.zeros((len(steps), ROUNDS))
    for number in range(ROUNDS):
        order = range(len(steps)) if number % 2 else reversed(range(len(steps)))
        for place in order:
            found[place, number] = steps[place].time()
    return found


def _noise(ratios: np.ndarray) -> float:
    """The largest departure from 1 in the 95% bootstrap interval of a median."""
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    return float(max(abs(np.quantile(np.median(drawn, axis=1), (0.025, 0.975)) - 1)))


PARTS = {
    "blocks": blocks_rows,
    "hits": hits_rows,
    "enumerate": enumerate_rows,
    "plans": plans_rows,
    "wrong": wrong_rows,
}


def _is_wanted(model: str) -> bool:
    """Whether a model is among those of the command line, if any is named there."""
    named = [word for word in sys.argv[1:] if word not in PARTS]
    return not named or model in named


def main() -> None:
    for name in [word for word in sys.argv[1:] if word in PARTS] or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
