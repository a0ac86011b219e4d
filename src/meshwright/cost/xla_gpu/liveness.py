"""Which values take memory, and from when to when, counted in operations of the graph.

This is a model of XLA's GPU compiler; each of its rules was derived from XLA's own buffer assignment:

- **Fusion.** `fusion.py` finds which values are in memory at all, and which overwrite others. What several kernels read
  is in memory where that moves fewer bytes (`traffic.py`), and what it is made of is let go.
- **Gradients wait.** No operation of a backward pass reads a weight's gradient, so a gradient that is reduced over
  devices is computed just before its first reader, to overlap with reductions; until then its operands are in memory.
  Barriers end the wait after the next layer (`layer_barriers.py`). This module computes that time; a choice decides
  which gradients are reduced (`planner.pricing.memory`).
- **Sent ahead.** The operands of an operation are sent while the contraction before it runs.
- **Layout copies.** A contraction's result is copied once, to the layout and type in which it is read, and so is a
  value that one loop stacks for another. A convolution's filter has its own layout: an argument is copied to that, and
  the update reads the copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Bools, Ints
from meshwright.cost.xla_gpu.fusion import fuse, written_over
from meshwright.cost.xla_gpu.layer_barriers import layer_barriers
from meshwright.cost.xla_gpu.traffic import Traffic, plain_traffic, traffic
from meshwright.graph.facts import Facts
from meshwright.graph.graph import Graph
from meshwright.graph.phases import BACKWARD, FORWARD, PHASES, UPDATE
from meshwright.jit import kernel
from meshwright.rules.base import LoopNest


class Copies(NamedTuple):
    """Copies of values in other layouts or types, as columns: the value, start, stop, and relative size of each."""

    value: Ints
    start: Ints
    stop: Ints
    size: NDArray[np.float64]

    def only(self, kept: Bools) -> "Copies":
        """The copies that a mask keeps."""
        return Copies(self.value[kept], self.start[kept], self.stop[kept], self.size[kept])


@dataclass(frozen=True)
class Liveness:
    """When each stored value takes memory. Times count operations, which run in the program's order.

    Attributes:
        stored: Whether a value is written to memory; other values exist only inside fused kernels.
        start: First time at which it takes memory.
        stop: Time after the last; no later than `start` if readers recompute it.
        copies: Copies that take memory besides the values.
        fuses: For each operation, whether it fuses the producers of its operands.
        before: For each operation the contraction before it in its loop, or the beginning of the loop.
        ready: For each value the time from which on it can be sent; for arguments and their conversions, this is the
            beginning.
        runs: For each operation the latest time at which it runs: its own, or for a gradient that of its first reader.
            A gradient's result is live from then on; the intervals of its operands end as if it did not wait.
        barriers: For each operation the one before which its result passes a barrier; -1 where it passes none.
        traffic: How often kernels read and write each value.
    """

    stored: Bools
    start: Ints
    stop: Ints
    copies: Copies
    fuses: Bools
    before: Ints
    ready: Ints
    runs: Ints
    barriers: Ints
    traffic: Traffic

    @property
    def num_steps(self) -> int:
        return len(self.runs)


def liveness(
    graph: Graph, nests: Sequence[LoopNest], num_devices: int | None = None, barriers: bool = False
) -> Liveness:
    """Finds which values are stored, and their intervals; a donated argument and its next value are one buffer.

    Args:
        graph: The graph.
        nests: The loop nest of each operation.
        num_devices: The number of devices that share the batch; None where that is not known.
        barriers: Whether the program has barriers between layers of its backward pass.
    """
    facts, columns = Facts(graph, nests), graph.columns
    found, (runs, passes) = fuse(facts), _moments(facts, barriers)
    moved = traffic(facts, found, num_devices)
    stored, kept = found.stored.copy(), (found.kept | (moved.writes > 0)) & ~found.passing
    stored |= kept
    again = stored & ~kept
    start, stop = _intervals(facts, kept, runs)
    stop[again] = start[again]
    copies = (_relaid(facts, runs), _filters(facts, stop), _transposed(found.apart))
    pin_ends(graph, stored, stop, len(runs))
    over, taken = written_over(facts, kept & stored, start, stop, runs)
    stop[over] = start[taken]
    given = _given(
        columns.reads, columns.start, columns.first_made, columns.num_made, facts.fusible, columns.num_values
    )
    return Liveness(
        stored,
        start,
        stop,
        Copies(*(np.concatenate(parts) for parts in zip(*copies, strict=True))),
        found.fuses,
        _contraction_before(facts),
        np.where(given, 0, start + 1),
        runs,
        passes,
        moved,
    )


def pin_ends(graph: Graph, stored: Bools, stop: Ints, num_steps: int) -> None:
    """Results live to the end, and so do arguments that the caller keeps; donated buffers are counted once."""
    outputs, inputs = np.array(graph.outputs, np.int64), np.array(graph.inputs, np.int64)
    stop[outputs] = num_steps
    donated = np.zeros(len(stop), bool)
    donated[list(graph.donated)] = True
    stop[inputs[~donated[inputs]]] = num_steps
    made, taken = outputs[list(graph.state.keys())], inputs[list(graph.state.values())]
    over = donated[taken] & (made != taken)
    stop[taken[over]] = num_steps
    stored[made[over]] = False


def _moments(facts: Facts, barriers: bool) -> tuple[Ints, Ints]:
    """The latest time at which each operation runs, and the barrier that its result passes, if any.

    A weight's gradient may wait, and so may operations that are fused to it.
    """
    columns = facts.columns
    aside = columns.phase == PHASES.index(UPDATE)  # no operation of the backward pass reads these
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
    may_wait = backward & (columns.num_made == 1) & (facts.fusible | facts.contracts)
    maker = np.where(np.append(may_wait, False)[columns.producer], columns.producer, -1)
    chains = columns.reads, columns.start, maker, facts.fusible, facts.num_readers == 1, made
    _wait(*chains, first, runs)
    passes = np.full(len(runs), -1)
    if not barriers:
        return runs, passes
    before = layer_barriers(facts, made, runs > np.arange(len(runs)))
    held, ended = before[columns.producer[made]], np.arange(len(runs))
    first[made] = np.where(held < 0, first[made], held)
    _wait(*chains, first, ended)
    return (ended, before) if _peak(facts, ended) <= _peak(facts, runs) else (runs, passes)


def _peak(facts: Facts, runs: Ints) -> int:
    """The most bytes of whole values that are live at once, if operations run at these times and all are stored."""
    columns = facts.columns
    start, stop = np.zeros((2, columns.num_values), np.int64)
    start[facts.made] = runs[facts.maker]
    stop[facts.made] = start[facts.made] + 1
    np.maximum.at(stop, columns.reads, runs[columns.reader] + 1)
    change = np.zeros(len(runs) + 2, np.int64)
    np.add.at(change, start, facts.graph.num_bytes)
    np.subtract.at(change, stop, facts.graph.num_bytes)
    return int(np.cumsum(change).max(initial=0))


@kernel
def _wait(reads, begin, maker, fusible, alone, made, until, runs):
    """Delays the producers of some values, and operations fused to them, until the values are read.

    Args:
        reads, begin: The operands of operations.
        maker: The operation that computes a value, if it may wait; otherwise -1.
        fusible: The operations that are fused to their readers.
        alone: The values that are read once.
        made, until: The values, and for each value when it is read.
        runs: When each operation runs, to be changed.
    """
    for value in made[::-1]:
        stack = [value]
        while stack:
            index = maker[stack.pop()]
            if index < 0:
                continue
            runs[index] = until[value]
            if fusible[index]:
                for k in range(begin[index], begin[index + 1]):
                    if alone[reads[k]]:
                        stack.append(reads[k])


def _intervals(facts: Facts, held: Bools, runs: Ints) -> tuple[Ints, Ints]:
    """Start and stop of each value."""
    columns = facts.columns
    start, stop = np.zeros((2, columns.num_values), np.int64)
    start[facts.made] = runs[facts.maker]
    stop[facts.made] = start[facts.made] + 1
    _reach(columns.reads, columns.start, columns.first_made, columns.num_made, held, stop)
    for first, end in sorted(facts.graph.loops, key=lambda loop: loop[0] - loop[1]):
        # Values that a loop reads from outside live until it ends; values that it stacks are live from its first trip.
        read = columns.reads[columns.start[first] : columns.start[end]]
        outside = read[start[read] < first]
        stop[outside] = np.maximum(stop[outside], end)
        start[columns.first_made[facts.stacks[(first <= facts.stacks) & (facts.stacks < end)]]] = first
    return start, stop


@kernel
def _reach(reads, begin, first_made, num_made, held, stop):
    """Extends each value to its readers; a reader inside a fused kernel runs when the kernel's result is stored."""
    for i in range(len(first_made) - 1, -1, -1):
        last = i + 1
        for value in range(first_made[i], first_made[i] + num_made[i]):
            if not held[value]:
                last = max(last, stop[value])
        for k in range(begin[i], begin[i + 1]):
            stop[reads[k]] = max(stop[reads[k]], last)


