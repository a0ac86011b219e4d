"""The solver's log of how it found a plan: every mesh view, every round, every improvement."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.parallelism.subject.subject import Subject, Subjects
from meshwright.plans.text import cost_text
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData
    from meshwright.plans.search_log import Round

_SECONDS = 5.0  # to solve a stage's problem once more


def solver_lines(plan: "PlanData") -> Iterator[str]:
    """The log, line by line."""
    solution = plan.solution
    yield f"status       {solution.status}"
    yield f"cost         {cost_text(plan, plan.cost.total)}"
    yield f"lower bound  {cost_text(plan, solution.lower_bound)}"
    yield f"gap          {100 * solution.gap:.4f}% of the lower bound"
    if solution.folded:
        yield f"folded       {solution.folded}: the problem in which layers that repeat share one choice"
    yield f"seconds      {solution.seconds:.3f}" if solution.seconds else "seconds      not kept: the plan was loaded"
    if plan.stages:
        yield f"stages       {plan.provenance.get('stages', '')}"
        for subject in Subjects(plan):
            yield from _stage_lines(subject)
        return
    yield from ("", "mesh views, in the order they were priced:")
    for view in plan.considered:
        cost = "" if view.cost is None else cost_text(plan, view.cost)
        yield ""
        yield f"{'×'.join(map(str, view.shape)):12} {cost:>12}  {view.peak_bytes or ''}  {view.remark}".rstrip()
        for number, solved in enumerate(view.rounds):
            yield from _round_lines(plan, number, solved)


def _round_lines(plan: "PlanData", number: int, found: "Round") -> Iterator[str]:
    moments = f"memory held at {found.num_held} moments" if found.num_held else "without memory"
    took = f" in {format_seconds(found.seconds)}" if found.seconds else ""
    yield f"  round {number}: {moments}; {found.status}{took}"
    for step in found.progress:
        at = f"{step.seconds:9.4f} s  " if step.seconds else ""
        cost = "none yet" if step.cost is None else cost_text(plan, step.cost)
        bound = "none yet" if step.lower_bound is None else cost_text(plan, step.lower_bound)
        yield f"    {at}cost {cost:>12}  bound {bound:>12}"


def _stage_lines(subject: Subject) -> Iterator[str]:
    """The log of a stage: its split came from a solve of all layers, so its own problem is solved again for the log."""
    from meshwright.planner.solving.fit_memory import View, ViewState
    from meshwright.planner.solving.tuning import ViewTuning

    problem = subject.record.problem
    view = View(problem, problem.limit, ViewTuning(allowances=((_SECONDS, 1e-2),)))
    state = ViewState(view, problem.choice).step()
    yield from ("", f"stage {subject.number}: {len(problem.nodes)} nodes, {len(problem.edges)} edges, solved again:")
    for number, solved in enumerate(state.rounds):
        yield from _round_lines(subject.plan, number, solved)
