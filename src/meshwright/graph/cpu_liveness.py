"""When XLA's CPU backend holds each value: its kernels (`kernels.py`), in the order they run in (`orders.py`)."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.combining import combine
from meshwright.graph.conversions import Converted, Sent, convert, narrow_values
from meshwright.graph.graph import Graph
from meshwright.graph.kernels import Kernels
from meshwright.graph.orders import Node, depth_first
from meshwright.graph.simplified import Split
from meshwright.graph.xla_gpu.liveness import Copies, Liveness, pin_ends
from meshwright.rules.base import LoopNest

Ints = NDArray[np.int64]

_NONE = np.zeros(0, np.int64)
_NOTHING = Copies(_NONE, _NONE, _NONE, _NONE.astype(float))


class Copy(NamedTuple):
    """What a contraction reads in a layout of its own.

    Attributes:
        op, operand: The contraction, and which of its operands it is.
        is_transposed: Whether dims change places; if not, they are only merged.
        start, stop: When the copy takes memory.
    """

    op: int
    operand: int
    is_transposed: bool
    start: int
    stop: int


@dataclass(frozen=True)
class CpuLiveness(Liveness):
    """When values take memory in a program for CPUs. Time also counts the writing of copies.

    Attributes:
        copies: What contractions read in other layouts.
        first_read: The time at which a kernel first reads each value; the number of steps for never.
        reduced_at: When the results of operations are reduced over devices, as far as that is known.
        num_reductions: How many times that are.
        converted: What is held of values of narrow types, which are not `stored` by themselves: each as it is computed,
            as the program has it, or both.
        sent: For copies of such values in other shardings what is held of them: from when to when, and the bytes of an
            element.
        num_conversions: How much time converting takes.
    """

    copies: tuple[Copy, ...]
    first_read: Ints
    reduced_at: Mapping[int, int]
    num_reductions: int
    converted: Copies = _NOTHING
    sent: Mapping[Sent, Sequence[tuple[int, int, int]]] = field(default_factory=dict)
    num_conversions: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.step) + len(self.copies) + self.num_reductions + self.num_conversions


def cpu_liveness(graph: Graph, nests: Sequence[LoopNest], split: Split = Split()) -> CpuLiveness:  # noqa: B008
    """As `liveness`, for XLA's CPU backend; more exact where it is known how the program is split."""
    if not narrow_values(graph).any():
        return _held(graph, nests, split)
    found = convert(graph, nests, split.sent)
    reduced = {int(found.op[index]): key for index, key in split.reduced.items()}
    shardings = None if split.shardings is None else split.shardings[found.value]
    return _told_of(graph, found, _held(found.graph, found.nests, Split(reduced, shardings)))


def _told_of(graph: Graph, found: Converted, live: CpuLiveness) -> CpuLiveness:
    """The liveness of a graph with conversions, told of the graph before."""
    count, narrow = graph.columns.num_values, narrow_values(graph)[found.value]
    after, before = (np.array([kind.itemsize for kind in g.kinds], np.int64)[g.kind] for g in (found.graph, graph))
    old = {int(index): number for number, index in reversed(list(enumerate(found.op.tolist())))}
    stored = np.flatnonzero(narrow & live.stored & (live.stop > live.start)).tolist()
    spans = [(value, int(live.start[value]), int(live.stop[value])) for value in stored]
    copies: list[Copy] = []
    for copy in live.copies:
        value = int(found.graph.columns.reads_of(copy.op)[copy.operand])
        if value in found.sent or copy.op not in old:
            spans.append((value, copy.start, copy.stop))
        else:
            copies.append(copy._replace(op=old[copy.op]))
    sent: dict[Sent, list[tuple[int, int, int]]] = {copy: [] for copy in found.sent.values()}
    for value, start, stop in spans:
        if value in found.sent:
            sent[found.sent[value]].append((start, stop, int(after[value])))
    held = np.array([span for span in spans if span[0] not in found.sent], np.int64).reshape(-1, 3).T
    return CpuLiveness(
        (live.stored & ~narrow)[:count],
        live.start[:count],
        live.stop[:count],
        live.step[found.op],
        live.last[found.op],
        tuple(copies),
        live.first_read[:count],
        {old[index]: time for index, time in live.reduced_at.items()},
        live.num_reductions,
        Copies(found.value[held[0]], held[1], held[2], after[held[0]] / before[found.value[held[0]]]),
        sent,
        live.num_steps - len(found.op) - len(copies) - live.num_reductions,
    )


