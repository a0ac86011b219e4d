"""Which values take memory, and from when to when, counted in operations of the graph.

A model of what XLA makes of a program for GPUs (for its CPU backend see `cpu_liveness.py`); each of its rules was read
off XLA's own assignment of buffers:

- **Fusion.** What a kernel that cannot be fused reads or writes is in memory; cheap elementwise work lives inside
  kernels and is done again in each reader, costly work with several readers is written once.
- **Made again.** Costly work that takes more memory than what it is made from is done again all the same.
- **Gradients wait.** Nothing in a backward pass waits for a weight's gradient, so one that is reduced over devices is
  computed just before its first reader, to fill the time of reductions; until then all it is made from is in memory.
  Here stands when that would be; which gradients are reduced, a choice decides (`planner.memory`).
- **Laid out anew.** A contraction's result is copied once, to the layout and type in which it is read, and so is what
  one loop stacks up for another.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshwright.graph.graph import Graph
from meshwright.graph.phases import BACKWARD, PHASES, UPDATE
from meshwright.rules.base import LoopNest

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

COSTLY = frozenset(
    "exp exp2 expm1 log log1p logistic tanh sin cos tan atan2 pow sqrt rsqrt cbrt erf erfc erf_inv div rem".split()  # noqa: SIM905
)
_MOST_AGAIN = 64  # operations that are looked through, at most, for what a value is made from


@dataclass(frozen=True)
class Liveness:
    """When each stored value takes memory. Times count operations in the order in which they run.

    Attributes:
        stored: Whether a value is written to memory; the rest live inside fused kernels.
        start: First time at which it takes memory.
        stop: Time after its last; no later than `start` where readers make it again.
        step: The time at which each operation runs, or runs first.
        last: The time at which it runs last: what is fused into several kernels runs in each of them.
    """

    stored: Bools
    start: Ints
    stop: Ints
    step: Ints
    last: Ints

    @property
    def num_steps(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class AcceleratorLiveness(Liveness):
    """When values take memory on GPUs; operations run in the program's order.

    Attributes:
        copied: Time at which a second copy of a value is in memory; -1 for never.
        copy_size: Size of that copy, relative to the value.
        runs: For each operation the latest time at which it runs: its own, or for a gradient that of its first reader.
            What a gradient makes starts then; what it reads ends as if nothing waited.
    """

    copied: Ints
    copy_size: NDArray[np.float64]
    runs: Ints


def liveness(graph: Graph, nests: Sequence[LoopNest]) -> AcceleratorLiveness:
    """Works out which values are stored, and their intervals; a donated argument and its next value are one buffer."""
    facts = Facts(graph, nests)
    stored, costly = _stored(facts)
    again = _made_again(graph, stored, costly)
    runs = _moments(facts)
    held = stored.copy()
    held[again] = False
    start, stop = _intervals(facts, held, runs)
    stop[again] = start[again]
    pin_ends(graph, stored, stop, len(runs))
    order = np.arange(len(runs))
    return AcceleratorLiveness(stored, start, stop, order, order, *_copies(facts, runs), runs)


class Facts:
    """What the rules look at: of each operation, what it is; of each value, who makes it and how many read it."""

    def __init__(self, graph: Graph, nests: Sequence[LoopNest]):
        self.graph, self.columns = graph, graph.columns
        used, examples = np.unique(self.columns.signature, return_index=True)
        self._kinds = [(n, self.columns.signatures[n].primitive, nests[i]) for n, i in zip(used, examples, strict=True)]
        self.fusible = self.where(lambda _, nest: nest.fusible)
        self.contracts = self.where(lambda _, nest: nest.flops > 0)
        self.stacks = np.flatnonzero(self.where(lambda name, _: name == "loop_stack"))
        self.made = np.flatnonzero(self.columns.producer >= 0)
        self.maker = self.columns.producer[self.made]
        self.num_readers = np.bincount(self.columns.reads, minlength=self.columns.num_values)
        self.ends = [*graph.outputs, *(t.made for t in graph.ties)]  # for the caller, or for a loop's next trip

    def where(self, test: Callable[[str, LoopNest], bool]) -> Bools:
        """The operations whose primitive and loop nest pass a test."""
        found = np.zeros(len(self.columns.signatures), bool)
        found[[number for number, name, nest in self._kinds if test(name, nest)]] = True
        return found[self.columns.signature]


def pin_ends(graph: Graph, stored: Bools, stop: Ints, num_steps: int) -> None:
    """Results live to the end, and so do arguments that the caller keeps; donated buffers are counted once."""
    stop[list(graph.outputs)] = num_steps
    stop[[v for v in graph.inputs if v not in graph.donated]] = num_steps
    for output, argument in graph.state.items():
        made, taken = graph.outputs[output], graph.inputs[argument]
        if taken in graph.donated and made != taken:
            stop[taken] = num_steps
            stored[made] = False


def _stored(facts: Facts) -> tuple[Bools, list[int]]:
    """Whether each value is stored, and the values that are so for their cost alone, in the order they are made."""
    columns, stored = facts.columns, np.zeros(facts.columns.num_values, bool)
    stored[facts.made] = ~facts.fusible[facts.maker]
    fuses_inputs = facts.fusible | facts.where(lambda name, _: name.startswith(("reduce_", "arg")))
    stored[columns.reads[~fuses_inputs[columns.reader]]] = True
    stored[[*facts.graph.inputs, *facts.ends]] = True
    stored[list(facts.graph.constants)] = False
    costly = facts.made[facts.where(lambda name, _: name in COSTLY)[facts.maker]]
    costly = costly[(facts.num_readers[costly] > 1) & ~stored[costly]]
    stored[costly] = True
    return stored, costly[np.argsort(columns.producer[costly])].tolist()


def _made_again(graph: Graph, stored: Bools, costly: Sequence[int]) -> list[int]:
    """Of the values that are stored for their cost alone, those that take more than what they are made from."""
    columns, size = graph.columns, [kind.num_bytes for kind in graph.kinds]
    again: set[int] = set()
    for value in costly:
        room, seen = size[graph.kind[value]], {value}
        stack = columns.reads_of(columns.producer[value]).tolist()
        while stack and room > 0 and len(seen) <= _MOST_AGAIN:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if stored[source] and source not in again:
                room -= size[graph.kind[source]]
            elif columns.producer[source] >= 0:
                stack += columns.reads_of(columns.producer[source]).tolist()
        if not stack and room > 0:
            again.add(value)
    return sorted(again)


def _moments(facts: Facts) -> Ints:
    """When each operation runs at the latest: a weight's gradient, and what is fused to it, at its first reader."""
    columns = facts.columns
    aside = columns.phase == PHASES.index(UPDATE)  # nothing in the backward pass waits for these
    aside[facts.stacks] = True
    backward = columns.phase == PHASES.index(BACKWARD)
    reads = aside[columns.reader]
    read, reader = columns.reads[reads], columns.reader[reads]
    waits = np.bincount(read, minlength=columns.num_values) == facts.num_readers
    waits[facts.ends] = False
    first = np.zeros(columns.num_values, np.int64)
    first[read[::-1]] = reader[::-1]
    runs = np.arange(len(columns.signature))
    made = facts.made[backward[facts.maker] & waits[facts.made] & (facts.num_readers[facts.made] > 0)]
    waiting = list(zip(made.tolist(), first[made].tolist(), strict=True))
    while waiting:
        value, at = waiting.pop()
        index = columns.producer[value]
        if index < 0 or not backward[index] or columns.num_made[index] > 1:
            continue
        if facts.fusible[index]:
            waiting += [(v, at) for v in columns.reads_of(index).tolist() if facts.num_readers[v] == 1]
        if facts.fusible[index] or facts.contracts[index]:
            runs[index] = at
    return runs


