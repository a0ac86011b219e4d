"""Sums that are added to one another: if they are sharded alike, contributions are added first and settled once.

An example is the gradient of a value that several products read, as those of queries, keys and values do: it is the sum
of their own gradients. A sum may be transposed, reshaped or converted without loss on the way (`hands_sums_on`).
"""

from typing import NamedTuple

import numpy as np

from meshwright.arrays import Ints
from meshwright.graph import Graph
from meshwright.graph.accumulation import ADDING, Accumulated, contributes
from meshwright.graph.dtypes import hands_sums_on
from meshwright.jit import kernel
from meshwright.planner.grouping.placement import Placed
from meshwright.rules import LoopNest
from meshwright.strategy.candidates import Assignment, follow, keeps_apart, reducing_axes, tensor_holders
from meshwright.strategy.sharding import Axes, Codes

_PASSING = ("transpose", "reshape")


class Joining(NamedTuple):
    """Which sums may be settled together with which.

    Attributes:
        paths: For a leading operation that joins or is joined, itself and the operations that pass its sum on, in
            order; all of them are in its group.
        joins: For an operation that joins, the addition, on another group's path, that reads the end of its own path.
        joints: For each such addition the leading operation that joins there.
        until: For each leading operation that joins or is joined, the last addition at which that happens.
    """

    paths: dict[int, tuple[int, ...]]
    joins: dict[int, int]
    joints: dict[int, int]
    until: dict[int, int]


def find_joining(graph: Graph, placed: Placed, accumulated: dict[int, Accumulated]) -> Joining:
    """Follows every sum to its addition to another sum; sums that a loop adds up wait for the loop's end instead."""
    columns = graph.columns
    # The only reader of each result: whether it passes the sum on within the group, or is another group's addition.
    after = _only_readers(graph)[columns.first_made]
    adds, passes = (
        np.array([s.primitive in names or (converts and hands_sums_on(s)) for s in columns.signatures], bool)[
            columns.signature
        ]
        for names, converts in ((ADDING, False), ((*ADDING, *_PASSING), True))
    )
    followed, has = np.full(len(after), -1), placed.follows >= 0
    followed[has] = columns.reads[columns.start[:-1][has] + placed.follows[has]]
    follows = (placed.group[after] == placed.group) & passes[after] & (followed[after] == columns.first_made)
    on, ended = (after >= 0) & (columns.trips[after] == columns.trips), adds[after] & (placed.group[after] >= 0)
    next_op = np.where(on & follows, after, -1)
    end = np.where(on & ~follows & ended, after, -1)
    contributing = np.array([contributes(s.primitive) for s in columns.signatures], bool)[columns.signature]
    contributing[list(accumulated)] = False
    leaders = placed.leader[placed.leader >= 0]
    owner = _owners(leaders[contributing[leaders]], next_op)
    last = np.flatnonzero((owner >= 0) & (end >= 0))
    last = last[owner[end[last]] >= 0]
    last = last[np.argsort(owner[last])]
    joins = dict(zip(owner[last].tolist(), end[last].tolist(), strict=True))
    joints = {addition: leader for leader, addition in joins.items()}
    paths: dict[int, tuple[int, ...]] = {}
    for leader in np.union1d(owner[last], owner[end[last]]).tolist():
        path = [leader]
        while (following := int(next_op[path[-1]])) >= 0:
            path.append(following)
        paths[leader] = tuple(path)
    until = {leader: max((op for op in path if op in joints), default=-1) for leader, path in paths.items()}
    return Joining(paths, joins, joints, until | joins)


@kernel
def _owners(leaders, next_op):
    """For each operation the leader of the path that it is on; -1 for none."""
    owner = np.full(len(next_op), -1)
    for leader in leaders:
        at = leader
        while at >= 0:
            owner[at], at = leader, next_op[at]
    return owner


def _only_readers(graph: Graph) -> Ints:
    """The only operation that reads a value; -1 if several or none do, or if the value is a result."""
    columns = graph.columns
    reader, count = np.full(columns.num_values, -1), np.bincount(columns.reads, minlength=columns.num_values)
    count[[*graph.outputs, *(t.made for t in graph.ties)]] += 1
    reader[columns.reads] = columns.reader
    return np.where(count == 1, reader, -1)


class PartialSum:
    """The sharding of a sum before it is settled, as operations pass it on, under each strategy of its group."""

    def __init__(self, axes: Axes, nest: LoopNest, loops: Assignment):
        """Starts with the leading operation's result under its assignments."""
        self._axes = axes
        apart = reducing_axes(nest, loops, nest.results[0]) & keeps_apart(nest, loops)[:, None]
        self.over = apart @ (1 << np.arange(axes.num_axes))  # the axes over which it is still to be added up, as bits
        self.before = axes.pack(tensor_holders(nest.results[0], loops, len(nest.loops)))

    def pass_through(self, nest: LoopNest, followed: int, loops: Assignment, after: Codes) -> None:
        """Passes the sum on through an operation; it ends where that would reshard it, settled or not.

        Args:
            nest: The operation.
            followed: The position of the sum among its operands.
            loops: Its assignments.
            after: The sharding of the operand once it is settled.
        """
        dims, axes = nest.operands[followed], self._axes
        unsettled = follow(nest, axes, dims, axes.unpack(self.before))
        for have, split in ((after, loops), (self.before, unsettled)):
            self.over[axes.pack(tensor_holders(dims, split, len(nest.loops))) != have] = 0
        self.before = axes.pack(tensor_holders(nest.results[0], unsettled, len(nest.loops)))

    def held(self, after: Codes) -> Codes:
        """One number for the axes and the shardings before and after settling; 0 if there is nothing to settle.

        Sums with the same number can be added up before they are settled.
        """
        width = self._axes.num_bits
        return np.where(self.over > 0, (((self.over << width) | self.before) << width) | after, 0)
