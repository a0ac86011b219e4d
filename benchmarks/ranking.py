"""Is any named method, recipe of stages or restricted search quicker than `Auto`, as simulated?

Models of the zoo on eight clusters. Every method plans alone, by `mw.plan`, as a user would ask. A step within 1%
counts as equal: of such plans the simplest is taken.

    python benchmarks/ranking.py [WORD …] [--jobs 1] [--seconds 3600]    # the cases with these words; others are kept
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import sliced_table

CLUSTERS = (
    "1x4 h100",
    "1x8 h100",
    "4x8 h100",
    "2x8 h200",
    "4x4 a100-40gb",
    "2x8 a100-80gb",
    "2x8 v100-32gb",
    "1x8 l40s",
)
MODELS = (
    ("gpt-tiny", {}),
    ("mlp", {"batch": 512}),
    ("gpt3-1.3b", {"layers": 2, "batch": 128, "seq": 1024}),
    ("llama2-7b", {"layers": 2, "batch": 64, "seq": 2048}),
    ("vit-l16", {"layers": 2, "batch": 512}),
    ("bert-large", {"layers": 2, "batch": 128, "seq": 512}),
    ("mixtral-8x7b", {"layers": 1, "batch": 64, "seq": 1024}),
    ("wide-resnet-tiny", {"batch": 128}),
)
COLUMNS = ("case", "Auto ms", "its plan", "best other", "ms", "Auto ÷ best other", "")


def compared(model: str, options: dict, description: str) -> list[str]:
    """A row: the step of `Auto`, and the quickest of all others."""
    import meshwright as mw
    from meshwright import zoo
    from meshwright.parallelism.sentence import plain_sentence
    from meshwright.planner.methods import NAMED
    from meshwright.step_search.ranking import NEARLY

    example, machine = zoo.build(model, **options), mw.cluster(description)
    count = machine.num_devices
    parts = [(stages, tensor) for stages in (2, 4) for tensor in (1, 2) if count % (stages * tensor) == 0]
    recipes = [mw.ThreeD(data=count // (p * t), tensor=t, pipeline=p) for p, t in parts]
    groups = [mw.Zero(3, group=machine.devices_per_host)] if machine.num_hosts > 1 else []
    others = [*NAMED, *groups, mw.Auto(microbatches=1), mw.Auto(microbatches=2), mw.Auto(pipeline=False), *recipes]
    steps = {}
    for method in (mw.Auto(), *others):
        try:
            plan = mw.plan(
                example.train_step,
                example.state,
                example.batch,
                cluster=machine,
                method=method,
                on_progress=lambda _: None,
            )
        except (mw.DoesNotFit, mw.ShardingError):
            continue
        steps[repr(method)] = plan
    auto = steps.pop(repr(mw.Auto()), None)
    name = _name(model, options, description)
    if auto is None or not steps:
        return [name, "–", "does not fit", "–", "–", "–", ""]
    best = min(steps, key=lambda key: steps[key].step_s)
    ratio = auto.step_s / steps[best].step_s
    figures = (f"{1e3 * auto.step_s:.3f}", plain_sentence(auto), best, f"{1e3 * steps[best].step_s:.3f}")
    return [name, *figures, f"{ratio:.3f}", "slower" if ratio > 1 + NEARLY else ""]


def _name(model: str, options: dict, description: str) -> str:
    return " ".join([model, *(f"{key}={value}" for key, value in options.items())]) + f", {description}"


def main() -> None:
    """Compares the cases, each in a process of its own."""
    cases = {_name(*case): case for case in ((*model, cluster) for model in MODELS for cluster in CLUSTERS)}
    sliced_table("Ranking", __doc__ or "", COLUMNS, compared, cases)


if __name__ == "__main__":
    main()