@kernel
def _given(reads, begin, first_made, num_made, fusible, num_values):
    """Whether each value is an argument, or is computed from arguments by fused operations."""
    given = np.ones(num_values, np.bool_)
    for i in range(len(first_made)):
        found = fusible[i]
        for k in range(begin[i], begin[i + 1]):
            found = found and given[reads[k]]
        given[first_made[i] : first_made[i] + num_made[i]] = found
    return given


def _contraction_before(facts: Facts) -> Ints:
    """For each operation the last contraction before it, or where its innermost loop begins."""
    found = np.zeros(len(facts.contracts), np.int64)
    found[1:] = np.maximum.accumulate(np.where(facts.contracts, np.arange(len(found)), 0))[:-1]
    for first, end in facts.graph.loops:
        found[first:end] = np.maximum(found[first:end], first)
    return found


def _relaid(facts: Facts, runs: Ints) -> Copies:
    """Copies of contractions' results, and of values that one loop stacks for another."""
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
    values = np.flatnonzero(copied >= 0)
    return Copies(values, copied[values], copied[values] + 1, size[values])


def _transposed(apart: Sequence[tuple[int, int]]) -> Copies:
    """Copies of values that products read, each in its own order, live while the product runs."""
    values, products = np.array(apart, np.int64).reshape(-1, 2).T
    return Copies(values, products, products + 1, np.ones(len(values)))


