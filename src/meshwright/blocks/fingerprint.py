"""Fingerprints: equal for blocks that do the same work, whatever their depth, position and names.

A fingerprint covers the operations of a block's forward pass that depend on the program's inputs, with their
parameters, types and connections, and the contractions of its backward pass. It leaves out what differs between the
first, the middle and the last layer although their work is the same: how many residual gradients are added up, tables
that all layers share, what is kept for the backward pass, and the length of a scan.
"""

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.blocks.numbering import LAYOUT, depends_on_inputs
from meshwright.graph import FORWARD, Graph, Op
from meshwright.rules.base import TensorType

_ADDRESS = re.compile(r" at 0x[0-9a-f]+|id=\d+")
_LOOPS = ("loop_carry", "loop_slice", "loop_stack")


def told_operations(graph: Graph) -> set[int]:
    """The operations that fingerprints cover: arrays that depend on inputs and that the forward pass itself needs."""
    given, needed = depends_on_inputs(graph), _needed_forward(graph)
    return {
        index
        for index, op in enumerate(graph.ops)
        if op.primitive not in _LOOPS
        and any(value in needed and value in given and graph.types[value].shape for value in op.outputs)
    }


def _needed_forward(graph: Graph) -> set[int]:
    """Values that results of the forward pass depend on, through loops too; not what only a backward pass reads."""
    forward = [op for op in graph.ops if op.phase == FORWARD]
    results = {value for op in forward for value in op.outputs}
    needed, waiting = set[int](), [value for value in graph.outputs if value in results]
    while waiting:
        needed.update(waiting)
        for op in reversed(forward):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
        waiting = [tie.made for tie in graph.ties if tie.carry in needed and tie.made in results - needed]
    return needed


def fingerprint(graph: Graph, told: Sequence[int], contractions: Iterable[int]) -> str:
    """The fingerprint of a block.

    Args:
        graph: The program.
        told: Those of the block's operations that it covers, in order.
        contractions: The block's contractions; it covers those of the backward pass.
    """
    places: dict[int, int] = {}
    lines: list[str] = []
    for op in _without_last_layouts([graph.ops[index] for index in told]):
        reads = [f"#{places[v]}" if v in places else _type(graph.types[v]) for v in op.inputs]
        lines.append(_line(op, reads, graph))
        places.update((value, len(places) + nth) for nth, value in enumerate(op.outputs))
    backward = [graph.ops[index] for index in contractions if graph.ops[index].phase != FORWARD]
    lines += sorted(_line(op, [_type(graph.types[v]) for v in op.inputs], graph) for op in backward)
    return digest(lines)


def _without_last_layouts(ops: Sequence[Op]) -> list[Op]:
    """The operations without changes of layout at their end: these are what the next reader wants, not work."""
    kept: list[Op] = []
    read: set[int] = set()
    for op in reversed(ops):
        if op.primitive not in LAYOUT or not read.isdisjoint(op.outputs):
            kept.append(op)
            read.update(op.inputs)
    return kept[::-1]


def digest(lines: Iterable[str]) -> str:
    """A short stable hex string for some lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _line(op: Op, reads: Sequence[str], graph: Graph) -> str:
    results = ",".join(_type(graph.types[value]) for value in op.outputs)
    return f"{op.primitive}[{_params(op.signature.params)}]({','.join(reads)})->{results}"


def _type(kind: TensorType) -> str:
    return f"{kind.dtype}{list(kind.shape)}"


def _params(params: Any) -> str:
    """Parameters as text without addresses, which differ from run to run."""
    return _ADDRESS.sub("", ",".join(f"{name}={params[name]!r}" for name in sorted(params)))
