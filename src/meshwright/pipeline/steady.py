"""The problem of a view as a stage with many microbatches has it: what is done once a step counts for less.

A step is some microbatches and, once, the sums of gradients and the update. The problem of one microbatch counts all of
it alike; what is best for it may bring gradients together cheaply and every microbatch's activations dearly.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.graph.phases import PHASES, UPDATE
from meshwright.pipeline.flow import Array, Bools
from meshwright.planner.formulate import Formulation
from meshwright.planner.group_table import SETTLING
from meshwright.planner.priced import EdgeKey, Usage, choice_problem
from meshwright.solver import ChoiceProblem

Edges = dict[EdgeKey, tuple[float, Array]]  # as `Formulation.edges`

_UPDATE = PHASES.index(UPDATE)


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
            sums = purpose not in ("compute", "reshard") and ends[op]
            if sums or phase[op] == _UPDATE:
                found += seconds
        yield found


def steady_problem(formulation: Formulation, ends: Bools, share: float) -> ChoiceProblem:
    """The problem with what is done once a step counted in part; see `steady_costs`."""
    return choice_problem(formulation.copies, *steady_costs(formulation, ends, share), Usage(0), {}, None)


def steady_costs(formulation: Formulation, ends: Bools, share: float) -> tuple[list[Array], Edges]:
    """Costs of nodes and of edges.

    Args:
        formulation: The problem.
        ends: As in `once_s`.
        share: How much of it counts: one part of as many as there are microbatches.
    """
    costs = list(formulation.costs)
    for which, once in enumerate(once_s(formulation, ends)):
        costs[which] = costs[which] - (1 - share) * once
    edges: Edges = {}
    for (source, place, reader, slot), (count, whole) in formulation.edges.items():
        matrix = whole
        if _is_update(formulation, reader, slot):
            matrix = share * whole
        elif (saved := formulation.joined_s(source, place, reader, slot)) is not None and _ends(
            formulation, source, ends
        ):
            matrix = whole + (1 - share) * saved  # of a sum that itself counts in part
        edges[source, place, reader, slot] = count, matrix
    return costs, edges


def _is_update(formulation: Formulation, reader: int, slot: int) -> bool:
    """Whether an edge's value is read by the update."""
    grouping, folded = formulation.grouping, formulation.folded
    if slot < 0:
        return folded.shared[folded.shared_members[reader - formulation.num_groups][0]].phase == UPDATE
    group = grouping.groups[folded.members[reader][0]]
    member = group.slots[slot].member
    return member >= 0 and grouping.graph.ops[group.ops[member]].phase == UPDATE


def _ends(formulation: Formulation, source: int, ends: Bools) -> bool:
    """Whether what a class settles are weights' gradients."""
    ops, first = formulation.grouping.ops, formulation.folded.members[source][0]
    at = ops.start[first]
    items = formulation.tables[source].items
    return any(purpose in SETTLING and bool(ends[ops.items[at + member]]) for member, purpose, _ in items)
