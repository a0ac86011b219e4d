"""A program with the conversions that XLA's CPU backend puts around what it has no arithmetic for.

It computes bfloat16 in float32: what an operation reads is widened first, and what it makes is narrowed afterwards. So
a value is up to three arrays: as it is made, narrowed, and widened for its readers; which of them are in memory, fusion
decides (`kernels.py`). The rest is read off the programs that it compiles:

- Arguments and results are narrow, and what loops carry and stack up. What a loop reads from outside, all that it takes
  apart included, is widened before the loop; what a checkpoint reads from outside goes in narrow.
- What the program itself widens is read as it was made, unless its sharding is laid down before.
- What is resharded is widened, sent and narrowed; what another phase made waits narrow until then.
- CPUs that multiply bfloat16 keep what products read and make as it is (`Graph.narrow_products`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright import jax_compat
from meshwright.graph.graph import Columns, Graph, Tie
from meshwright.rules import loop_nest
from meshwright.rules.base import LoopNest, Signature, TensorType
from meshwright.rules.elementwise import EVEN

Ints = NDArray[np.int64]

RESHARDING = "resharding"

_HANDING_ON = frozenset({"loop_carry", "loop_stack", "branch_merge", "optimization_barrier"})
_NARROW = _HANDING_ON | {"convert_element_type"}  # what reads narrow values as they are, and makes such


class Sent(NamedTuple):
    """A copy of a value in another sharding, shared by those operations of a phase that read it so.

    Attributes:
        value: The value.
        target: A number for the sharding.
        phase: The phase.
        is_cut: Whether it is but a part of what a device has.
    """

    value: int
    target: int
    phase: str
    is_cut: bool


class Converted(NamedTuple):
    """A graph with its conversions.

    Attributes:
        graph: It; the values of the graph before have the same numbers.
        nests: Loop nest of each operation.
        value: For each value the one of the graph before that it holds.
        sent: For some values the copies that they hold.
        op: Where each operation of the graph before is; what the program itself widens is done where it is made.
    """

    graph: Graph
    nests: list[LoopNest]
    value: Ints
    sent: dict[int, Sent]
    op: Ints


def narrow_values(graph: Graph) -> NDArray[np.bool_]:
    """The values that the program has in a type which CPUs compute in a wider one."""
    return np.array([kind.dtype == "bfloat16" for kind in graph.kinds], bool)[graph.kind]


def narrows(op: Signature) -> bool:
    """Whether an operation is such a narrowing.

    >>> wide, narrow = TensorType((8,), "float32", 4), TensorType((8,), "bfloat16", 2)
    >>> narrows(Signature("convert_element_type", {}, (wide,), (narrow,)))
    True
    """
    types = [kind.dtype for kind in (*op.operands, *op.results)]
    return op.primitive == "convert_element_type" and types == ["float32", "bfloat16"]


def multiplies_narrow_types(op: Signature) -> bool | None:
    """Of a product of bfloat16 matrices, whether it is of several; None of all else.

    >>> matrix, dims = TensorType((8, 8), "bfloat16", 2), (((1,), (0,)), ((), ()))
    >>> multiplies_narrow_types(Signature("dot_general", {"dimension_numbers": dims}, (matrix, matrix), (matrix,)))
    False
    """
    if op.primitive != "dot_general" or any(kind.dtype != "bfloat16" for kind in op.operands):
        return None
    return bool(op.params["dimension_numbers"][1][0])


def reads_narrow(op: Signature, products: tuple[bool, bool]) -> bool:
    """Whether an operation reads narrow values as they are, and makes such; ``products`` as in `Graph`."""
    batched = multiplies_narrow_types(op)
    return op.primitive in _NARROW or (batched is not None and products[batched])


class Context(NamedTuple):
    """Where an operation stands: a number for the innermost loop, and whether it is done again for a checkpoint."""

    loop: int
    again: bool

    def sees(self, maker: "Context") -> bool:
        """Whether what stands here reads what is made there as it is; not from another loop or into a checkpoint."""
        return self.loop == maker.loop and self.again <= maker.again


def contexts(graph: Graph) -> list[Context]:
    """Where each operation stands."""
    loop = np.zeros(len(graph.columns.signature), np.int64)
    for number, (first, end) in enumerate(sorted(graph.loops, key=lambda loop: loop[0] - loop[1]), 1):
        loop[first:end] = number
    again = np.array([jax_compat.is_recomputed(scope) for scope in graph.columns.scopes], bool)[graph.columns.scope]
    return list(map(Context, loop.tolist(), again.tolist()))


def convert(graph: Graph, nests: Sequence[LoopNest], sent: Mapping[tuple[int, int], Sent]) -> Converted:
    """Writes the conversions of a graph down, and the resharding of what is ``sent`` to operations."""
    return _Writer(graph, nests, sent).write()


class _Writer:
    """Writes the operations of a graph once more, with conversions between them.

    Attributes:
        narrow: Which values are of a narrow type.
        wide: Those of them that are made wide.
        even: Those of them that are made element by element: no sharding is laid down between them and their readers,
            which would narrow them first.
        as_made: For what the program itself widens, the value whose wide form that is.
        narrowed, widened: The values that conversions make: of each value, and of each at each place.
        copied: The values that resharding makes, narrowed, of each copy in each loop.
        copies: All values that hold such copies.
    """

    def __init__(self, graph: Graph, nests: Sequence[LoopNest], sent: Mapping[tuple[int, int], Sent]):
        self.graph, self.columns, self.before, self.sent = graph, graph.columns, nests, sent
        self.names = [s.primitive for s in self.columns.signatures]
        self.keeps = [reads_narrow(s, graph.narrow_products) for s in self.columns.signatures]
        self.context = contexts(graph)
        self.narrow = narrow_values(graph)
        self.narrow[list(graph.constants)] = False
        makers = self.columns.producer
        keeps = np.array(self.keeps, bool)[self.columns.signature]
        self.wide = self.narrow & (makers >= 0) & ~np.append(keeps, False)[makers]
        even = np.array([_is_even(s) for s in self.columns.signatures], bool)[self.columns.signature]
        self.even = self.wide & np.append(even, False)[makers]
        self.as_made = self._widened_by_program()
        self.narrowed, self.widened = dict[int, int](), dict[tuple[int, int | tuple[int]], int]()
        self.copied, self.copies = dict[tuple[Sent, int], int](), dict[int, Sent]()
        self.signatures, self.known = list(self.columns.signatures), dict[tuple[int, bool], tuple[int, LoopNest]]()
        self.kind, self.value = self._kinds(), list(range(self.columns.num_values))
        self.nests: list[LoopNest] = []
        self.rows: list[tuple[int, int, int]] = []  # signature, first value made, operation before
        self.reads: list[list[int]] = []

    def _kinds(self) -> list[int]:
        """Numbers of types: those of the graph before, then of each its wide form and its narrow one."""
        count = len(self.graph.kinds)
        return (self.graph.kind + count * np.where(self.wide, 1, np.where(self.narrow, 2, 0))).tolist()

    def _widened_by_program(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for index in np.flatnonzero(np.array(self.names)[self.columns.signature] == "convert_element_type").tolist():
            (value,), made = self.columns.reads_of(index).tolist(), int(self.columns.first_made[index])
            is_float = self.graph.kinds[self.graph.kind[made]].dtype == "float32"
            if self.wide[value] and is_float and self._is_here(value, index) and (index, value) not in self.sent:
                found[made] = value
        return found

    def _is_here(self, value: int, index: int) -> bool:
        """Whether an operation reads a value that another makes as it is."""
        return self.context[index].sees(self.context[int(self.columns.producer[value])])

    def write(self) -> Converted:
        columns, needed, spread = self.columns, self._narrowings(), self._widenings()
        begin, end, place = list[int](), list[int](), list[int]()
        for index in range(-1, len(columns.signature)):
            if index >= 0:
                begin.append(len(self.rows))
                place.append(self._operation(index, place))
                for value in self._made(index):
                    if value in needed:
                        self.narrowed[value] = self._conversion(index, value, False)
                end.append(len(self.rows))
            for value in spread.get(index, ()):
                self._widen(max(index, 0), self.narrowed.get(value, value), index)
        graph = self.graph
        changed = replace(
            graph,
            kinds=(*graph.kinds, *map(_widened, graph.kinds), *map(_narrowed, graph.kinds)),
            kind=np.array(self.kind, np.int64),
            columns=self._columns(),
            outputs=tuple(self._handed_on(v) for v in graph.outputs),
            ties=tuple(Tie(self._handed_on(tie.made), tie.carry, tie.trips) for tie in graph.ties),
            loops=tuple((begin[a], end[b - 1]) for a, b in graph.loops),
            whiles=tuple((begin[a], end[b - 1]) for a, b in graph.whiles),
            branches=tuple((begin[a], end[b - 1]) for a, b in graph.branches),
        )
        return Converted(changed, self.nests, np.array(self.value, np.int64), self.copies, np.array(place, np.int64))

    def _made(self, index: int) -> range:
        first = int(self.columns.first_made[index])
        return range(first, first + int(self.columns.num_made[index]))

    def _operation(self, index: int, place: Sequence[int]) -> int:
        """Writes an operation down, unless its result is as another is made already; returns where."""
        first = int(self.columns.first_made[index])
        if first in self.as_made:
            return place[int(self.columns.producer[self.as_made[first]])]
        reads = [self._read(index, value) for value in self.columns.reads_of(index).tolist()]
        self._add(int(self.columns.signature[index]), first, index, reads, self.before[index])
        return len(self.rows) - 1

    def _widenings(self) -> dict[int, list[int]]:
        """The values that are widened once for all their readers, after each operation; -1 for the beginning."""
        found: dict[int, dict[int, None]] = {}
        for index, number in enumerate(self.columns.signature.tolist()):
            source = self.as_made.get(int(self.columns.first_made[index]), -1)
            is_read = not self.keeps[number] if source < 0 else not self.even[source]
            for value in self.columns.reads_of(index).tolist() if is_read else ():
                after = self._widened_after(index, value) if self.narrow[value] else None
                if after is not None and (index, value) not in self.sent:
                    found.setdefault(after, {})[value] = None
        return {after: list(values) for after, values in found.items()}

    def _widened_after(self, index: int, value: int) -> int | None:
        """The operation after which a value is widened for a reader: not in a loop that only the reader is in.

        None where it is for that reader and others in its loop and checkpoint alone.
        """
        maker = int(self.columns.producer[value])
        if self.context[index].again and not (maker >= 0 and self.context[maker].again):
            return None
        left = [end for first, end in self.graph.loops if first <= maker < end and not first <= index < end]
        return max(left, default=maker + 1) - 1

    def _narrowings(self) -> set[int]:
        """The values of which a narrow form is read."""
        columns, graph = self.columns, self.graph
        elided = np.zeros(len(columns.signature), bool)
        elided[columns.producer[[made for made, value in self.as_made.items() if self.even[value]]]] = True
        read = {*columns.reads[~elided[columns.reader]].tolist(), *graph.outputs, *(tie.made for tie in graph.ties)}
        return {value for value in read if self.wide[value]}

    def _read(self, index: int, value: int) -> int:
        """What an operation reads of a value, widened if it must be."""
        if not self.narrow[value]:
            return self._as_made(value)
        source, after = self.narrowed.get(value, value), self._widened_after(index, value)
        if (index, value) in self.sent:
            source, after = self._copy(index, self.sent[index, value], source), None
        if self.keeps[self.columns.signature[index]]:
            return source
        return self._widen(index, source, after)

    def _widen(self, index: int, source: int, after: int | None) -> int:
        """A narrow value widened: after an operation, or else before one for all of its loop."""
        key = source, (self.context[index].loop,) if after is None else after
        if key not in self.widened:
            self.widened[key] = self._conversion(index, source, True)
        return self.widened[key]

    def _copy(self, index: int, copy: Sent, source: int) -> int:
        """A value resharded for an operation, and narrowed again; what another phase made waits for that narrow."""
        key = copy, self.context[index].loop
        if key not in self.copied:
            maker, phase = int(self.columns.producer[copy.value]), self.columns.phase
            if maker < 0 or (phase[maker] == phase[index] and self._is_here(copy.value, index)):
                source = self._widen(index, source, self._widened_after(index, copy.value))
            kind = _widened(self.graph.kinds[self.graph.kind[copy.value]])
            self.signatures.append(Signature(RESHARDING, {}, (kind,), (kind,)))
            nest = LoopNest((), (), (), fusible=copy.is_cut)
            made = self._new(copy.value, 1)
            self.copies[made] = copy
            self._add(len(self.signatures) - 1, made, index, [source], nest)
            self.copied[key] = self._conversion(index, made, False)
        return self.copied[key]

    def _handed_on(self, value: int) -> int:
        """What a result or a loop's next trip takes of a value."""
        return self.narrowed.get(value, self._as_made(value))

    def _as_made(self, value: int) -> int:
        """What holds a value that is not narrow: another one if the program widened that."""
        source = self.as_made.get(value, value)
        if source == value or self.even[source]:
            return source
        return self.widened[self.narrowed[source], int(self.columns.producer[source])]

    def _new(self, value: int, form: int) -> int:
        """A new value that holds another, wide (1) or narrow (2)."""
        self.kind.append(int(self.graph.kind[value]) + form * len(self.graph.kinds))
        self.value.append(value)
        return len(self.kind) - 1

    def _conversion(self, index: int, source: int, widens: bool) -> int:
        """Writes a conversion of a value down, next to an operation."""
        value = self.value[source]
        kind = int(self.graph.kind[value])
        if (kind, widens) not in self.known:
            forms = _narrowed(self.graph.kinds[kind]), _widened(self.graph.kinds[kind])
            before, after = forms if widens else forms[::-1]
            self.signatures.append(Signature("convert_element_type", {}, (before,), (after,)))
            self.known[kind, widens] = len(self.signatures) - 1, loop_nest(self.signatures[-1])
        (number, nest), made = self.known[kind, widens], self._new(value, 1 if widens else 2)
        if source in self.copies:
            self.copies[made] = self.copies[source]
        self._add(number, made, index, [source], nest)
        return made

    def _add(self, signature: int, made: int, index: int, reads: list[int], nest: LoopNest) -> None:
        self.rows.append((signature, made, index))
        self.reads.append(reads)
        self.nests.append(nest)

    def _columns(self) -> Columns:
        signature, made, index = np.array(self.rows, np.int64).reshape(-1, 3).T
        columns = self.columns
        return replace(
            columns,
            signature=signature,
            reads=np.array(list(chain.from_iterable(self.reads)), np.int64),
            start=np.cumsum([0, *map(len, self.reads)]),
            first_made=made,
            scope=columns.scope[index],
            trips=columns.trips[index],
            serial=columns.serial[index],
            equation=[
                columns.equation[i] if n < len(columns.signatures) else None
                for n, i in zip(signature.tolist(), index.tolist(), strict=True)
            ],
            num_values=len(self.kind),
            signatures=self.signatures,
        )


def _is_even(op: Signature) -> bool:
    return op.primitive in EVEN and all(kind.shape in ((), op.results[0].shape) for kind in op.operands)


def _widened(kind: TensorType) -> TensorType:
    return TensorType(kind.shape, "float32", 4)


def _narrowed(kind: TensorType) -> TensorType:
    return TensorType(kind.shape, "bfloat16", 2)
