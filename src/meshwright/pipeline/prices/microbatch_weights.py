"""Costs of a view's problem as stages with many microbatches have them: what is done once a step counts for less.

A step is some microbatches and, once, the sums of gradients and the update. The problem of one microbatch counts all of
it alike; what is best for it may bring gradients together cheaply and every microbatch's activations dearly.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.graph.phases import PHASES, UPDATE
from meshwright.pipeline.layers.forward_pass import Array, Bools, Ints
from meshwright.planner.pricing.formulation import Formulation
from meshwright.planner.pricing.group_table import SETTLING
from meshwright.priced.problem import EdgeKey

Edges = dict[EdgeKey, tuple[float, Array]]  # as `Formulation.edges`

_UPDATE = PHASES.index(UPDATE)
_ANYWHERE = ("compute", "reshard")  # purposes that are no sums


class Weights(NamedTuple):
    """What counts how much, by the operation at which it happens.

    Attributes:
        work: Work of each operation, and what is sent to it.
        sums: Settling the sums that it leaves.
    """

    work: Array
    sums: Array


def once_s(formulation: Formulation, ends: Bools) -> Iterator[Array]:
    """For each class of groups the seconds of one of them that are spent once a step, for each strategy.

    Args:
        formulation: The problem.
        ends: For each operation, whether it is of those that make weights' gradients.
    """
    phase, ops = formulation.grouping.graph.columns.phase, formulation.grouping.ops
    for table, members in zip(formulation.tables, formulation.folded.members, strict=True):
        found = np.zeros(len(table.compute))
        first = ops.start[members[0]]
        for member, purpose, seconds in table.items:
            op = ops.items[first + member]
            sums = purpose not in _ANYWHERE and ends[op]
            if sums or phase[op] == _UPDATE:
                found += seconds
        yield found


def steady_weights(formulation: Formulation, ends: Bools, share: float, often: Array) -> Weights:
    """Weights with what is done once a step counted in part.

    Args:
        formulation: The problem.
        ends: As in `once_s`.
        share: How much of it counts: one part of as many as there are microbatches.
        often: How often each operation counts besides.
    """
    updates = formulation.grouping.graph.columns.phase == _UPDATE
    return Weights(np.where(updates, share, 1.0) * often, np.where(updates | ends, share, 1.0) * often)


def weighed(formulation: Formulation, weights: Weights) -> tuple[list[Array], Edges]:
    """Costs of nodes, all that they stand for together, and of edges: as `Pricing.read` tells them apart."""
    ops = formulation.grouping.ops
    costs = [np.zeros(len(cost)) for cost in formulation.costs]
    for which, members in enumerate(formulation.folded.members):
        for member, purpose, seconds in formulation.tables[which].items:
            by_op = weights.work if purpose in _ANYWHERE else weights.sums
            costs[which] += by_op[ops.items[ops.start[members] + member]].sum() * seconds
    read, saved = _counts(formulation, weights)
    edges: Edges = {}
    for number, (key, (_, whole)) in enumerate(formulation.edges.items()):
        joined = formulation.joined_s(*key)
        matrix = read[number] * whole if joined is None else read[number] * (whole + joined) - saved[number] * joined
        edges[key] = 1.0, matrix
    return costs, edges


def _counts(formulation: Formulation, weights: Weights) -> tuple[Array, Array]:
    """For each kind of edge, what is sent over it counts so much, and so much what is saved where sums are joined."""
    folded, grouping = formulation.folded, formulation.grouping
    source, _, which = folded.untied
    at = _reading(formulation)
    read = np.where(at >= 0, weights.work[at], 0.0)
    settles = _settling(formulation)
    made = np.where(source < len(grouping.groups), settles[np.minimum(source, len(grouping.groups) - 1)], -1)
    saved = np.where(made >= 0, weights.sums[made], 0.0)
    found: list[Array] = [np.bincount(which, part, len(formulation.edges)).astype(float) for part in (read, saved)]
    return found[0], found[1]


def _reading(formulation: Formulation) -> Ints:
    """For each edge the operation at which its value is sent: what reads it, or else makes it; -1 for neither."""
    folded, grouping = formulation.folded, formulation.grouping
    slots, (_, reader, which), num_groups = grouping.slots, folded.untied, len(grouping.groups)
    slot = np.array([key[3] for key in formulation.edges], np.int64)[which]
    first = np.array([slots.start[group] + rank for group, rank in (s.readers[0] for s in folded.shared)], np.int64)
    place = np.where(slot >= 0, slots.start[np.minimum(reader, num_groups - 1)] + slot, 0)
    shared = slot < 0
    place[shared] = first[reader[shared] - num_groups]
    found: Ints = np.where(slots.op[place] >= 0, slots.op[place], grouping.graph.columns.producer[slots.value[place]])
    return found


def _settling(formulation: Formulation) -> Ints:
    """For each group the operation whose sum it settles; -1 for none."""
    ops, folded = formulation.grouping.ops, formulation.folded
    found = np.full(len(formulation.grouping.groups), -1)
    for which, members in enumerate(folded.members):
        member = next((m for m, purpose, _ in formulation.tables[which].items if purpose in SETTLING), None)
        if member is not None:
            found[members] = ops.items[ops.start[members] + member]
    return found