def _filters(facts: Facts, stop: Ints) -> Copies:
    """Copies of the arguments that are filters of convolutions, live from their first convolution on."""
    columns = facts.columns
    convolutions = np.flatnonzero(facts.where(lambda name, _: name == "conv_general_dilated"))[::-1]
    filters, first = columns.reads[columns.start[convolutions] + 1], np.full(columns.num_values, -1)
    first[filters] = convolutions
    first[columns.producer >= 0] = -1
    values = np.flatnonzero(first >= 0)
    return Copies(values, first[values], stop[values], np.ones(len(values)))


def plain_liveness(graph: Graph) -> Liveness:
    """As `liveness`, without fusion, copies or gradients that wait: the fallback if the model fails on a program."""
    columns = graph.columns
    num_ops, num_values = len(columns.signature), columns.num_values
    step, none = np.arange(num_ops), np.zeros(0, np.int64)
    stored = np.ones(num_values, bool)
    stored[list(graph.constants)] = False
    start = np.maximum(columns.producer, 0)
    stop = np.where(columns.producer >= 0, start + 1, 0)
    np.maximum.at(stop, columns.reads, columns.reader + 1)
    for first, end in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]):
        # Values that a loop reads from outside, carries or stacks are live from its first trip to its last.
        read = columns.reads[columns.start[first] : columns.start[end]]
        outside = read[start[read] < first]
        stop[outside] = np.maximum(stop[outside], end)
        stacked = [i for i in range(first, end) if columns.primitive(i) == "loop_stack"]
        start[columns.first_made[stacked]] = first
    for tie in graph.ties:
        stop[tie.made] = max(stop[tie.made], *(end for first, end in graph.loops if first <= start[tie.carry] < end), 0)
    pin_ends(graph, stored, stop, num_ops)
    nothing = Copies(none, none, none, none.astype(float))
    fuses = np.zeros(num_ops, bool)
    return Liveness(stored, start, stop, nothing, fuses, step, start + 1, step, step * 0 - 1, plain_traffic(graph))


def held_for_backward(graph: Graph, live: Liveness) -> Bools:
    """For each value, whether a forward operation computes it and it is in memory when the backward pass begins.

    The planner prices these values, and the runtime keeps exactly these: a backward pass computes again what XLA would
    have fused into its kernels, had both passes been one program.
    """
    columns, made = graph.columns, graph.columns.producer
    backward = np.flatnonzero(columns.phase == PHASES.index(BACKWARD))
    if not len(backward):
        return np.zeros(columns.num_values, bool)
    held = live.stored & (made >= 0) & (live.start < backward[0]) & (live.stop > backward[0])
    held[made >= 0] &= columns.phase[made[made >= 0]] == PHASES.index(FORWARD)
    return held
