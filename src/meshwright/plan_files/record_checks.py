"""Refuses an inconsistent record: every index in it must be in range.

Types are checked by their annotations (`plain.checked`); this module checks the rest. A record comes from a file, and
its readers use its numbers as indices.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from meshwright.hardware.clusters import AXIS_NAMES
from meshwright.plan_files.stored_operations import parse_ops
from meshwright.plans.records.record import MEMORY_ROLES, Edge, Node, Problem, Record
from meshwright.plans.records.staged_record import StagedRecord
from meshwright.plans.records.traced_program import VIRTUAL, Nest, RecordedProgram
from meshwright.schema import checked
from meshwright.strategy.sharding import Axes

_STEPS = 64  # moments of memory for each operation and value, at the most


def check_record(record: Record, where: str = "record") -> Record:
    """The record itself.

    Raises:
        ValueError: It is inconsistent; the message says where.
    """
    checked(record, Record, where)
    axes = record.problem.axes
    _program(record.program, axes, len(record.problem.nodes), f"{where}.program")
    _problem(record.problem, record.program, f"{where}.problem")
    return record


def check_staged(record: StagedRecord, num_stages: int) -> StagedRecord:
    """The same for the record of a plan's stages."""
    checked(record, StagedRecord, "record")
    _each(record.view, 0, len(record.views), "record.view", num_stages)
    num_units = len(record.first)
    _each(record.first, 0, 2**31, "record.first", num_units)
    _each(record.count, 1, 2**31, "record.count", num_units)
    for number, view in enumerate(record.views):
        where = f"record.views[{number}]"
        program, problem = check_record(view.record, f"{where}.record").program, view.record.problem
        _each(record.unit, 0, num_units, "record.unit", program.num_ops)
        _each(record.argument_unit, 0, num_units, "record.argument_unit", len(program.inputs))
        _each(view.member_node, 0, len(problem.nodes), f"{where}.member_node")
        _each(view.member_unit, 0, num_units, f"{where}.member_unit", len(view.member_node))
        occurrences = sum(len(edge.start) for edge in problem.edges)
        _each(view.source_unit, 0, num_units, f"{where}.source_unit", occurrences)
        _each(view.held, 0, len(program.inputs), f"{where}.held")
        _each(view.sent, 0, len(view.sent_kinds), f"{where}.sent")
        _each(view.sent_op, 0, program.num_ops, f"{where}.sent_op", len(view.sent))
        kind = tuple[str, Sequence[str], float, float, str, str, str, str, float]
        for sent in checked(view.sent_kinds, Sequence[kind], f"{where}.sent_kinds"):  # type: ignore[valid-type]
            _among(sent[1], AXIS_NAMES[: problem.axes.num_axes], f"{where}.sent_kinds")
        with _parsed(f"{where}.ops"):
            parse_ops(view.ops, AXIS_NAMES[: problem.axes.num_axes], f"{where}.ops")
    return record


@contextmanager
def _parsed(where: str) -> Iterator[None]:
    """Rows that are not even rows are inconsistent, too."""
    try:
        yield
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{where} cannot be read ({type(error).__name__}: {error})") from None


