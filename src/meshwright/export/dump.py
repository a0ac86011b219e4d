"""Dumps a plan: a folder with everything a researcher may want, as text, CSV and JSON.

Every writer below makes one file; `FILES` describes each. The files about a program are written by `program_files.py`,
for a pipelined plan into a folder for each stage.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError, OutputError
from meshwright.explain.show.tensor_table import TensorTable, plan_rows
from meshwright.export.program_files import PROGRAM_FILES, write_csv
from meshwright.names import one_line
from meshwright.parallelism.subject.subject import Subject, Subjects
from meshwright.plan_files.storage import save_plan
from meshwright.plans.stage_text import layers_text
from meshwright.plans.text import cost_text
from meshwright.simulator.simulate import simulate
from meshwright.units import format_seconds

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData
    from meshwright.plans.search_log import Round
    from meshwright.plans.tensor import Tensor

_SECONDS = 5.0  # to solve a stage's problem once more


def dump(plan: "PlanData", folder: Path, function: Any = None, args: Sequence[Any] = ()) -> None:
    """See `Plan.dump`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(plan, folder, function, args)
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}; name a folder that can be made") from None


def _write(plan: "PlanData", folder: Path, function: Any, args: Sequence[Any]) -> None:
    save_plan(plan, folder / "plan.json")
    written = {"plan.json": "the plan, for mw.Plan.load"}
    for name, (what, write) in FILES.items():
        if write(plan, folder / name):
            written[name] = what
    for subject in Subjects(plan):
        place = folder if subject.number is None else folder / f"stage-{subject.number}"
        place.mkdir(exist_ok=True)
        for name, (_, write_program) in PROGRAM_FILES.items():
            write_program(subject, place / name)
    if plan.record is not None:
        prefix = "stage-N/" if plan.stages else ""
        written |= {prefix + name: what for name, (what, _) in PROGRAM_FILES.items()}
    written |= _compiled(plan, folder, function, args)
    lines = [str(plan.verdict), "", *(f"{name:24} {what}" for name, what in written.items())]
    (folder / "README.txt").write_text("\n".join([*map(one_line, lines), ""]), encoding="utf-8")


def _story(plan: "PlanData", path: Path) -> bool:
    path.write_text(f"{plan}\n", encoding="utf-8")
    return True


def _inputs(plan: "PlanData", path: Path) -> bool:
    return _tensors(plan, plan.arguments, path)


def _outputs(plan: "PlanData", path: Path) -> bool:
    return _tensors(plan, plan.results, path)


def _tensors(plan: "PlanData", tensors: Sequence["Tensor"], path: Path) -> bool:
    table = TensorTable(tuple(plan_rows(plan, tensors)))
    path.write_text(f"{table}\n", encoding="utf-8")
    return True


def _solver(plan: "PlanData", path: Path) -> bool:
    path.write_text("\n".join([*map(one_line, solver_lines(plan)), ""]), encoding="utf-8")
    return True


def _memory(plan: "PlanData", path: Path) -> bool:
    """Memory of stages over a simulated step: times, and the bytes from each time on."""
    if not plan.stages:
        return False
    series = simulate(plan).memory
    rows = ((number, at, int(size)) for number, moments in enumerate(series) for at, size in moments)
    return write_csv(path, ("stage", "second", "bytes"), rows)


def _stages(plan: "PlanData", path: Path) -> bool:
    if not plan.stages:
        return False
    header = ("stage", "layers", "mesh", "verdict", "microbatch_s", "once_s", "state_bytes")
    rows = (
        (
            number,
            layers_text(stage),
            "×".join(map(str, stage.mesh.sizes)),
            str(plan.stage_verdicts[number]),
            stage.microbatch_s,
            stage.once_s,
            stage.state_bytes,
            stage.peak_bytes,
        )
        for number, stage in enumerate(plan.stages)
    )
    return write_csv(path, (*header, "peak_bytes"), rows)


def _compiled(plan: "PlanData", folder: Path, function: Any, args: Sequence[Any]) -> dict[str, str]:
    """The compiled program, where the function is known and there are devices to compile for."""
    if function is None and plan.origin is None:
        return {"(no compiled.txt)": "a plan that was loaded does not know its function: plan.dump(folder, f, *args)"}
    from meshwright.export.compiled_collectives import trace_back
    from meshwright.runtime.checking.verify import verify  # needs JAX, as nothing else here does
    from meshwright.runtime.checking.verify_stages import PipelineVerification

    try:
        verification = verify(plan, function, args)
    except MeshwrightError as error:
        return {"(no compiled.txt)": f"not compiled: {error}"}
    if isinstance(verification, PipelineVerification):
        for number, stage in enumerate(verification.stages):
            texts = (f"# {name}\n\n{text}\n" for name, text in stage.texts.items())
            (folder / f"stage-{number}" / "compiled.txt").write_text("\n".join(texts), encoding="utf-8")
        (folder / "after.txt").write_text(f"{verification}\n", encoding="utf-8")
        return {
            "stage-N/compiled.txt": "the compiled programs of the stage",
            "after.txt": "their collectives, memory and flops, and what stages send, against the plan's",
        }
    after = trace_back(plan, verification.made, "cpu" not in verification.backend)
    (folder / "compiled.txt").write_text(after.annotate(verification.text), encoding="utf-8")
    (folder / "after.txt").write_text(f"{verification}\n\n{after}\n", encoding="utf-8")
    return {
        "compiled.txt": "the compiled program, with source line and prediction behind each collective",
        "after.txt": "its collectives, memory and flops against the plan's; unforeseen collectives are marked",
    }


FILES: dict[str, tuple[str, Callable[["PlanData", Path], bool]]] = {
    "story.txt": ("the plan on one screen", _story),
    "inputs.txt": ("how every argument is split", _inputs),
    "outputs.txt": ("how every result is split", _outputs),
    "solver.txt": ("how the solution was found", _solver),
    "stages.csv": ("the stages of a pipeline", _stages),
    "stages-memory.csv": ("bytes on a device of each stage over a simulated step", _memory),
}


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
