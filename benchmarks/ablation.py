"""What is each mechanism of the solver worth, and how much does each of its constants matter?

Every row is one change of `Tuning` or `SearchTuning`: a mechanism switched off, or a constant halved or doubled. It is
compared with the default on the problems of `problem_set.py` whose solve reads that constant; others cannot change.
Costs and bounds are those of the answers, times are CPU times with a deadline on CPU time, so that a busy machine does
not matter much; the row *default again* shows what is left of the noise. Half of the problems were never used for
tuning (*held out*).

    python benchmarks/ablation.py --small --only shrunk        # one constant, on 12 problems of 5 s in all
    python benchmarks/ablation.py --quick --jobs 2             # a wider set, mechanisms alone
    python benchmarks/ablation.py --quick --constants          # and every constant
    python benchmarks/ablation.py --only small_memory --quick  # one mechanism or constant
    python benchmarks/ablation.py --graphs ADMPSV --jobs 8     # graphs of the contest, which need the local search
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from problem_set import ROOT, Case, contest, kept
from report import RESULTS, table

from meshwright.contest.giant import Effort, solve_giant
from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.solver.problem.solution import Solution, Status
from meshwright.solver.run import Run
from meshwright.solver.tuning import TUNING, Tuning

MECHANISMS: dict[str, dict[str, object]] = {
    "default again": {},
    "no model without small memory rows first": {"small_memory": 0.0},
    "no elimination of whole models": {"rows": 0.0},
    "no exact minima at several prices": {"bundle_cuts": 0},
    "no duals at other prices": {"fan": 0},
    "no goals below the incumbent": {"goal_growth": 1e9},
    "no strong branching": {"split_candidates": 1},
    "no extra time once the gap suffices": {"extra_time": 0.0},
    "no windows": {"turn_share": 0.0},
}
RESULT, DECISIONS = RESULTS / "ablation.md", "\n## On the contest"  # which are written by hand, and stay
SOLVER = {field.name for field in fields(Tuning)}
CONSTANTS = [*fields(Tuning), *(field for field in fields(SearchTuning) if field.name != "solver")]
HEADER = ("change", "half", "problems", "cost ÷", "worst", "bound ÷", "CPU time ÷", "proofs lost", "won")


@dataclass(frozen=True)
class Outcome:
    """What one solve found, in how much CPU time, and which constants it read."""

    solution: Solution
    seconds: float
    read: frozenset[str]


class Noting:
    """Notes the constants that are read of a tuning."""

    noted: set[str] = set()  # noqa: RUF012

    def __getattribute__(self, name: str) -> object:
        if not name.startswith("_") and name != "noted":
            Noting.noted.add(name)
        return super().__getattribute__(name)


class NotingTuning(Noting, Tuning):
    """The default of the solver."""


class NotingSearch(Noting, SearchTuning):
    """The default of the search for giant problems."""


def changed(change: dict[str, object] | None) -> SearchTuning:
    """The default with a change; None stands for the default that notes what is read."""
    if change is None:
        return NotingSearch(NotingTuning())
    solver = {name: value for name, value in change.items() if name in SOLVER}
    search = {name: value for name, value in change.items() if name not in SOLVER}
    return replace(SEARCH, solver=replace(TUNING, **solver), **search)


def solved(case: Case, tuning: SearchTuning) -> Outcome:
    """Solves a case as its family is solved in use: the contest's graphs with the search, all others as for a plan."""
    Noting.noted.clear()
    started = time.process_time()
    run = Run(case.problem, tuning=tuning.solver, clock=time.process_time)
    if case.family == "contest":
        solution = solve_giant(run, case.seconds, effort=Effort(tuning=tuning))
    else:
        solution = run.solve(case.seconds)
    return Outcome(solution, time.process_time() - started, frozenset(Noting.noted))


def changes(only: list[str], constants: bool) -> Iterator[tuple[str, dict[str, object]]]:
    """The changes to try, by name."""
    for name, change in MECHANISMS.items():
        if not only or name in only:
            yield name, change
    for field in CONSTANTS:
        if field.name in only or (constants and not only):
            for factor in (0.5, 2.0):
                yield f"{field.name} × {factor:g}", {field.name: scaled(field.default, factor)}