def _program(program: RecordedProgram, axes: Axes, num_nodes: int, where: str) -> None:
    num_values, num_ops = len(program.kind), program.num_ops
    if len(program.inputs) > num_values or not {"forward", "backward", "update"} <= set(program.phases):
        raise ValueError(
            f"{where} has {len(program.inputs)} inputs, {num_values} values, phases {program.phases!r:.60}"
        )
    for shape, _, _ in program.types:
        _each(shape, 0, 2**53, f"{where}.types")
    for number, nest in enumerate(program.nests):
        _nest(nest, f"{where}.nests[{number}]")
    per_value = {"kind": len(program.types), "code": 1 << axes.num_bits}
    per_result = {"made": (0, num_values), "taken": (-1, len(program.inputs))}
    per_op = {
        "nest": (0, len(program.nests)),
        "label": (0, len(program.labels)),
        "source": (0, len(program.sources)),
        "assignment": (VIRTUAL, len(program.assignments)),
        "phase": (0, len(program.phases)),
        "first_made": (0, num_values + 1),
        "node": (-1, num_nodes),
        "run": (-1, num_ops),
        "lap": (-1, num_ops),
    }
    for name, most in per_value.items():
        _each(getattr(program, name), 0, most, f"{where}.{name}", num_values)
    for name, (least, most) in per_result.items():
        _each(getattr(program, name), least, most, f"{where}.{name}", len(program.outputs))
    for name, (least, most) in per_op.items():
        _each(getattr(program, name), least, most, f"{where}.{name}", num_ops)
    _each(program.trips, 0, 2**53, f"{where}.trips", num_ops)
    _each(program.reads, 0, num_values, f"{where}.reads")
    _operations(program, axes, where)


def _nest(nest: Nest, where: str) -> None:
    if len(nest.kinds) != len(nest.sizes):
        raise ValueError(f"{where} has {len(nest.sizes)} loops, and kinds of {len(nest.kinds)}")
    for dims in (*nest.operands, *nest.results):
        for loops in dims:
            _each(loops, 0, len(nest.sizes), where)


def _operations(program: RecordedProgram, axes: Axes, where: str) -> None:
    """Checks that the operands, results and splits of operations exist, with the dims of their loop nests."""
    rank = np.array([len(shape) for shape, *_ in program.types], np.int64)[program.kind].tolist()
    operands = [[len(dims) for dims in nest.operands] for nest in program.nests]
    results = [[len(dims) for dims in nest.results] for nest in program.nests]
    if program.start[:1].tolist() != [0] or len(program.start) != program.num_ops + 1:
        raise ValueError(f"{where}.start has {len(program.start)} entries for {program.num_ops} operations")
    start, reads, first = program.start.tolist(), program.reads.tolist(), program.first_made.tolist()
    for op, nest in enumerate(program.nest.tolist()):
        read_ranks = [rank[value] for value in reads[start[op] : start[op + 1]]]
        result_ranks = rank[first[op] : first[op] + len(results[nest])]
        if start[op] > start[op + 1] or read_ranks != operands[nest] or result_ranks != results[nest]:
            raise ValueError(f"{where}: operation {op} does not read and make what its loop nest {nest} says")
    if start[-1] != len(reads):
        raise ValueError(f"{where}.reads has {len(reads)} entries, and operations read {start[-1]}")
    for number, assigned in enumerate(program.assignments):
        loops = [len(program.nests[n].sizes) for n in set(program.nest[program.assignment == number].tolist())]
        _each(assigned, -1, min(loops, default=2**31), f"{where}.assignments[{number}]", axes.num_axes)


def _problem(problem: Problem, program: RecordedProgram, where: str) -> None:
    _each(problem.sizes, 1, 2**31, f"{where}.sizes")
    num_nodes = len(problem.nodes)
    for number, node in enumerate(problem.nodes):
        _node(node, problem.axes, program, f"{where}.nodes[{number}]")
    sizes = np.array([len(node.codes) for node in problem.nodes], np.int64)
    for number, edge in enumerate(problem.edges):
        _edge(edge, sizes, problem, len(program.types), f"{where}.edges[{number}]")
    _choice(problem.choice, sizes, f"{where}.choice")
    if len(problem.unlimited):
        _choice(problem.unlimited, sizes, f"{where}.unlimited")
    for name in ("extra", "once"):
        for node, seconds in getattr(problem, name):
            _each([node], 0, num_nodes, f"{where}.{name}")
            _shape(seconds, (int(sizes[node]),), f"{where}.{name}")
    _memory(problem, sizes, program, where)


