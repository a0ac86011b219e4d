"""Dumps a plan: a folder with everything a researcher may want, as text, CSV and JSON.

Every writer below makes one file; `FILES` says what each is.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.errors import MeshwrightError
from meshwright.explain.judging import facts_of
from meshwright.explain.notation import notation
from meshwright.explain.program import program_lines
from meshwright.explain.record import MEMORY_ROLES, VIRTUAL
from meshwright.explain.tensors import TensorTable, plan_rows
from meshwright.explain.timeline import memory_over_time
from meshwright.planner.show import cost_text

if TYPE_CHECKING:
    from meshwright.planner.plan import Plan
    from meshwright.planner.tensor import Tensor


class OutputError(MeshwrightError, OSError):
    """A file or folder that cannot be written."""


def dump(plan: "Plan", folder: Path, function: Any = None, args: Sequence[Any] = ()) -> None:
    """See `Plan.dump`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        plan.save(folder / "plan.json")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}; name a folder that can be made") from None
    written = {"plan.json": "the plan, for mw.Plan.load"}
    for name, (what, write) in FILES.items():
        if write(plan, folder / name):
            written[name] = what
    written |= _compiled(plan, folder, function, args)
    lines = [f"{name:24} {what}" for name, what in written.items()]
    (folder / "README.txt").write_text("\n".join([str(plan.verdict), "", *lines, ""]), encoding="utf-8")


def _story(plan: "Plan", path: Path) -> bool:
    path.write_text(f"{plan}\n", encoding="utf-8")
    return True


def _inputs(plan: "Plan", path: Path) -> bool:
    return _tensors(plan, plan.arguments, path)


def _outputs(plan: "Plan", path: Path) -> bool:
    return _tensors(plan, plan.results, path)


def _tensors(plan: "Plan", tensors: Sequence["Tensor"], path: Path) -> bool:
    table = TensorTable(tuple(plan_rows(plan, tensors)))
    path.write_text(f"{table}\n", encoding="utf-8")
    return True


def _collectives(plan: "Plan", path: Path) -> bool:
    header = ("kind", "axes", "bytes", "trips", "seconds", "phase", "purpose", "operation", "source")
    rows = (
        (c.kind, "+".join(c.axes), c.bytes, c.trips, c.seconds, c.phase, c.purpose, c.operation, c.source)
        for c in plan.collectives
    )
    return _csv(path, header, rows)


def _resharding(plan: "Plan", path: Path) -> bool:
    header = ("phase", "needed by", "kind", "axes", "bytes", "trips", "seconds", "source")
    rows = (
        (c.phase, c.operation, c.kind, "+".join(c.axes), c.bytes, c.trips, c.seconds, c.source)
        for c in plan.collectives
        if c.purpose == "reshard"
    )
    return _csv(path, header, rows)


