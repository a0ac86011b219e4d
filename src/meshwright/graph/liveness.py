"""Which values take memory, and from when to when, counted in operations of the graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.graph import Graph
from meshwright.rules.base import LoopNest

# Elementwise operations that a compiler rather stores than repeats in each reader. XLA's CPU backend does; its GPU
# backend repeats some of them, so that this was up to 13% too much there (see benchmarks/compiled.py).
_EXPENSIVE = frozenset(
    "exp exp2 expm1 log log1p logistic tanh sin cos tan atan2 pow sqrt rsqrt cbrt erf erfc erf_inv div rem".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Liveness:
    """When each stored value takes memory.

    Attributes:
        stored: Whether a value is written to memory; the rest live inside fused kernels.
        start: First operation index at which it is live.
        stop: Operation index after its last.
        num_steps: Number of operations.
    """

    stored: NDArray[np.bool_]
    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    num_steps: int


def liveness(graph: Graph, nests: Sequence[LoopNest]) -> Liveness:
    """Works out which values are stored, and their intervals; a donated argument and its next value are one buffer."""
    stored = _stored(graph, nests)
    num_steps = len(graph.ops)
    start, stop = [0] * len(graph.types), [0] * len(graph.types)
    loop_of = _innermost_loop(graph)
    for index, op in enumerate(graph.ops):
        loop = loop_of[index] if op.primitive == "loop_stack" else None
        for value in op.outputs:
            start[value] = loop[0] if loop else index
            stop[value] = index + 1
    for index in range(num_steps - 1, -1, -1):
        op = graph.ops[index]
        last = index + 1
        for value in op.outputs:  # a reader inside a fused kernel runs when the kernel's stored result is made
            if not stored[value] and stop[value] > last:
                last = stop[value]
        for value in op.inputs:
            if stop[value] < last:
                stop[value] = last
    for first, end in graph.loops:
        for op in graph.ops[first:end]:
            for value in op.inputs:
                if start[value] < first and stop[value] < end:
                    stop[value] = end
    kept = np.array(stored)
    return _pin_ends(graph, Liveness(kept, np.array(start), np.array(stop), num_steps))


def _pin_ends(graph: Graph, live: Liveness) -> Liveness:
    """Results live to the end, and so do arguments that the caller keeps; donated buffers are counted once."""
    live.stop[list(graph.outputs)] = live.num_steps
    live.stop[[v for v in graph.inputs if v not in graph.donated]] = live.num_steps
    for output, argument in graph.state.items():
        made, taken = graph.outputs[output], graph.inputs[argument]
        if taken in graph.donated and made != taken:
            live.stop[taken] = live.num_steps
            live.stored[made] = False
    return live


def _stored(graph: Graph, nests: Sequence[LoopNest]) -> list[bool]:
    """What a kernel that cannot be fused reads or writes is in memory; cheap work is done again in each reader."""
    stored = [False] * len(graph.types)
    readers = [0] * len(graph.types)
    for op, nest in zip(graph.ops, nests, strict=True):
        fuses_inputs = nest.fusible or op.primitive.startswith(("reduce_", "arg"))
        for value in op.inputs:
            readers[value] += 1
            if not fuses_inputs:
                stored[value] = True
        if not nest.fusible:
            for value in op.outputs:
                stored[value] = True
    for op in graph.ops:
        if op.primitive in _EXPENSIVE and any(readers[v] > 1 for v in op.outputs):
            for value in op.outputs:
                stored[value] = True
    for value in (*graph.inputs, *graph.outputs, *(t.made for t in graph.ties)):
        stored[value] = True
    for value in graph.constants:
        stored[value] = False
    return stored


def _innermost_loop(graph: Graph) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = [None] * len(graph.ops)
    for first, end in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]):
        found[first:end] = [(first, end)] * (end - first)
    return found