def scaled(value, factor: float):
    """A constant times a factor; a part of a whole that would become the whole moves towards it as far instead."""
    if isinstance(value, tuple):
        return tuple(scaled(it, factor) for it in value)
    if isinstance(value, int):
        return max(1, round(value * factor))
    return 1.0 - (1.0 - value) / factor if 0.5 <= value < 1.0 and factor > 1.0 else value * factor


def rows_of(name: str, pairs: list[tuple[Case, Outcome, Outcome]]) -> Iterator[tuple[object, ...]]:
    """A row for each half: the outcomes of a change against those of the default."""
    for half in ("tuning", "held out"):
        here = [(before, after) for case, before, after in pairs if case.half == half]
        found = [(b.solution, a.solution) for b, a in here if np.isfinite(b.solution.cost + a.solution.cost)]
        if not found:
            continue
        costs = [after.cost / before.cost for before, after in found]
        bounds = [after.lower_bound / before.lower_bound for before, after in found]
        proofs = [(b.solution.status == Status.OPTIMAL, a.solution.status == Status.OPTIMAL) for b, a in here]
        yield (
            name, half, len(here), f"{_mean(costs):.4f}", f"{max(costs):.4f}", f"{_mean(bounds):.4f}",
            f"{sum(a.seconds for _, a in here) / sum(b.seconds for b, _ in here):.2f}",
            sum(was and not now for was, now in proofs), sum(now and not was for was, now in proofs),
        )  # fmt: skip


def _mean(ratios: list[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


@dataclass(frozen=True)
class Source:
    """Where problems come from: a folder, of which `quick` and `small` take a part, or graphs of the contest alone."""

    folder: Path
    quick: bool
    small: bool
    graphs: str

    def cases(self) -> list[Case]:
        return list(contest(self.graphs)) if self.graphs else kept(self.folder, self.quick, self.small)


@cache
def cases_of(source: Source) -> dict[str, Case]:
    """The problems by name, with the kernels loaded; every process reads them once."""
    cases = {case.name: case for case in source.cases()}
    solved(replace(next(iter(cases.values())), seconds=1.0), SEARCH)
    return cases


def outcome(task: tuple[Source, str, dict[str, object] | None]) -> Outcome:
    """The outcome of one problem with a change; None stands for the default, which notes what is read."""
    source, name, change = task
    return solved(cases_of(source)[name], changed(change))


def main() -> None:
    options = _options()
    source = Source(options.folder, options.quick, options.small, options.graphs)
    cases = list(cases_of(source).values())
    rows: list[tuple[object, ...]] = []
    with get_context("spawn").Pool(options.jobs) as pool:
        defaults = pool.map(outcome, [(source, case.name, None) for case in cases], chunksize=1)
        before = {case.name: default for case, default in zip(cases, defaults, strict=True)}
        tried = list(changes(options.only, options.constants))
        read = {
            name: [case for case in cases if not change or before[case.name].read & change.keys()]
            for name, change in tried
        }
        tasks = [(source, case.name, change) for name, change in tried for case in read[name]]
        outcomes = pool.imap(outcome, tasks)
        for name, _ in tried:
            pairs = [(case, before[case.name], next(outcomes)) for case in read[name]]
            found = list(rows_of(name, pairs)) or [(name, "both", 0, "", "", "", "", 0, 0)]
            rows += found
            for row in found:
                print("| " + " | ".join(map(str, row)) + " |", flush=True)
    if not options.only and not options.graphs and not options.small:
        kept_text = RESULT.read_text(encoding="utf-8") if RESULT.exists() else ""
        table("Ablation", __doc__ or "", HEADER, rows)
        decisions = kept_text[kept_text.index(DECISIONS) :] if DECISIONS in kept_text else ""
        RESULT.write_text(RESULT.read_text(encoding="utf-8") + decisions, encoding="utf-8")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small set of problems")
    parser.add_argument("--small", action="store_true", help="what is solved in seconds; nothing is kept")
    parser.add_argument("--constants", action="store_true", help="every constant, too, halved and doubled")
    parser.add_argument("--graphs", default="", help="graphs of the contest alone, for example ADMS; nothing is kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", nargs="+", default=[], help="names of mechanisms or constants; nothing is kept")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "test-output" / "problems", help="where problems are kept"
    )
    options = parser.parse_args()
    if unknown := set(options.only) - {field.name for field in CONSTANTS} - MECHANISMS.keys():
        parser.error(
            f"nothing is called {', '.join(sorted(unknown))}; constants are the fields of Tuning and SearchTuning"
        )
    return options


if __name__ == "__main__":
    main()