def _solver(plan: "Plan", path: Path) -> bool:
    solution = plan.solution
    lines = [
        f"status       {solution.status}",
        f"cost         {cost_text(plan, plan.cost.total)}",
        f"lower bound  {cost_text(plan, solution.lower_bound)}",
        f"gap          {100 * solution.gap:.4f}%",
        f"seconds      {solution.seconds:.3f}" if solution.seconds else "seconds      not kept",
        "",
        "mesh views, in the order they were priced:",
    ]
    for view in plan.considered:
        cost = "" if view.cost is None else cost_text(plan, view.cost)
        lines.append(f"{'×'.join(map(str, view.shape)):12} {cost:>12}  {view.peak_bytes or ''}  {view.remark}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return True


def _program(plan: "Plan", path: Path) -> bool:
    if plan.record is None:
        return False
    lines = program_lines(facts_of(plan, plan.record.program))
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return True


def _operations(plan: "Plan", path: Path) -> bool:
    """Operations with the node that decides about them; a node's costs are those of all its operations together."""
    if plan.record is None:
        return False
    program, problem = plan.record.program, plan.record.problem
    facts = facts_of(plan, program)
    costs = [float(cost[s]) for cost, s in zip(problem.costs, problem.choice, strict=True)]
    header = ("operation", "phase", "label", "trips", "strategy", "node", "node's seconds", "source")

    def rows() -> Iterable[Sequence[Any]]:
        for op in range(program.num_ops):
            node = int(program.node[op])
            how = "" if program.assignment[op] == VIRTUAL else notation(facts, op)
            label, source = program.labels[program.label[op]], program.sources[program.source[op]]
            cost = costs[node] if node >= 0 else 0.0
            yield op, program.phases[program.phase[op]], label, program.trips[op], how, node, cost, source

    return _csv(path, header, rows())


def _strategies(plan: "Plan", path: Path) -> bool:
    """Every strategy of every node, with what it costs by itself."""
    if plan.record is None:
        return False
    problem, names = plan.record.problem, plan.mesh.names
    header = ("node", "label", "tied", "strategy", "chosen", "allowed", "sharding", "compute_s", "communication_s")

    def rows() -> Iterable[Sequence[Any]]:
        for number, node in enumerate(problem.nodes):
            rank = len(plan.record.program.types[node.type][0])
            for s, code in enumerate(node.codes.tolist()):
                dims = problem.axes.dims(code, rank)
                spec = " ".join("+".join(names[a] for a in axes) or "-" for axes in dims)
                sent = sum(float(seconds[s]) for *_, seconds in node.sent)
                chosen = s == problem.choice[number]
                yield number, node.label, node.num, s, chosen, bool(node.allowed[s]), spec, node.compute[s], sent

    return _csv(path, header, rows())


def _problem(plan: "Plan", path: Path) -> bool:
    """In the contest's format; memory is held where the plan needs most, as in planning."""
    if plan.record is None:
        return False
    problem = plan.record.problem
    profile = problem.memory.profile(problem.choice, problem.copies_made(problem.choice))
    held = {} if problem.limit is None else {profile.peak_at: 0.0}
    problem.problem(held, problem.limit if held else None).save(path)
    return True


def _memory(plan: "Plan", path: Path) -> bool:
    if plan.record is None:
        return False
    found = memory_over_time(plan.record.problem)
    rows = ((int(at), *map(int, found.by_role[:, i])) for i, at in enumerate(found.at))
    return _csv(path, ("operation", *MEMORY_ROLES), rows)


def _stages(plan: "Plan", path: Path) -> bool:
    if not plan.stages:
        return False
    from meshwright.explain.at_rest import stage_verdict

    header = ("stage", "first layer", "last layer", "mesh", "verdict", "microbatch_s", "once_s", "state_bytes")
    rows = (
        (
            number,
            stage.layers[0],
            stage.layers[1] - 1,
            "×".join(map(str, stage.mesh.sizes)),
            str(stage_verdict(stage)),
            stage.microbatch_s,
            stage.once_s,
            stage.state_bytes,
            stage.peak_bytes,
        )
        for number, stage in enumerate(plan.stages)
    )
    return _csv(path, (*header, "peak_bytes"), rows)


def _compiled(plan: "Plan", folder: Path, function: Any, args: Sequence[Any]) -> dict[str, str]:
    """The compiled program, where the function is known and there are devices to compile for."""
    if function is None and plan.origin is None:
        return {"(no compiled.txt)": "a plan that was loaded does not know its function: plan.dump(folder, f, *args)"}
    from meshwright.explain.after import trace_back

    try:
        found = plan.verify(function, *args)
    except MeshwrightError as error:
        return {"(no compiled.txt)": f"not compiled: {error}"}
    after = trace_back(plan, found.made, "cpu" not in found.backend)
    (folder / "compiled.txt").write_text(after.annotate(found.text), encoding="utf-8")
    (folder / "after.txt").write_text(f"{found}\n\n{after}\n", encoding="utf-8")
    return {
        "compiled.txt": "the compiled program, with source line and prediction behind each collective",
        "after.txt": "its collectives, memory and flops against the plan's; unforeseen collectives are marked",
    }


def _csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bool:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return True


FILES: dict[str, tuple[str, Callable[["Plan", Path], bool]]] = {
    "story.txt": ("the plan on one screen", _story),
    "inputs.txt": ("how every argument lies", _inputs),
    "outputs.txt": ("how every result lies", _outputs),
    "program.txt": ("the program as traced, with the chosen shardings", _program),
    "operations.csv": ("every operation: its strategy, its node and what that costs", _operations),
    "strategies.csv": ("every strategy of every node", _strategies),
    "problem.json.gz": ("the folded choice problem in the contest's format, for meshwright solve", _problem),
    "solver.txt": ("how the solution was come by", _solver),
    "memory.csv": ("bytes on one device at every operation, by what holds them", _memory),
    "collectives.csv": ("everything that is sent", _collectives),
    "resharding.csv": ("the steps of every resharding", _resharding),
    "stages.csv": ("the stages of a pipeline", _stages),
}