def _held(graph: Graph, nests: Sequence[LoopNest], split: Split) -> CpuLiveness:
    kernels = Kernels(graph, nests, split)
    num_ops, num_values = len(graph.columns.signature), graph.columns.num_values
    orders = _Orders(graph, kernels, split.reduced)
    order = orders.run()
    step = _steps(kernels, order, len(orders.groups))
    num_steps, num_kernels = len(step), num_ops + len(kernels.views)
    producer = np.concatenate([graph.columns.producer, np.arange(num_ops, num_kernels)])
    stored = np.array(kernels.stored)
    stored[[v for v in graph.producer if producer[v] in kernels.reads.keys() - set(order)]] = False
    start = np.where(producer >= 0, step[producer], 0) if num_steps else np.zeros(num_values, np.int64)
    stop, first_read = np.where(producer >= 0, start + 1, 0), np.full(len(producer), num_steps)
    for index in order:
        read = list(kernels.reads.get(index, ()))
        stop[read] = np.maximum(stop[read], step[index] + 1)
        first_read[read] = np.minimum(first_read[read], step[index])
    for first, end in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]):
        # What a loop reads from outside lives until it ends; what it carries or stacks up is there from its first trip.
        times = step[first:end]
        here = {*range(first, end), *(i for i, view in enumerate(kernels.views, num_ops) if first <= view.op < end)}
        used = {v for i in here for v in kernels.reads.get(i, ())}
        outside = [v for v in used if producer[v] not in here]
        stop[outside] = np.maximum(stop[outside], times.max() + 1)
        carried = [tie.carry for tie in graph.ties if first <= producer[tie.carry] < end]
        start[[*carried, *_stacked(graph, first, end)]] = times.min()
        stop[carried] = np.maximum(stop[carried], times.max() + 1)
    for tie in graph.ties:
        if tie.carry in kernels.in_place.get(int(producer[tie.made]), ()):
            stored[tie.made] = False  # it takes the carry's place
    _take_places(graph, kernels, order, step, stop)
    copies = tuple(
        Copy(view.op, view.operand, view.is_transposed, int(start[v]), int(stop[v]))
        for v, view in enumerate(kernels.views, num_values)
    )
    start, stop, first_read = start[:num_values], stop[:num_values], first_read[:num_values]
    pin_ends(graph, stored, stop, num_steps)
    reduced_at = {i: int(step[num_kernels + n]) for n, group in enumerate(orders.groups) for i in group}
    last = kernels.last(step[:num_ops])
    return CpuLiveness(stored, start, stop, step[:num_ops], last, copies, first_read, reduced_at, len(orders.groups))


def _take_places(graph: Graph, kernels: Kernels, order: Sequence[int], step: Ints, stop: Ints) -> None:
    """Ends what elementwise kernels read for the last time when they run: their results take its memory."""
    num_bytes = graph.num_bytes
    first = graph.columns.first_made
    lasting = {*graph.inputs, *graph.outputs, *(v for tie in graph.ties for v in (tie.made, tie.carry))}
    for index in order:
        for value in kernels.in_place.get(index, ()):
            ends = stop[value] == step[index] + 1 and value not in lasting
            if ends and kernels.stored[first[index]] and num_bytes[value] == num_bytes[first[index]]:
                stop[value] = step[index]
                break


def _stacked(graph: Graph, first: int, end: int) -> list[int]:
    """What the operations of a loop stack up."""
    columns = graph.columns
    return [int(columns.first_made[i]) for i in range(first, end) if columns.primitive(i) == "loop_stack"]


