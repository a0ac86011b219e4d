"""Tables of tensors: shape, sharding in symbols and in words, bytes per device, kind; repeated layers as one row."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderableType

from meshwright.console import Printed, Table, plain_table
from meshwright.parallelism.words import bytes_on_device, sharding_words, symbols
from meshwright.units import format_bytes

if TYPE_CHECKING:
    from meshwright.parallelism.subject.subject import Subjects
    from meshwright.plans.plan import PlanData
    from meshwright.plans.records.judgement import Judgement
    from meshwright.plans.tensor import Tensor

_RUNS = 4  # ranges of numbers that are listed
_WIDEST = 52  # longer paths are wrapped
_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])|(?<=[_.])\d+")


@dataclass(frozen=True, slots=True)
class TensorRow:
    """Tensors that are alike.

    Attributes:
        path: The path, with ``*`` where several differ in a number.
        paths: All of their paths.
        shape, dtype, spec, role: As in `Tensor`.
        symbols: The sharding in symbols, such as ``D F_y``.
        words: The same in words.
        kind: Its part in the parallelism.
        bytes_on_device: Of one of them.
        mesh: Names and sizes of the axes of its mesh.
    """

    path: str
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: tuple[tuple[str, ...], ...]
    role: str
    symbols: str
    words: str
    kind: str
    bytes_on_device: int
    mesh: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """The path, how many there are of it, and which."""
        if len(self.paths) == 1:
            return self.path
        return f"{self.path}  ({len(self.paths)}×{f': {self.which}' if self.which else ''})"

    @property
    def which(self) -> str:
        """The numbers that stand for ``*``, such as ``0–19, 21``; empty where paths differ in several."""
        return which(self.paths)


def which(paths: Sequence[str]) -> str:
    """The numbers in which paths differ, where each differs in one.

    >>> which(["layers/0/up", "layers/1/up", "layers/2/up", "layers/7/up"])
    '0–2, 7'
    >>> which(["layers/1/up", "layers/3/up", "layers/5/up"])
    '1, 3, …, 5'
    """
    columns = list(zip(*(map(int, _NUMBER.findall(path)) for path in paths), strict=True))
    varying = [sorted(column) for column in columns if len(set(column)) > 1]
    if len(varying) != 1 or len(set(varying[0])) != len(paths):
        return ""
    numbers = varying[0]
    steps = {b - a for a, b in pairwise(numbers)}
    if len(steps) == 1 and len(numbers) > 2 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, …, {numbers[-1]}"
    runs: list[list[int]] = []
    for number in numbers:
        if not runs or number != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(number)
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
    return ", ".join(texts if len(texts) <= _RUNS else [*texts[: _RUNS - 1], "…", texts[-1]])


@dataclass(frozen=True)
class TensorTable(Printed):
    """Rows of tensors, to be printed."""

    rows: tuple[TensorRow, ...]
    title: str = ""

    def __rich__(self) -> RenderableType:
        return _AsWide(self)


@dataclass(frozen=True)
class _AsWide:
    """A table of tensors, as wide as the console is."""

    table: TensorTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield tensor_view(self.table.rows, self.table.title, options.max_width)


def show(plan: "PlanData", path: str) -> TensorTable:
    """See `Plan.show`."""
    return TensorTable(tuple(plan_rows(plan, plan.find(path))))


def plan_rows(plan: "PlanData", tensors: Iterable["Tensor"]) -> list[TensorRow]:
    """Rows of a plan's tensors; where stages have different meshes, each stage has its own rows."""
    mesh_of = _stage_mesh(plan) if plan.stages else lambda tensor: plan.mesh.shape
    groups: dict[tuple[tuple[str, int], ...], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tuple(mesh_of(tensor).items()), []).append(tensor)
    return [row for mesh, members in groups.items() for row in rows_of(plan.judgement, dict(mesh), members)]


def _stage_mesh(plan: "PlanData") -> Callable[["Tensor"], Mapping[str, int]]:
    """Maps a tensor of a pipelined plan to its mesh: that of the first stage which has it.

    The next values of arguments are on the mesh of the arguments, according to the program's record. Data are on the
    first stage's mesh; in a plan without a record, any other tensor is on the first mesh that has its axes.
    """
    shape_of = {t.path: stage.mesh.shape for stage in reversed(plan.stages) for t in stage.tensors}

    @cache
    def subjects() -> "Subjects":
        from meshwright.parallelism.subject.subject import Subjects

        return Subjects(plan)

    def mesh_of(tensor: "Tensor") -> Mapping[str, int]:
        if tensor.path in shape_of:
            return shape_of[tensor.path]
        if tensor.role == "state" and len(subjects()):
            return plan.stages[subjects().of(tensor).number or 0].mesh.shape
        axes = {axis for split in tensor.spec for axis in split}
        return next(stage.mesh.shape for stage in plan.stages if axes <= set(stage.mesh.shape))

    return mesh_of


def rows_of(judgement: "Judgement", mesh: Mapping[str, int], tensors: Iterable["Tensor"]) -> list[TensorRow]:
    """Tensors whose paths differ only in numbers and that are alike in all else, as one row each."""
    alike: dict[tuple, list[Tensor]] = {}
    for t in tensors:
        if t.role != "static":
            key = (_NUMBER.sub("*", t.path), t.shape, t.dtype, t.spec, t.role, judgement.kinds[t.path])
            alike.setdefault((*key, judgement.letters[t.path]), []).append(t)
    return [
        TensorRow(
            pattern if len(tensors_alike) > 1 else tensors_alike[0].path,
            tuple(t.path for t in tensors_alike),
            shape,
            dtype,
            spec,
            role,
            symbols(shape, letters, spec),
            sharding_words(shape, letters, spec, mesh),
            kind,
            bytes_on_device(shape, dtype, spec, mesh),
            tuple(mesh.items()),
        )
        for (pattern, shape, dtype, spec, role, kind, letters), tensors_alike in alike.items()
    ]


def tensor_view(rows: Sequence[TensorRow], title: str, width: int) -> Table:
    """Rows for a console of a width: paths take at most a third, so that no column is pushed out."""
    table = plain_table(title, ("path", "shape", "dtype", "sharding", "in words", "kind"), ("on a device",))
    # A width and not a least width, which rich takes from the other columns until the last is pushed out.
    table.columns[0].width = min(_WIDEST, width // 3, max((len(row.name) for row in rows), default=4))
    for row in rows:
        size = format_bytes(row.bytes_on_device)
        shape = "×".join(map(str, row.shape)) or "scalar"
        table.add_row(row.name, shape, row.dtype, row.symbols, row.words, row.kind, size)
    return table
