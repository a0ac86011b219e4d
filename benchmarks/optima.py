"""Are the known optima reached? A 6-layer MLP with bias and Adam on abstract meshes, and GShard's experts."""

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

import meshwright as mw
from meshwright import zoo


def all_reduce(num_bytes: float, size: int, alpha: float = 1.0, beta: float = 1.0) -> float:
    return alpha + 2 * beta * (size - 1) / size * num_bytes


def main() -> None:
    wide, tall = 4 * 32 * 256, 4 * 256 * 32
    kernel, bias = 4 * 32 * 32, 4 * 32
    mixed = 6 * (all_reduce(kernel / 2, 2) + all_reduce(bias, 2)) + 5 * all_reduce(tall / 2, 2, beta=0.1)
    jobs = [
        ("data parallel", 256, 32, (4, 1), (1, 1), 6 * (all_reduce(kernel, 4) + all_reduce(bias, 4))),
        ("tensor parallel", 32, 256, (4, 1), (1, 1), 5 * all_reduce(wide, 4)),
        ("mixed", 256, 32, (2, 2), (1, 0.1), mixed),
    ]
    rows = []
    for name, batch, hidden, shape, beta, known in jobs:
        example = zoo.build("mlp", batch=batch, hidden=hidden, layers=6)

        def step(state, batch, example=example):  # the loss is not asked for, so it is not summed
            return example.train_step(state, batch)[0]

        mesh = mw.Mesh.abstract(shape, alpha=(1, 1), beta=beta)
        plan = mw.plan(step, example.state, example.batch, mesh=mesh)
        kinds = Counter(c.kind for c in plan.collectives)
        sent = ", ".join(f"{n} {kind}" for kind, n in kinds.items())
        rows.append((name, shape, f"{known:,.1f}", f"{plan.cost.communication:,.1f}", sent))
    example = zoo.build("gshard-moe-2.4b", batch=64, seq=1024, layers=4)
    plan = mw.plan(example.train_step, example.state, example.batch, cluster="2x8 v100-32gb", mesh=(2, 8))
    kinds = Counter(c.kind for c in plan.collectives)
    experts = {str(plan.sharding(f"state/params/layers/0/{name}")) for name in ("up", "down")}
    rows.append(("GShard MoE", (2, 8), "experts split", " ".join(sorted(experts)), f"{kinds['all_to_all']} all_to_all"))
    table("Optima", __doc__ or "", ("problem", "mesh", "known", "found", "collectives"), rows)


if __name__ == "__main__":
    main()
