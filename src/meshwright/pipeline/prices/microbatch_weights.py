"""Costs of a view's problem for stages with many microbatches: work done once a step counts for less.

A step consists of its microbatches and, once, the reductions of gradients and the update. The problem of one microbatch
weights all of these equally; its optimum may make reductions of gradients cheap and those of activations, which every
microbatch repeats, expensive.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.graph.phases import PHASES, UPDATE
from meshwright.planner.pricing.formulation import Formulation
from meshwright.planner.pricing.group_table import SETTLING
from meshwright.solver.problem.priced import EdgeKey

Edges = dict[EdgeKey, tuple[float, Floats]]  # as `Formulation.edges`

_UPDATE = PHASES.index(UPDATE)
_ANYWHERE = ("compute", "reshard")  # purposes other than reductions


class Weights(NamedTuple):
    """Weights of costs, by the operation at which they arise.

    Attributes:
        work: The compute of each operation and the resharding of its operands.
        sums: The reductions of its partial sums.
    """

    work: Floats
    sums: Floats


def once_s(formulation: Formulation, ends: Bools) -> Iterator[Floats]:
    """For each class of groups the seconds of one of them that are spent once a step, for each strategy.

    Args:
        formulation: The problem.
        ends: For each operation, whether it computes a gradient of weights.
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


def steady_weights(formulation: Formulation, ends: Bools, share: float, often: Floats) -> Weights:
    """Weights in which work done once a step counts only in part.

    Args:
        formulation: The problem.
        ends: As in `once_s`.
        share: The weight of work done once a step: 1 ÷ the number of microbatches.
        often: A further factor for each operation.
    """
    updates = formulation.grouping.graph.columns.phase == _UPDATE
    return Weights(np.where(updates, share, 1.0) * often, np.where(updates | ends, share, 1.0) * often)


def weighed(formulation: Formulation, weights: Weights) -> tuple[list[Floats], Edges]:
    """Weighted costs of nodes (summed over the groups of each) and of edges, split as in `Pricing.read`."""
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


def _counts(formulation: Formulation, weights: Weights) -> tuple[Floats, Floats]:
    """For each kind of edge, the weight of its transfers and the weight of the savings where reductions are merged."""
    folded, grouping = formulation.folded, formulation.grouping
    source, _, which = folded.untied
    at = _reading(formulation)
    read = np.where(at >= 0, weights.work[at], 0.0)
    settles = _settling(formulation)
    made = np.where(source < len(grouping.groups), settles[np.minimum(source, len(grouping.groups) - 1)], -1)
    saved = np.where(made >= 0, weights.sums[made], 0.0)
    found: list[Floats] = [np.bincount(which, part, len(formulation.edges)).astype(float) for part in (read, saved)]
    return found[0], found[1]


def _reading(formulation: Formulation) -> Ints:
    """For each edge the operation at which its value is resharded: its reader, else its producer; -1 for neither."""
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
    """For each group the operation whose partial sum it reduces; -1 for none."""
    ops, folded = formulation.grouping.ops, formulation.folded
    found = np.full(len(formulation.grouping.groups), -1)
    for which, members in enumerate(folded.members):
        member = next((m for m, purpose, _ in formulation.tables[which].items if purpose in SETTLING), None)
        if member is not None:
            found[members] = ops.items[ops.start[members] + member]
    return found
