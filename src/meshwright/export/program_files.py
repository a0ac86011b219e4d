"""The files of a dump about one program: a plan's, or a stage's for one microbatch."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from meshwright.explain.show.tensor_table import TensorTable, plan_rows
from meshwright.names import one_line
from meshwright.output import ESCAPED
from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.notation import notation
from meshwright.parallelism.subject.memory_timeline import memory_over_time
from meshwright.parallelism.subject.subject import Subject
from meshwright.parallelism.words import label_words, symbols
from meshwright.plans.records.record import MEMORY_ROLES
from meshwright.plans.records.traced_program import VIRTUAL


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> bool:
    """Writes a table."""
    with path.open("w", newline="", encoding="utf-8", errors=ESCAPED) as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return True


def _tensors(subject: Subject, path: Path) -> None:
    table = TensorTable(tuple(plan_rows(subject.plan, subject.tensors)))
    path.write_text(f"{table}\n", encoding="utf-8")


def _program(subject: Subject, path: Path) -> None:
    path.write_text("\n".join([*map(one_line, program_lines(subject.facts)), ""]), encoding="utf-8")


def _operations(subject: Subject, path: Path) -> None:
    """Operations with the node that decides about them; a node's costs are those of all its operations together."""
    facts, problem = subject.facts, subject.record.problem
    program = facts.program
    costs = [float(cost[s]) for cost, s in zip(problem.costs, problem.choice, strict=True)]
    header = ("operation", "phase", "label", "trips", "strategy", "node", "node's seconds", "source")

    def rows() -> Iterable[Sequence[Any]]:
        for op in program.running:
            node = int(program.node[op])
            how = "" if program.assignment[op] == VIRTUAL else notation(facts, op)
            label, source = program.labels[program.label[op]], program.sources[program.source[op]]
            cost = costs[node] if node >= 0 else 0.0
            yield op, program.phases[program.phase[op]], label, program.trips[op], how, node, cost, source

    write_csv(path, header, rows())


def _strategies(subject: Subject, path: Path) -> None:
    """Every strategy of every node, with its own cost."""
    problem, names, types = subject.record.problem, subject.names, subject.record.program.types
    header = ("node", "label", "tied", "strategy", "chosen", "allowed", "sharding", "compute_s", "communication_s")

    def rows() -> Iterable[Sequence[Any]]:
        for number, node in enumerate(problem.nodes):
            rank = len(types[node.type][0])
            for s, code in enumerate(node.codes.tolist()):
                dims = problem.axes.dims(code, rank)
                spec = " ".join("+".join(names[a] for a in axes) or "-" for axes in dims)
                sent = sum(float(seconds[s]) for *_, seconds in node.sent)
                chosen = s == problem.choice[number]
                yield number, node.label, node.num, s, chosen, bool(node.allowed[s]), spec, node.compute[s], sent

    write_csv(path, header, rows())


def _problem(subject: Subject, path: Path) -> None:
    """The problem in the contest's format; memory is constrained where the choice needs most, as in planning."""
    problem = subject.record.problem
    profile = problem.memory.profile(problem.choice, problem.copies_made(problem.choice))
    limited = {} if problem.limit is None else {profile.peak_at: 0.0}
    problem.problem(limited, problem.limit if limited else None).save(path)


def _memory(subject: Subject, path: Path) -> None:
    memory = memory_over_time(subject.record.problem)
    rows = ((int(at), *map(int, memory.by_role[:, i])) for i, at in enumerate(memory.at))
    write_csv(path, ("operation", *MEMORY_ROLES), rows)


def _collectives(subject: Subject, path: Path) -> None:
    header = ("kind", "axes", "bytes", "trips", "seconds", "phase", "purpose", "operation", "source")
    rows = (
        (c.kind, "+".join(c.axes), c.bytes, c.trips, c.seconds, c.phase, c.purpose, c.operation, c.source)
        for c in subject.collectives
    )
    write_csv(path, header, rows)


def _resharding(subject: Subject, path: Path) -> None:
    header = ("phase", "needed by", "kind", "axes", "bytes", "trips", "seconds", "source")
    rows = (
        (c.phase, c.operation, c.kind, "+".join(c.axes), c.bytes, c.trips, c.seconds, c.source)
        for c in subject.collectives
        if c.purpose == "reshard"
    )
    write_csv(path, header, rows)


PROGRAM_FILES: dict[str, tuple[str, Callable[[Subject, Path], None]]] = {
    "tensors.txt": ("the shardings of the arguments that it reads", _tensors),
    "program.txt": ("the program as traced, with the chosen shardings", _program),
    "operations.csv": ("every operation: its strategy, its node and the node's cost", _operations),
    "strategies.csv": ("every strategy of every node", _strategies),
    "problem.json.gz": ("the folded choice problem in the contest's format, for meshwright solve", _problem),
    "memory.csv": ("bytes on one device at every operation, by role", _memory),
    "collectives.csv": ("all collectives of a step", _collectives),
    "resharding.csv": ("the steps of every resharding", _resharding),
}


def program_lines(facts: AxisFacts) -> Iterator[str]:
    """Arguments, then operations: ``%12 = dot_general  B_x S D · D F_y → B_x S F_y  forward  mlp  # file:line``."""
    program = facts.program
    here = program.touched
    for value, path in enumerate(program.inputs):
        if value not in here:
            continue  # another stage's
        yield f"%{value} = {path}  {_type(facts, value)}  {_symbols(facts, value)}"
    for op in program.running:
        values = ", ".join(f"%{value}" for value in program.made_by(op))
        reads = ", ".join(f"%{value}" for value in program.reads_of(op))
        name, scope = program.primitive(op), label_words(program.labels[program.label[op]]).rpartition("/")[0]
        how = "as its readers need it" if program.assignment[op] == VIRTUAL else notation(facts, op)
        trips = f" ×{program.trips[op]:g}" if program.trips[op] != 1 else ""
        phase, source = program.phases[program.phase[op]], program.sources[program.source[op]]
        yield f"{values} = {name}({reads})  {how}  {phase}{trips}  {scope or '-'}  # {source}"
    for path, value in zip(program.outputs, program.made.tolist(), strict=True):
        if value in here:
            yield f"{path} = %{value}"


def _type(facts: AxisFacts, value: int) -> str:
    shape, dtype, _ = facts.program.types[facts.program.kind[value]]
    return f"{dtype}[{','.join(map(str, shape))}]"


def _symbols(facts: AxisFacts, value: int) -> str:
    spec = facts.spec_of(value, int(facts.program.code[value]))
    return symbols(facts.program.shape(value), facts.letters_of(value), spec)