def _memory(problem: Problem, sizes: np.ndarray, program: RecordedProgram, where: str) -> None:
    _each([problem.num_steps], 0, _STEPS * (program.num_ops + len(program.kind) + 1), f"{where}.num_steps")
    num_columns, num_spans = len(problem.column_class), len(problem.column)
    _each(problem.column_class, 0, len(sizes), f"{where}.column_class")
    _each(problem.role, 0, len(MEMORY_ROLES), f"{where}.role", num_columns)
    if len(problem.column_bytes) != num_columns:
        raise ValueError(f"{where}.column_bytes has {len(problem.column_bytes)} entries for {num_columns} columns")
    for node, size in zip(problem.column_class, problem.column_bytes, strict=True):
        _shape(size, (int(sizes[node]),), f"{where}.column_bytes")
    _each(problem.column, 0, num_columns, f"{where}.column")
    for name in ("start", "stop"):
        _each(getattr(problem, name), 0, problem.num_steps + 1, f"{where}.{name}", num_spans)
    _shape(problem.share, (num_spans,), f"{where}.share")


def _node(node: Node, axes: Axes, program: RecordedProgram, where: str) -> None:
    size = len(node.codes)
    if not size:
        raise ValueError(f"{where} has no strategy")
    _each(node.codes, 0, 1 << axes.num_bits, f"{where}.codes", size)
    _each([node.type], 0, len(program.types), f"{where}.type")
    _each([node.phase], -1, len(program.phases), f"{where}.phase")
    for array in (node.compute, node.allowed, *(seconds for *_, seconds in node.sent)):
        _shape(array, (size,), where)
    for _, over, _ in node.sent:
        _each(over, 0, axes.num_axes, f"{where}.sent")


def _edge(edge: Edge, sizes: np.ndarray, problem: Problem, num_types: int, where: str) -> None:
    _each([edge.source, edge.reader], 0, len(sizes), where)
    _each([edge.type], 0, num_types, f"{where}.type")
    source, reader = int(sizes[edge.source]), int(sizes[edge.reader])
    codes = 1 << problem.axes.num_bits
    _each(edge.made, 0, codes, f"{where}.made", source)
    _each(edge.needed, 0, codes, f"{where}.needed", reader)
    _shape(edge.free, (reader,), f"{where}.free")
    table = (len(np.unique(edge.made)), len(np.unique(2 * edge.needed + edge.free)))
    _shape(edge.table, table, f"{where}.table")
    num = len(edge.start)
    for name in ("start", "stop"):
        _each(getattr(edge, name), 0, problem.num_steps + 1, f"{where}.{name}", num)
    if len(edge.ahead):
        _each(edge.ahead, 0, problem.num_steps + 1, f"{where}.ahead", num)
        _shape(edge.cut, (num,), f"{where}.cut")
    if len(edge.offers):
        for array, size in ((edge.offers, source), (edge.settling, source), (edge.takes, reader)):
            _shape(array, (size,), f"{where}.offers")


def _choice(choice: np.ndarray, sizes: np.ndarray, where: str) -> None:
    _each(choice, 0, 2**31, where, len(sizes))
    if (choice >= sizes).any():
        raise ValueError(f"{where} names a strategy that its node has not")


def _each(numbers: Any, least: int, most: int, where: str, length: int | None = None) -> None:
    """Checks that numbers are from `least` to below `most`, and how many there are."""
    array = np.asarray(numbers)
    if array.ndim != 1 or (length is not None and len(array) != length):
        raise ValueError(
            f"{where} has shape {array.shape} but must have {'some' if length is None else length} entries"
        )
    if array.size and not (array.min() >= least and array.max() < most):
        raise ValueError(f"{where} holds {array.min()} to {array.max()} but must be from {least} to below {most}")


def _shape(array: np.ndarray, shape: tuple[int, ...], where: str) -> None:
    if array.shape != shape:
        raise ValueError(f"{where} has shape {array.shape} but must have {shape}")


def _among(names: Iterable[str], legal: Sequence[str], where: str) -> None:
    for name in names:
        if name not in legal:
            raise ValueError(f"{where} names {name!r:.60}, which is none of {', '.join(legal)}")
