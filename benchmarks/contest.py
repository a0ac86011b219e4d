"""How close does the solver come to the best published costs of the ASPLOS/EuroSys 2025 contest, and with what proof?

Prints, per graph: cost ÷ best published, lower bound ÷ own cost, and the time, each answer re-priced by the independent
checker. The data are read from MESHWRIGHT_DATA or ../shared/data; without them the benchmark is skipped, loudly.

    python benchmarks/contest.py                      # all graphs at the contest's limits, seed 0
    python benchmarks/contest.py --seeds 0 1 2 --part 0.1 --graphs BGV
"""

import argparse
import os
import platform
import resource
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np

from meshwright.contest import solve
from meshwright.solver import ChoiceProblem, price

ROOT = Path(__file__).resolve().parent.parent
BEST = {  # cost of the best published solution and the contest's time limit in seconds
    "A": (6_548_641_531, 60),
    "B": (532_843, 60),
    "D": (313_613_524_736, 60),
    "G": (217_039, 120),
    "M": (49_928_460_991, 180),
    "P": (662_197_407_330, 240),
    "S": (1_534_613_444, 240),
    "V": (1_632_051, 300),
}


def main() -> int:
    options = _options()
    folder = Path(os.environ.get("MESHWRIGHT_DATA", ROOT.parent / "shared" / "data")) / "iopddl"
    if not folder.is_dir():
        print(f"SKIPPED: no contest data at {folder}; set MESHWRIGHT_DATA to the folder that holds iopddl/")
        return 0
    lines = [
        f"Contest graphs, {options.part:g} of the contest's time limit, {options.workers} workers, "
        f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "",
        "| graph | seed | cost | ÷ best published | bound ÷ cost | status | load s | solve s | limit s | legal |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    results: dict[str, list[tuple[float, float]]] = {}
    for graph in options.graphs:
        begin = time.perf_counter()
        problem = ChoiceProblem.load(folder / f"{graph}.json.gz")
        loaded = time.perf_counter() - begin
        for seed in options.seeds:
            line, ratio, bound = _run(graph, problem, seed, options, loaded)
            results.setdefault(graph, []).append((ratio, bound))
            lines.append(line)
            print(line, flush=True)
    lines += _summary(results)
    print("\n".join(lines[-4:]), flush=True)
    if options.save:
        (ROOT / "benchmarks" / "results" / options.save).write_text("\n".join(lines) + "\n")
    return 0


def _run(graph, problem, seed, options, loaded):
    best, limit = BEST[graph]
    seconds = limit * options.part
    # As for a contest binary, reading the problem counts.
    solution = solve(problem, seconds=max(0.5, seconds - loaded), seed=seed, workers=options.workers)
    found = price(problem, solution.choice) if solution.choice is not None else None
    cost = found.cost if found else np.inf
    ratio, bound = cost / best, solution.lower_bound / cost
    line = (
        f"| {graph} | {seed} | {cost:,.0f} | {ratio:.5f} | {bound:.4f} | {solution.status} | {loaded:.1f} | "
        f"{solution.seconds:.1f} | {seconds:.0f} | {'yes' if found and found.legal else 'NO'} |"
    )
    return line, ratio, bound


def _summary(results):
    medians = {graph: float(np.median([ratio for ratio, _ in runs])) for graph, runs in results.items()}
    bounds = [bound for runs in results.values() for _, bound in runs]
    geometric = float(np.exp(np.mean(np.log(list(medians.values())))))
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return [
        "",
        "medians: " + ", ".join(f"{graph} {ratio:.4f}" for graph, ratio in medians.items()),
        f"geometric mean of the medians {geometric:.4f}, mean {np.mean(list(medians.values())):.4f}; "
        f"mean bound ÷ cost {np.mean(bounds):.4f}",
        f"most memory of this process {usage:.2f} GiB; largest of the workers "
        f"{resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20:.2f} GiB",
    ]


def _options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default="".join(BEST), help="letters of the graphs to run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--part", type=float, default=1.0, help="part of the contest's time limit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", help="file name under benchmarks/results/ for the table")
    options = parser.parse_args()
    if unknown := set(options.graphs) - set(BEST):
        parser.error(f"no published cost of {', '.join(sorted(unknown))} is known here; choose from {''.join(BEST)}")
    return options


if __name__ == "__main__":
    sys.exit(main())