def _intervals(facts: Facts, held: Bools, runs: Ints) -> tuple[Ints, Ints]:
    """Start and stop of each value."""
    columns = facts.columns
    start, stop = np.zeros((2, columns.num_values), np.int64)
    start[facts.made] = runs[facts.maker]
    stop[facts.made] = start[facts.made] + 1
    _reach(columns.reads, columns.start, columns.first_made, columns.num_made, held, stop)
    for first, end in sorted(facts.graph.loops, key=lambda loop: loop[0] - loop[1]):
        # What a loop reads from outside lives until it ends; what it stacks up is there from its first trip on.
        read = columns.reads[columns.start[first] : columns.start[end]]
        outside = read[start[read] < first]
        stop[outside] = np.maximum(stop[outside], end)
        start[columns.first_made[facts.stacks[(first <= facts.stacks) & (facts.stacks < end)]]] = first
    return start, stop


@njit(cache=True)
def _reach(reads, begin, first_made, num_made, held, stop):
    """Prolongs each value to its readers; one inside a fused kernel runs when the kernel's stored result is made."""
    for i in range(len(first_made) - 1, -1, -1):
        last = i + 1
        for value in range(first_made[i], first_made[i] + num_made[i]):
            if not held[value]:
                last = max(last, stop[value])
        for k in range(begin[i], begin[i + 1]):
            stop[reads[k]] = max(stop[reads[k]], last)


def _copies(facts: Facts, runs: Ints) -> tuple[Ints, NDArray[np.float64]]:
    """When a second copy of each value is in memory, and how large it is."""
    columns, graph = facts.columns, facts.graph
    copied, size = np.full(columns.num_values, -1), np.ones(columns.num_values)
    copied[columns.first_made[facts.contracts]] = runs[facts.contracts]
    copied[facts.num_readers == 0] = -1
    stacked = np.zeros(columns.num_values, bool)
    stacked[columns.first_made[facts.stacks]] = True
    slices = np.flatnonzero(facts.where(lambda name, _: name == "loop_slice"))
    whole = columns.reads[columns.start[slices]]
    copied[whole[stacked[whole]]] = slices[stacked[whole]]
    converts = np.flatnonzero(facts.where(lambda name, _: name == "convert_element_type"))
    width = np.array([max(kind.itemsize, 1) for kind in graph.kinds])[graph.kind]
    narrow, wide = columns.reads[columns.start[converts]], columns.first_made[converts]
    np.maximum.at(size, narrow, width[wide] / width[narrow])
    return copied, size