def _steps(kernels: Kernels, order: Sequence[int], num_reductions: int) -> Ints:
    """When each kernel runs, and each other operation: before what it is fused into, or when its like runs.

    What does the same as another but is a result of its own is a kernel, too, and comes at its own place.
    """
    program = kernels.program
    num_ops = len(program.operands)
    step, now = np.full(num_ops + len(kernels.views) + num_reductions, -1), 0
    waits = np.ones(len(step), bool)
    waits[order] = False  # kernels come at their own place
    others: dict[int, list[int]] = {}
    for index, first in enumerate(program.same):
        if first != index and waits[index]:
            waits[index] = False
            others.setdefault(first, []).append(index)
    for index in order:
        stack, found = [index] if index < num_ops else [], {index}
        while stack:
            makers = (program.producer[value] for value in program.operands[stack.pop()])
            new = {m for m in makers if m >= 0 and waits[m] and m not in found}
            found |= new
            stack += new
        for at in sorted(found):
            for one in (at, *others.get(at, ())):
                step[one] = now
                now += 1
                waits[one] = False
    rest = np.flatnonzero(step < 0)  # what became part of another kernel's work
    step[rest] = np.arange(now, now + len(rest))
    return step


class _Body(NamedTuple):
    """The kernels of a loop's body, or of the program, in the order in which they run, and all that they read."""

    order: list[int]
    reads: tuple[int, ...]


class _Orders:
    """The order of all kernels: that of the program, with each loop's own in its place."""

    def __init__(self, graph: Graph, kernels: Kernels, reduced: Mapping[int, Hashable]):
        self.graph, self.kernels, self.reduced = graph, kernels, reduced
        self.groups: list[list[int]] = []  # operations whose results are reduced at once
        columns = graph.columns
        size = graph.num_bytes.astype(float).tolist()
        self.size = size + [size[view.value] for view in kernels.views]
        self.partial = {index: len(self.size) + n for n, index in enumerate(reduced)}  # what is not reduced yet
        self.size += [size[int(columns.first_made[index])] for index in reduced]
        self.producer = columns.producer.tolist()
        made = zip(columns.first_made.tolist(), columns.num_made.tolist(), strict=True)
        self.made = [range(first, first + count) for first, count in made]
        self.loops = sorted(set(graph.loops), key=lambda loop: (loop[0], -loop[1]))
        self.views: dict[int, list[int]] = {}  # by the contraction for which a view is written
        for number, view in enumerate(kernels.views):
            self.views.setdefault(view.op, []).append(number)

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
        if any(index in nodes for index in self.reduced):
            nodes = self._with_reductions(nodes, ends)
        names = depth_first(nodes, self.size, ends)
        order = [i for name in names for i in (bodies[name].order if name in bodies else (name,))]
        return _Body(order, tuple(dict.fromkeys(v for node in nodes.values() for v in node.reads)))

    def _with_reductions(self, nodes: dict[int, Node], ends: Sequence[int]) -> dict[int, Node]:
        """Lets what is reduced be so by nodes of their own, several of them at once."""
        here = [index for index in self.reduced if index in nodes]
        for index in here:
            node = nodes[index]
            nodes[index] = Node([self.partial[index]], node.reads)
            nodes[self._reduction(index)] = Node(node.makes, [self.partial[index]])
        groups = combine(nodes, ends, {self._reduction(index): self.reduced[index] for index in here})
        single = {self._reduction(index): index for index in here}
        found = {name: node for name, node in nodes.items() if name not in single}
        for group in groups:
            name = len(self.made) + len(self.kernels.views) + len(self.groups)
            self.groups.append([single[one] for one in group])
            found[name] = Node(
                [v for one in group for v in nodes[one].makes], [v for one in group for v in nodes[one].reads]
            )
        return found

    def _reduction(self, index: int) -> int:
        """A name for the reduction of what one operation makes, before it is combined."""
        return -1 - index

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
        found = {i: Node([v for v in self.made[i] if stored[v]], reads[i]) for i in range(first, end) if i in reads}
        for op in range(first, end):
            for number in self.views.get(op, ()):
                name = len(self.made) + number
                found[name] = Node([len(self.producer) + number], reads[name])
        return found

    def _loop(self, first: int, end: int, number: int) -> tuple[Node, _Body]:
        """A loop as one node: it makes its carries and what it stacks up."""
        ties = [t for t in self.graph.ties if first <= self.producer[t.carry] < end]
        stacked = _stacked(self.graph, first, end)
        body = self._body(first, end, number + 1, [*(t.made for t in ties), *stacked])
        made = {v for i in range(first, end) for v in self.made[i]}
        made |= {len(self.producer) + n for op in range(first, end) for n in self.views.get(op, ())}
        return Node([*(t.carry for t in ties), *stacked], [v for v in body.reads if v not in made]), body
