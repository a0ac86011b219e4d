"""When XLA's CPU backend holds each value: its kernels (`kernels.py`), in the order they run in (`orders.py`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.graph import Graph
from meshwright.graph.kernels import Kernels
from meshwright.graph.liveness import Liveness, pin_ends
from meshwright.graph.orders import Node, Region
from meshwright.rules.base import LoopNest

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class CpuLiveness(Liveness):
    """When values take memory in a program for CPUs.

    Attributes:
        copies: ``(operation, operand)`` where a contraction reads a transposed copy of what is stored as well.
        first_read: The time at which a kernel first reads each value; the number of steps for never.
    """

    copies: tuple[tuple[int, int], ...]
    first_read: Ints


def cpu_liveness(graph: Graph, nests: Sequence[LoopNest]) -> CpuLiveness:
    """As `liveness`, for XLA's CPU backend."""
    kernels = Kernels(graph, nests)
    order = _Orders(graph, kernels).run()
    step = _steps(graph, order)
    producer, num_steps = graph.columns.producer, len(step)
    stored = np.array(kernels.stored)
    stored[[v for v in graph.producer if producer[v] in kernels.reads.keys() - set(order)]] = False
    start = np.where(producer >= 0, step[producer], 0) if num_steps else np.zeros(len(stored), np.int64)
    stop, first_read = np.where(producer >= 0, start + 1, 0), np.full(len(stored), num_steps)
    for index in order:
        read = list(kernels.reads[index])
        stop[read] = np.maximum(stop[read], step[index] + 1)
        first_read[read] = np.minimum(first_read[read], step[index])
    for first, end in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]):
        # What a loop reads from outside lives until it ends; what it stacks up is there from its first trip on.
        times = step[first:end]
        used = {v for i in range(first, end) for v in kernels.reads.get(i, ())}
        outside = [v for v in used if not first <= producer[v] < end]
        stop[outside] = np.maximum(stop[outside], times.max() + 1)
        start[_stacked(graph, first, end)] = times.min()
    pin_ends(graph, stored, stop, num_steps)
    return CpuLiveness(stored, start, stop, step, kernels.last(step), tuple(kernels.copies), first_read)


def _stacked(graph: Graph, first: int, end: int) -> list[int]:
    """What the operations of a loop stack up."""
    columns = graph.columns
    return [int(columns.first_made[i]) for i in range(first, end) if columns.primitive(i) == "loop_stack"]


def _steps(graph: Graph, order: Sequence[int]) -> Ints:
    """When each operation runs: kernels in their order, each after what is fused into it and did not run before."""
    columns = graph.columns
    step, count = np.full(len(columns.signature), -1), 0
    waits = np.ones(len(step), bool)
    waits[order] = False  # kernels come at their own place
    producer = columns.producer.tolist()
    for index in order:
        stack, found = [index], {index}
        while stack:
            makers = (producer[value] for value in columns.reads_of(stack.pop()).tolist())
            new = {m for m in makers if m >= 0 and waits[m] and m not in found}
            found |= new
            stack += new
        for at in sorted(found):
            step[at] = count
            count += 1
            waits[at] = False
    rest = np.flatnonzero(step < 0)  # what became part of another kernel's work
    step[rest] = np.arange(count, count + len(rest))
    return step


class _Body(NamedTuple):
    """The kernels of a loop's body, or of the program, in the order in which they run.

    Attributes:
        order: The kernels.
        num_bytes: The most memory that they take.
        reads: All that they read.
    """

    order: list[int]
    num_bytes: float
    reads: frozenset[int]


class _Orders:
    """The order of all kernels: that of the program, with each loop's own in its place."""

    def __init__(self, graph: Graph, kernels: Kernels):
        self.graph, self.kernels = graph, kernels
        self.size = np.array([kind.num_bytes for kind in graph.kinds], float)[graph.kind].tolist()
        columns = graph.columns
        self.producer = columns.producer.tolist()
        made = zip(columns.first_made.tolist(), columns.num_made.tolist(), strict=True)
        self.made = [range(first, first + count) for first, count in made]
        self.loops = sorted(set(graph.loops), key=lambda loop: (loop[0], -loop[1]))

    def run(self) -> list[int]:
        return self._body(0, len(self.made), 0, self.graph.outputs).order

    def _body(self, first: int, end: int, number: int, ends: Sequence[int]) -> _Body:
        """Orders some operations; loops from a ``number`` on may lie within them."""
        nodes: dict[int, Node] = {}
        bodies: dict[int, _Body] = {}
        at = first
        for inner, (start, stop) in self._inside(first, end, number):
            nodes |= self._kernels(at, start)
            nodes[start], bodies[start] = self._loop(start, stop, inner)
            at = stop
        nodes |= self._kernels(at, end)
        names, num_bytes = Region(nodes, self.size, ends).best()
        reads = frozenset().union(*(body.reads for body in bodies.values()), *(node.reads for node in nodes.values()))
        order = [i for name in names for i in (bodies[name].order if name in bodies else (name,))]
        return _Body(order, num_bytes, reads)

    def _inside(self, first: int, end: int, number: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """The outermost loops among some operations, with their numbers."""
        at = first
        for later in range(number, len(self.loops)):
            start, stop = self.loops[later]
            if at <= start and stop <= end:
                yield later, (start, stop)
                at = stop

    def _kernels(self, first: int, end: int) -> dict[int, Node]:
        reads, stored = self.kernels.reads, self.kernels.stored
        return {i: Node([v for v in self.made[i] if stored[v]], reads[i]) for i in range(first, end) if i in reads}

    def _loop(self, first: int, end: int, number: int) -> tuple[Node, _Body]:
        """A loop as one node: it makes its carries and what it stacks up, and takes what its body takes besides."""
        ties = [t for t in self.graph.ties if first <= self.producer[t.carry] < end]
        stacked = _stacked(self.graph, first, end)
        body = self._body(first, end, number + 1, [*(t.made for t in ties), *stacked])
        makes = [*(t.carry for t in ties), *stacked]
        more = body.num_bytes - sum(self.size[v] for v in makes)
        outside = frozenset(v for v in body.reads if not first <= self.producer[v] < end)
        return Node(makes, outside, max(more, 0.0)), body
