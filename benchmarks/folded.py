"""How fast are folded planning problems solved to the end, with and without a binding memory limit; does HiGHS agree?

The limit lies half-way between what the unlimited optimum needs and the least that any choice can need, and is held at
the moments at which the planner itself came to hold it.

    python benchmarks/folded.py                # HiGHS gets 20 s for each problem
    python benchmarks/folded.py --oracle 0     # without HiGHS
"""

import argparse
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.solver import ChoiceProblem, price, solve
from meshwright.solver.model.model import from_problem
from meshwright.solver.reductions.simplify import simplify
from tests.solver.highs_oracle import solve_mip

MODELS = [
    ("llama2-13b", {"batch": 200, "seq": 2048, "checkpoint": True}),
    ("gpt3-13b", {"batch": 200, "seq": 2048, "checkpoint": True}),
    ("gshard-moe-2.4b", {"batch": 200}),
    ("wide-resnet-2b", {"batch": 200}),
]
MESHES = [("50x4 a100-80gb", (50, 4)), ("8x8 a100-80gb", (8, 8)), ("8x4 a100-80gb", (2, 4, 4))]
LIMITS = [None, 0.5]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--oracle", type=float, default=20.0, help="seconds for HiGHS on each problem")
    options = parser.parse_args()
    rows, times = [], []
    for model, arguments in MODELS:
        example = zoo.build(model, **arguments)
        task = Task(trace(example.train_step, example.state, example.batch), mw.Auto())
        for where, shape in MESHES:
            formulation = task.formulate(mw.cluster(where).mesh(shape))
            free, least = ViewState(View(formulation, None)).step(), formulation.memory.least().peak_bytes
            for part in LIMITS:
                limit = None if part is None else least + part * (free.peak_bytes - least)
                state = ViewState(View(formulation, limit))
                while not state.is_done and not state.has_failed:
                    state = state.advance()
                problem, _ = state.moments.problem(formulation, limit)
                started = time.perf_counter()
                solution = solve(problem, seconds=20)
                times.append(time.perf_counter() - started)
                rows.append(
                    (
                        model,
                        "×".join(map(str, shape)),
                        "none" if part is None else f"{limit / 2**30:.1f} GiB",
                        problem.num_nodes,
                        problem.num_strategies,
                        f"{times[-1]:.2f} s",
                        str(solution.status),
                        f"{100 * solution.gap:.3f}%",
                        _oracle(problem, solution.cost, options.oracle),
                    )
                )
    rows.append(("median", "", "", "", "", f"{np.median(times):.2f} s", "", "", ""))
    header = ("model", "mesh", "limit", "nodes", "strategies", "solved in", "status", "gap", "HiGHS")
    table("Folded problems", __doc__ or "", header, rows)


def _oracle(problem: ChoiceProblem, cost: float, seconds: float) -> str:
    """What HiGHS says on the same problem after the exact reductions."""
    if not seconds:
        return ""
    simple = simplify(from_problem(problem))
    started = time.perf_counter()
    found = solve_mip(simple.model, seconds)
    taken = time.perf_counter() - started
    if found.choice is None or taken > seconds:
        return "no answer in time"
    theirs = price(problem, simple.expand(found.choice)).cost
    return f"{'agrees' if abs(theirs - cost) <= 1e-6 * cost else f'{theirs / cost - 1:+.1e}'} ({taken:.1f} s)"


if __name__ == "__main__":
    main()
