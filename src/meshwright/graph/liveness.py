"""Which values take memory, and from when to when, counted in operations of the graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.graph import Graph
from meshwright.rules.base import LoopNest

# Elementwise operations that compilers do not repeat in each reader, since they cost more than a memory access.
_EXPENSIVE = frozenset(
    ("exp exp2 expm1 log log1p logistic tanh sin cos tan atan2 pow sqrt rsqrt cbrt erf erfc erf_inv div rem").split()
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
    start = np.zeros(len(graph.types), np.int64)
    stop = np.zeros(len(graph.types), np.int64)
    loop_of = _innermost_loop(graph)
    for index, op in enumerate(graph.ops):
        opened = loop_of[index][0] if op.primitive == "loop_stack" and loop_of[index] else index
        start[list(op.outputs)] = opened
        stop[list(op.outputs)] = index + 1
    for index in range(num_steps - 1, -1, -1):
        op = graph.ops[index]
        # A reader inside a fused kernel runs when the kernel's stored result is made.
        last = max((stop[v] for v in op.outputs if not stored[v]), default=0)
        for value in op.inputs:
            stop[value] = max(stop[value], index + 1, last)
    for first, end in graph.loops:
        inside = [v for op in graph.ops[first:end] for v in op.inputs]
        outer = [v for v in inside if start[v] < first]
        stop[outer] = np.maximum(stop[outer], end)
    _pin_ends(graph, stored, stop, num_steps)
    return Liveness(stored, start, stop, num_steps)


def _pin_ends(graph: Graph, stored: NDArray[np.bool_], stop: NDArray[np.int64], num_steps: int) -> None:
    stop[list(graph.outputs)] = num_steps
    kept = [v for v in graph.inputs if v not in graph.donated]
    stop[kept] = num_steps
    for output, argument in graph.state.items():
        made, taken = graph.outputs[output], graph.inputs[argument]
        if taken in graph.donated and made != taken:
            stop[taken] = num_steps
            stored[made] = False


def _stored(graph: Graph, nests: Sequence[LoopNest]) -> NDArray[np.bool_]:
    types = graph.types
    stored = np.zeros(len(types), bool)
    stored[list(graph.inputs)] = True
    readers: dict[int, int] = {}
    for op, nest in zip(graph.ops, nests, strict=True):
        fuses_inputs = nest.fusible or op.primitive.startswith(("reduce_", "arg"))
        for value in op.inputs:
            readers[value] = readers.get(value, 0) + 1
            if not fuses_inputs:
                stored[value] = True
        if not nest.fusible:
            stored[list(op.outputs)] = True
    for op in graph.ops:
        if op.primitive in _EXPENSIVE and any(readers.get(v, 0) > 1 for v in op.outputs):
            stored[list(op.outputs)] = True
    stored[list(graph.outputs)] = True
    stored[[t.made for t in graph.ties]] = True
    stored[list(graph.constants)] = False
    return stored


def _innermost_loop(graph: Graph) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = [None] * len(graph.ops)
    for first, end in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]):
        found[first:end] = [(first, end)] * (end - first)
    return found
