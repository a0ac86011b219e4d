"""Operations in a plan's file: a full row for the first of its kind, and short rows for similar operations."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields, replace
from typing import Any

from meshwright.cost.load import Load
from meshwright.plans.operations import OpPlan
from meshwright.plans.tensor import Spec, parse_spec, spec_text
from meshwright.schema import built, checked

_FULL = 9  # entries that every full row has
_SHORT = 4  # entries of a short row: serial, label, number of the full row that it repeats, live bytes


def ops_to_json(ops: Sequence[OpPlan]) -> list[list[Any]]:
    """Rows of operations; layers repeat, so most are short."""
    row_of: dict[OpPlan, int] = {}
    rows = []
    for number, op in enumerate(ops):
        like = row_of.setdefault(replace(op, serial=0, live_bytes=0), number)
        rows.append(_row(op) if like == number else [op.serial, op.label, like, op.live_bytes])
    return rows


def parse_ops(rows: Iterable[Sequence[Any]], axes: Sequence[str], where: str) -> tuple[OpPlan, ...]:
    """The inverse of `ops_to_json`; it also reads files of earlier versions, whose rows are all full.

    Args:
        rows: The rows.
        axes: The axes of the mesh.
        where: What the rows are, for errors.

    Raises:
        ValueError: They have other types than they should, or name other axes.
    """
    ops: list[OpPlan] = []
    for number, row in enumerate(rows):
        if not isinstance(row, list | tuple):
            raise ValueError(f"{where}[{number}] is {row!r:.60} but must be a list")
        if len(row) == _SHORT:
            serial, _, like, live_bytes = row
            if like not in range(number):  # not by `checked`: there are many thousands of rows
                raise ValueError(f"{where}[{number}] repeats row {like!r:.60}, which is none before it")
            ops.append(replace(ops[like], serial=serial, live_bytes=live_bytes))
        else:
            ops.append(_parse(row, f"{where}[{number}]"))
    for number, op in enumerate(checked(tuple(ops), tuple[OpPlan, ...], where)):
        for specs in (op.operands, op.partial, op.results, op.via):
            for spec in specs:
                check_axes(spec or (), axes, f"{where}[{number}]")
        for sums in (op.sums, op.waits):  # one axis may be in both
            check_axes([sums], axes, f"{where}[{number}]")
    return tuple(ops)


def check_axes(spec: Sequence[Sequence[str]], axes: Sequence[str], where: str) -> None:
    """Refuses a sharding over axes that a mesh does not have.

    Raises:
        ValueError: It names another axis.
    """
    used = [axis for split in spec for axis in split]
    for axis in used:
        if axis not in axes:
            raise ValueError(f"{where} is split over {axis!r:.60}, which is none of the mesh's axes {', '.join(axes)}")
        if used.count(axis) > 1:
            raise ValueError(f"{where} is split over {axis!r} twice")


def _row(op: OpPlan) -> list[Any]:
    specs = (_specs_text(s) for s in (op.operands, op.partial, op.results, op.via))
    load = [list(astuple(op.load))] if op.load else [None] if op.barrier else []
    barrier = [op.barrier] if op.barrier else []
    return [op.serial, op.label, op.phase, *specs, list(op.sums), list(op.waits), op.live_bytes, *load, *barrier]


def _parse(row: Sequence[Any], where: str) -> OpPlan:
    if not _FULL <= len(row) <= len(fields(OpPlan)):
        raise ValueError(f"{where} has {len(row)} entries but must have {_FULL} to {len(fields(OpPlan))}")
    for place, kind in enumerate([str] * 4 + [list[str]] * 2, 3):
        checked(row[place], kind, f"{where}[{place}]")
    specs, axes = (_parse_specs(text) for text in row[3:7]), map(tuple, row[7:9])
    load = [None if load is None else built(Load, load, f"{where}[10]") for load in row[10:11]]
    return OpPlan(*row[:3], *specs, *axes, *row[9:10], *load, *row[11:12])


def _specs_text(specs: tuple[Spec | None, ...]) -> str:
    return ", ".join(spec_text(s) for s in specs)


def _parse_specs(text: str) -> tuple[Spec | None, ...]:
    return tuple(None if part == "." else parse_spec(part) for part in text.split(", ")) if text else ()
