"""What devices send to their neighbours on an axis that splits a window or the positions that attention mixes."""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Floats
from meshwright.graph import Graph, Op
from meshwright.rules import LoopNest
from meshwright.strategy.candidates import Assignment, tensor_holders
from meshwright.strategy.sharding import Axes

_FLOAT32 = 4  # bytes of a number in which blocks of attention are added up


def borders(graph: Graph, op: Op, nest: LoopNest, axes: Axes, loops: Assignment) -> Iterator[tuple[int, Floats]]:
    """The axis and the bytes, under each strategy, of each permute of a border of an operation's first operand.

    A split window reads its neighbours' borders. One comes from each side, so there are two permutes, except where the
    halo is a single element, as for most windows of stride 2.
    """
    for i, loop in enumerate(nest.loops):
        if not loop.halo or not (loops == i).any():
            continue
        dims, tensor = nest.operands[0], graph.types[op.inputs[0]]
        size = next((tensor.shape[d] for d, dim in enumerate(dims) if i in dim), loop.size)
        local = tensor.num_bytes / axes.num_parts(axes.pack(tensor_holders(dims, loops, len(nest.loops))))
        for axis in range(axes.num_axes):
            share, sides = min(1.0, loop.halo * axes.sizes[axis] / size), min(loop.halo, 2)
            for _ in range(sides):
                yield axis, np.where(loops[:, axis] == i, local * share / sides, 0.0)


class Mixed(NamedTuple):
    """What is sent over some axes that split the positions that an operation mixes, in bytes under each strategy.

    Attributes:
        along: The axes.
        num_devices: The number of devices on them.
        exchanged: What is exchanged in halves before and after, so that all devices have as much to compute.
        passed: What goes around in a ring, until the last device has had it.
        returned: What goes around with it and comes back to where it began.
        held: Memory for all of that meanwhile.
    """

    along: tuple[int, ...]
    num_devices: int
    exchanged: list[Floats]
    passed: Floats
    returned: Floats
    held: Floats


def mixed(graph: Graph, op: Op, nest: LoopNest, axes: Axes, loops: Assignment) -> Iterator[Mixed]:
    """What is sent for each loop over positions, and each set of axes that splits it under some strategies."""
    mixing, bits, size = nest.mixing, 1 << np.arange(axes.num_axes), len(loops)
    tensors = list(zip((*op.inputs, *op.outputs), (*nest.operands, *nest.results), strict=True))
    for loop in {mixing.queries, mixing.ring} - {-1}:
        masks = (loops == loop) @ bits
        for mask in set(masks.tolist()) - {0}:
            along = tuple(axis for axis in range(axes.num_axes) if mask >> axis & 1)
            passed, returned, summed, exchanged = np.zeros(size), np.zeros(size), np.zeros(size), list[Floats]()
            for place, (value, dims) in enumerate(tensors):
                if not any(loop in dim for dim in dims):
                    continue
                parts = axes.num_parts(axes.pack(tensor_holders(dims, loops, len(nest.loops))))
                elements = np.where(masks == mask, graph.sizes[value] / parts, 0.0)
                sent = elements * int(graph.sent_itemsize[value])
                summed += 2 * _FLOAT32 * elements if place >= len(op.inputs) else 0.0
                if mixing.balanced:
                    exchanged.append(sent / 2)
                if loop == mixing.ring and place in mixing.passed:
                    passed += sent
                elif loop == mixing.ring and place - len(op.inputs) in mixing.returned:
                    returned += _FLOAT32 * elements
            num_devices = prod(axes.sizes[axis] for axis in along)
            yield Mixed(along, num_devices, exchanged, passed, returned, summed + 2 * passed)
