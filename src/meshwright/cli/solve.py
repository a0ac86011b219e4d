"""The `meshwright solve` command: a choice problem in, progress on stderr, the contest's answer line last on stdout."""

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import ProblemError

if TYPE_CHECKING:
    from meshwright.solver import Solution


def solve_command(
    problem: Annotated[Path, typer.Argument(help="The contest's JSON, plain or gzipped.")],
    seconds: Annotated[float, typer.Option(help="Wall-clock limit, reading included.")] = 60.0,
    workers: Annotated[int, typer.Option(help="Processes that search together.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the random search.")] = 0,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the full result to this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> None:
    """Solve a choice problem and print the chosen strategies as one JSON list.

    Exit status: 0 with a choice, 1 without (infeasible, or none found in time), 2 for bad input.
    """
    begin = time.perf_counter()
    try:
        solution = _solve(problem, seconds, workers, seed, quiet, begin)
    except ProblemError as error:
        print(f"meshwright solve: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if json_path is not None:
        json_path.write_text(json.dumps(_as_dict(solution), indent=1) + "\n")
    if solution.choice is None:
        print(_no_choice(solution), file=sys.stderr)
        raise typer.Exit(1)
    print(json.dumps(solution.choice.tolist()))


def _solve(path: Path, seconds: float, workers: int, seed: int, quiet: bool, begin: float) -> "Solution":
    from meshwright.contest import solve
    from meshwright.solver import ChoiceProblem

    if not seconds > 0:
        raise ProblemError(f"--seconds is {seconds:g}: give a positive time limit")
    problem = ChoiceProblem.load(path)
    left = max(seconds - (time.perf_counter() - begin), 0.1)
    with _Display(quiet, problem.limit) as display:
        solution = solve(problem, seconds=left, seed=seed, workers=workers, on_progress=display.update)
    if not quiet:
        print(_summary(solution, time.perf_counter() - begin), file=sys.stderr)
    return solution


class _Display:
    """Live progress on stderr: one line that is redrawn on a terminal, one line per half second elsewhere."""

    def __init__(self, quiet: bool, limit: float):
        from rich.live import Live

        from meshwright.console import Console

        self.quiet, self.limit = quiet, limit
        self.console = Console(stderr=True)
        self.live = Live(console=self.console, refresh_per_second=8, transient=True)
        self.last = -1.0

    def __enter__(self) -> "_Display":
        if self._redraws():
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._redraws():
            self.live.stop()

    def update(self, progress: Any) -> None:
        if self.quiet:
            return
        text = _line(
            progress.seconds, progress.cost, progress.lower_bound, progress.gap, progress.peak_usage, self.limit
        )
        if self._redraws():
            self.live.update(text)
        elif progress.seconds - self.last >= 0.5:
            self.last = progress.seconds
            print(text, file=sys.stderr, flush=True)

    def _redraws(self) -> bool:
        return not self.quiet and self.console.is_terminal


def _line(seconds: float, cost: float, bound: float, gap: float, peak: float, limit: float) -> str:
    memory = f"{100 * peak / limit:.1f}% of the limit" if 0 < limit < float("inf") else f"{peak:.6g}"
    return f"{seconds:7.1f} s  cost {cost:,.6g}  bound {bound:,.6g}  gap {100 * gap:.3f}%  memory {memory}"


def _summary(solution: Any, seconds: float) -> str:
    if solution.choice is None:
        return f"{solution.status}: {solution.status.sentence}"
    return (
        f"{solution.status}: cost {solution.cost:.15g}, lower bound {solution.lower_bound:.15g} "
        f"(gap {100 * solution.gap:.4f}%), peak usage {solution.peak_usage:.15g}, {seconds:.1f} s"
    )


def _no_choice(solution: Any) -> str:
    text = f"meshwright solve: {solution.status.sentence}"
    return text if solution.least_limit is None else f"{text} At least {solution.least_limit:.15g} would be needed."


def _as_dict(solution: Any) -> dict[str, Any]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and abs(value) < float("inf") else None

    return {
        "status": str(solution.status),
        "sentence": solution.status.sentence,
        "cost": finite(solution.cost),
        "lower_bound": finite(solution.lower_bound),
        "gap": finite(solution.gap),
        "peak_usage": solution.peak_usage,
        "least_limit": finite(solution.least_limit),
        "seconds": solution.seconds,
        "choice": None if solution.choice is None else solution.choice.tolist(),
        "history": [
            {"seconds": p.seconds, "cost": finite(p.cost), "lower_bound": finite(p.lower_bound)}
            for p in solution.history
        ],
    }
