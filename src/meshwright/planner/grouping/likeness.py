"""Tokens of groups, equal for groups of the same structure: the same operations, connections and restrictions."""

from collections.abc import Hashable, Mapping

import numpy as np

from meshwright.arrays import Ints
from meshwright.jit import kernel
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.numbering import number_stretches, pack, starts

_OWN, _READ, _VIRTUAL, _SCALAR = range(4)  # what an operand is: the last digit of its code


def tokens_of(grouping: Grouping, pins: Mapping[int, Hashable]) -> Ints:
    """The token of each group.

    A group is encoded as whole numbers: a code for each of its operations, followed by a code for each operand, and
    after a virtual operand a code for each of its roots. Values read from other groups are numbered in the order in
    which the group first reads them.
    """
    columns, placed, (at, root) = grouping.graph.columns, grouping.placed, grouping.reads
    rank, taken = _first_reads(grouping)
    codes = np.where(rank < 0, 4 * grouping.values.rank[root] + _OWN, 4 * rank + _READ)
    heads = np.where(placed.virtual, 4 * _recipes(grouping) + _VIRTUAL, _SCALAR)
    first = starts(np.bincount(at, minlength=len(columns.reads)))  # of each operand's roots
    ops = grouping.ops
    written, begin = _write(
        ops.items, _op_codes(grouping), columns.start, columns.reads, heads, placed.rooted, first, codes
    )
    return number_stretches(written, begin[ops.start], _arguments(grouping), taken, _pinned(grouping, pins))


@kernel
def _write(ops, op_codes, start, reads, heads, rooted, first, codes):
    """The codes of some operations, one after another, and where each operation's codes begin."""
    size = len(ops)
    for op in ops:
        for operand in range(start[op], start[op + 1]):
            size += 1 + (first[operand + 1] - first[operand] if rooted[reads[operand]] else 0)
    written, begin, at = np.empty(size, np.int64), np.empty(len(ops) + 1, np.int64), 0
    for i, op in enumerate(ops):
        begin[i], written[at] = at, op_codes[op]
        at += 1
        for operand in range(start[op], start[op + 1]):
            written[at] = heads[reads[operand]]
            for root in range(first[operand], first[operand + 1]):
                at += rooted[reads[operand]]
                written[at] = codes[root]
            at += 1
    begin[len(ops)] = at
    return written, begin


def _op_codes(grouping: Grouping) -> Ints:
    columns = grouping.graph.columns
    trips = np.searchsorted(np.unique(columns.trips), columns.trips)
    settled = np.zeros(len(trips), np.int64)
    known: dict[tuple[float, float], int] = {}
    for index, found in grouping.accumulated.items():
        settled[index] = 1 + known.setdefault((found.trips, found.growth), len(known))
    joined = np.zeros(len(trips), np.int64)
    joined[[*grouping.joining.joins, *grouping.joining.joints]] = 1
    return pack(columns.signature, grouping.placed.follows, trips, columns.phase, settled, joined)


def _recipes(grouping: Grouping) -> Ints:
    """For each virtual value a number that identifies the operations that compute it."""
    signature, known = grouping.graph.columns.signature, dict[tuple[int, ...], int]()
    found = np.zeros(len(grouping.placed.rooted), np.int64)
    for value in np.flatnonzero(grouping.placed.rooted).tolist():
        recipe = (*signature[grouping.pulled(value)].tolist(), -len(grouping.roots(value)))
        found[value] = known.setdefault(recipe, 1 + len(known))
    return found


def _first_reads(grouping: Grouping) -> tuple[Ints, Ints]:
    """The order of a group's first reads of other groups' values, and for each group a number for values taken on."""
    placed, slots, (at, root) = grouping.placed, grouping.slots, grouping.reads
    group = placed.group[grouping.graph.columns.reader[at]]
    other = np.flatnonzero((group >= 0) & (group != placed.home[root]))
    key = group[other] * len(placed.home) + root[other]
    known, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    order = np.lexsort((first, group[other[first]]))
    count = np.bincount(group[other[first]], minlength=len(placed.leader))
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(count) - count, count)
    rank = np.full(len(at), -1)
    rank[other] = place[inverse]

    late = np.flatnonzero(slots.op < 0)
    wanted = slots.group[late] * len(placed.home) + slots.value[late]
    found = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    read = np.where(known[found] == wanted, place[found], -1) if len(known) else np.full(len(late), -1)
    start = np.searchsorted(slots.group[late], np.arange(len(placed.leader) + 1))
    return rank, number_stretches(pack(slots.operand[late], read), start)


def _arguments(grouping: Grouping) -> Ints:
    """For each group the number of its argument's type; -1 where an operation leads."""
    argument = grouping.placed.argument
    return np.where(argument >= 0, grouping.graph.kind[argument], -1)


def _pinned(grouping: Grouping, pins: Mapping[int, Hashable]) -> Ints:
    """For each group a number for its restricted values and their restrictions; 0 if there are none."""
    laid_down: dict[int, tuple[tuple[int, Hashable], ...]] = {}
    for value in sorted(pins):
        if value in grouping.home:
            group = grouping.home[value]
            laid_down[group] = (*laid_down.get(group, ()), (grouping.place[value], pins[value]))
    known = {how: number for number, how in enumerate(dict.fromkeys(laid_down.values()), 1)}
    found = np.zeros(len(grouping.placed.leader), np.int64)
    found[list(laid_down)] = [known[how] for how in laid_down.values()]
    return found
