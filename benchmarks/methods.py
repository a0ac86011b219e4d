"""What do the named methods cost against Auto, by the same model, over the zoo and several clusters?"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.planner import Method

METHODS: list[Method] = [mw.DataParallel(), mw.Zero(1), mw.Zero(2), mw.Zero(3), mw.TensorParallel()]
JOBS = [
    # model, options, cluster
    ("gpt3-1.3b", {"batch": 64, "seq": 1024, "layers": 4}, "2x8 v100-32gb"),
    ("llama2-7b", {"batch": 64, "seq": 2048, "layers": 4, "checkpoint": True}, "8x8 h100"),
    ("llama3-70b", {"batch": 64, "seq": 4096, "layers": 2, "checkpoint": True}, "4x8 h200"),
    ("gshard-moe-2.4b", {"batch": 64, "seq": 1024, "layers": 4}, "2x8 v100-32gb"),
    ("mixtral-8x7b", {"batch": 32, "seq": 2048, "layers": 2}, "4x8 a100-80gb"),
    ("bert-large", {"batch": 128, "seq": 512, "layers": 4}, "4x4 a100-40gb"),
    ("wide-resnet-250m", {"batch": 256}, "1x8 v100-32gb"),
    ("vit-l16", {"batch": 256, "layers": 4}, "1x8 h100"),
]


def main() -> None:
    rows = []
    for model, options, cluster in JOBS:
        example = zoo.build(model, **options)
        best = mw.plan(example.train_step, example.state, example.batch, cluster=cluster)
        cells = [f"{best.step_s * 1e3:.1f} ms on {'×'.join(map(str, best.mesh.sizes))}"]
        for method in METHODS:
            try:
                plan = mw.plan(example.train_step, example.state, example.batch, cluster=cluster, method=method)
                cells.append(f"{plan.step_s / best.step_s:.2f}×")
            except mw.DoesNotFit:
                cells.append("does not fit")
            except mw.ShardingError:
                cells.append("not even")
        rows.append((model, cluster, *cells))
    table("Methods", __doc__ or "", ("model", "cluster", "Auto", *(m.name for m in METHODS)), rows)


if __name__ == "__main__":
    main()
