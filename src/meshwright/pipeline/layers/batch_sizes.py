"""The graph of a microbatch of any size, from two traces: sizes grow in step with the rows of the batch.

Tracing a large model takes seconds, and a search tries a dozen sizes of microbatch. Every dim of every tensor, and
every loop of every loop nest, is ``a + b · rows``; two traces determine ``a`` and ``b``.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from meshwright.errors import ShardingError, TraceError
from meshwright.graph import Graph, Traced, trace
from meshwright.planner.grouping.numbering import number_rows, pack
from meshwright.planner.grouping.roles import find_roles
from meshwright.rules import loop_nest
from meshwright.rules.base import LoopNest, Signature, TensorType

Resized = tuple[Graph, Mapping[int, LoopNest]]


class ResizableBatch:
    """A traced function with a batch of any number of rows.

    Attributes:
        batch: Rows of the whole batch; 1 where there is none.
    """

    def __init__(self, traced: Traced):
        self.whole = traced.graph
        self.batch, leaves = _batch(traced)
        self._double: Graph | None = _doubled(traced, leaves, self.batch) if leaves else None
        if self._double is not None and not _alike(self.whole, self._double):
            self._double = None
        self._pairs = None if self._double is None else _Pairs(self.whole, self._double)

    @property
    def resizes(self) -> bool:
        """Whether the number of rows of the batch can be changed."""
        return self._pairs is not None

    def at(self, rows: int) -> Resized | None:
        """The graph with a number of rows and its loop nests by signature; None if a size would not be an integer."""
        if rows == self.batch:
            columns = self.whole.columns
            return self.whole, {n: loop_nest(columns.signatures[n]) for n in columns.examples}
        return None if self._pairs is None else self._pairs.resized(rows, self.batch)


class _Pairs:
    """Types and signatures of the two traces, side by side."""

    def __init__(self, whole: Graph, double: Graph):
        self.whole, self.double = whole, double
        self.kind, first = number_rows(pack(whole.kind, double.kind))
        self.kinds = [(whole.kinds[whole.kind[i]], double.kinds[double.kind[i]]) for i in first.tolist()]
        one, two = whole.columns, double.columns
        self.signature, first = number_rows(pack(one.signature, two.signature))
        pairs = [(one.signatures[one.signature[i]], two.signatures[two.signature[i]]) for i in first.tolist()]
        self.signatures = pairs
        self.nests = [(loop_nest(a), loop_nest(b)) for a, b in pairs]

    def resized(self, rows: int, batch: int) -> Resized | None:
        """Everything at a number of rows."""

        def size(a: int, b: int) -> int:
            grown = (b - a) * (rows - batch)
            if a != b and (grown % batch or a + grown // batch < 1):
                raise _NotWholeError
            return a + grown // batch

        try:
            kinds = tuple(_type(a, b, size) for a, b in self.kinds)
            signatures = tuple(_signature(a, b, size) for a, b in self.signatures)
            nests = {n: _nest(a, b, size, rows / batch) for n, (a, b) in enumerate(self.nests)}
        except _NotWholeError:
            return None
        columns = replace(self.whole.columns, signature=self.signature, signatures=signatures)
        return replace(self.whole, kinds=kinds, kind=self.kind, columns=columns), nests


class _NotWholeError(Exception):
    """A size would not be an integer at some number of rows."""


Size = Callable[[int, int], int]


def _type(a: TensorType, b: TensorType, size: Size) -> TensorType:
    if a == b:
        return a
    return TensorType(tuple(size(m, n) for m, n in zip(a.shape, b.shape, strict=True)), a.dtype, a.itemsize)


def _signature(a: Signature, b: Signature, size: Size) -> Signature:
    operands, results = (
        tuple(_type(m, n, size) for m, n in zip(one, two, strict=True))
        for one, two in ((a.operands, b.operands), (a.results, b.results))
    )
    return replace(a, operands=operands, results=results)


def _nest(a: LoopNest, b: LoopNest, size: Size, share: float) -> LoopNest:
    if a == b:
        return a
    if (a.operands, a.results) != (b.operands, b.results):
        raise _NotWholeError
    loops = tuple(replace(m, size=size(m.size, n.size)) for m, n in zip(a.loops, b.loops, strict=True))
    return replace(a, loops=loops, flops=a.flops + (b.flops - a.flops) * (share - 1))


def _batch(traced: Traced) -> tuple[int, list[int]]:
    """Rows of the batch, and the arguments' leaves (by input position) that are stacks of them."""
    graph, data = traced.graph, set(find_roles(traced.graph).data)
    shapes = {i: graph.types[v].shape for i, v in enumerate(graph.inputs) if v in data and graph.types[v].shape}
    if not shapes:
        return 1, []
    leading = [shape[0] for shape in shapes.values()]
    rows = max(set(leading), key=lambda size: (leading.count(size), size))
    return rows, [i for i, shape in shapes.items() if shape[0] == rows]


def _doubled(traced: Traced, leaves: list[int], rows: int) -> Graph | None:
    """The graph with twice the rows; None if the function cannot be traced with them."""
    import jax

    types = list(traced.call.types)
    for i in leaves:
        types[i] = jax.ShapeDtypeStruct((2 * rows, *types[i].shape[1:]), types[i].dtype)
    try:
        return trace(traced.function, *traced.call.arguments.fill(types), cluster=traced.cluster).graph
    except (TraceError, ShardingError):
        return None


def _alike(one: Graph, two: Graph) -> bool:
    """Whether two graphs differ in sizes alone."""
    a, b = one.columns, two.columns
    if len(a.signature) != len(b.signature) or not np.array_equal(a.reads, b.reads):
        return False
    names = ([c.signatures[n].primitive for n in c.signature.tolist()] for c in (a, b))
    return np.array_equal(a.first_made, b.first_made) and next(names) == next(names)
