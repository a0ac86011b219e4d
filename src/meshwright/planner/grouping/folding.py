"""Folding: corresponding groups of repeated layers share one choice, so planning time does not grow with depth.

Every second repetition is tied, not every one: tying neighbours would forbid layers that alternate (a product split by
columns, the next by rows). A class is a set of tied groups. Groups are tied only if they have the same structure, so
tying is always legal; it can only cost optimality, which the unfolded problem's lower bound measures.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Ints
from meshwright.cost.xla_gpu.traffic import Traffic
from meshwright.graph.phases import PHASES
from meshwright.graph.repeats import find_runs
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.likeness import tokens_of
from meshwright.planner.grouping.numbering import number_rows, number_stretches, pack, ranges, sort_by, starts

PERIODS = 2


class Shared(NamedTuple):
    """A value read by several groups in one phase: it is resharded once for all of them, to a chosen sharding."""

    value: int
    phase: str
    readers: tuple[tuple[int, int], ...]  # (group, slot)


class Untied(NamedTuple):
    """Edges as columns: their two ends (groups, then shared readings), and the number of each edge's class."""

    source: Ints
    reader: Ints
    which: Ints


@dataclass(slots=True)
class Folded:
    """Groups and shared readings, tied into classes.

    Attributes:
        group_class: Class of each group.
        members: Groups of each class; the first represents all of them.
        alike: A number for each class, equal for classes of groups that have the same structure but are not tied.
        shared: All shared readings.
        shared_class: Class of each shared reading.
        shared_members: Shared readings of each class.
        edges: For each (source class, position of the value, reader class, slot) how often it occurs; shared readings
            are readers (class, -1), and as sources they have position -1.
        untied: The edges with nothing tied.
        through: For each of the grouping's slots, the shared reading that it reads through; -1 for none.
    """

    group_class: list[int]
    members: list[list[int]]
    alike: list[int]
    shared: list[Shared]
    shared_class: list[int]
    shared_members: list[list[int]]
    edges: Counter[tuple[int, int, int, int]]
    untied: Untied
    through: Ints


def fold(grouping: Grouping, pins: Mapping[int, Hashable], traffic: Traffic, enabled: bool = True) -> Folded:
    """Ties groups into classes.

    Args:
        grouping: The groups.
        pins: Marks that distinguish arguments and results that have different restrictions.
        traffic: How often each value is read and written, which is part of the price of its readers and its producer.
        enabled: Whether anything is tied at all.
    """
    tokens = _priced_alike(grouping, tokens_of(grouping, pins), traffic)
    return _quotient(grouping, tokens, _classify(grouping, tokens) if enabled else np.arange(len(tokens)))


def laps(grouping: Grouping, folded: Folded) -> tuple[Ints, Ints]:
    """For each group the repeated run it belongs to, and which repetition it is in; -1 if it is in no run."""
    led = np.flatnonzero(grouping.placed.leader >= 0)
    tokens = np.array([folded.alike[which] for which in folded.group_class], np.int64)
    run, lap = np.full(len(tokens), -1), np.full(len(tokens), -1)
    for number, found in enumerate(find_runs(tokens[led])):
        some = led[found.start : found.stop]
        run[some], lap[some] = number, np.arange(len(some)) // found.period
    return run, lap


def tied_throughout(grouping: Grouping, folded: Folded) -> Folded:
    """The same with neighbouring repetitions tied as well."""
    tokens = np.array(folded.alike, np.int64)[folded.group_class]
    return _quotient(grouping, tokens, _classify(grouping, tokens, 1))


def unfolded(grouping: Grouping, folded: Folded) -> Folded:
    """The same with nothing tied."""
    tokens = np.array(folded.alike, np.int64)[folded.group_class]
    return _quotient(grouping, tokens, np.arange(len(tokens)))


def _priced_alike(grouping: Grouping, tokens: Ints, traffic: Traffic) -> Ints:
    """Tokens that also distinguish groups of the same structure whose prices differ.

    The bytes that an operation moves depend on how often kernels read its operands and whether they write its results,
    and on their types there: on CPUs some values are wider in memory than in the program. The cost of its sums depends
    on how many sums start together, and that of a product on whether its operands are scaled narrow floats.
    """
    graph, columns, ops = grouping.graph, grouping.graph.columns, grouping.ops
    held = pack(graph.num_bytes, graph.sent_itemsize)
    made = pack(held, np.unique(traffic.writes, return_inverse=True)[1])[ranges(columns.first_made, columns.num_made)]
    results = number_stretches(made, starts(columns.num_made))
    share = np.unique(grouping.starts, return_inverse=True)[1]
    share[list(grouping.dequantized)] += 1 + share.max(initial=0)
    times = np.unique(traffic.reads, return_inverse=True)[1]
    moved = number_stretches(
        pack(held[columns.reads], times), columns.start, results, share, 2 * traffic.computed + traffic.starts
    )
    return number_stretches(moved[ops.items], ops.start, tokens)


def _classify(grouping: Grouping, tokens: Ints, periods: int = PERIODS) -> Ints:
    """The class of each group: its position in a repeated run; for arguments, the position of their readers.

    Of the repetitions of a run every ``periods``-th is tied.
    """
    is_led = grouping.placed.leader >= 0
    led, arguments = np.flatnonzero(is_led), np.flatnonzero(~is_led)
    classes = np.where(is_led, len(tokens) + np.arange(len(tokens)), tokens)
    free = 2 * len(tokens)
    for run in find_runs(tokens[led]):
        lap, offset = np.divmod(np.arange(run.stop - run.start), run.period)
        classes[led[run.start : run.stop]] = free + periods * offset + lap % periods
        free += periods * run.period
    argument, neighbour, how = _neighbours(grouping, arguments)
    # Arguments belong with their readers; optimizer state is read with gradients first and parameters second.
    for _ in range(3):
        seen = pack(classes[neighbour], how)
        _, distinct = np.unique(pack(argument, seen), return_index=True)  # in order of both
        start = np.searchsorted(argument[distinct], np.arange(len(arguments) + 1))
        classes[arguments] = free + number_stretches(seen[distinct], start, tokens[arguments])
    return number_rows(classes)[0]


def _neighbours(grouping: Grouping, arguments: Ints) -> tuple[Ints, Ints, Ints]:
    """For each argument, in order, a group that reads it or that it reads from, and the slot and position."""
    slots, source = grouping.slots, grouping.placed.home[grouping.slots.value]
    how = pack(slots.rank, grouping.values.rank[slots.value])
    order = np.full(len(grouping.placed.leader), -1)
    order[arguments] = np.arange(len(arguments))
    argument, neighbour = order[np.concatenate([source, slots.group])], np.concatenate([slots.group, source])
    kept = argument >= 0
    return argument[kept], neighbour[kept], np.concatenate([2 * how, 2 * how + 1])[kept]


def _shared_readings(grouping: Grouping) -> tuple[list[Shared], Ints]:
    """All shared readings, and for each slot the shared reading that it reads through; -1 for none."""
    slots = grouping.slots
    direct = np.flatnonzero(slots.op >= 0)
    group, value, phase = slots.group[direct], slots.value[direct], grouping.graph.columns.phase[slots.op[direct]]
    # A copy that is made inside a loop or a branch does not serve readers outside it, nor the other way round.
    reading, first = number_rows(value, phase, grouping.graph.body[slots.op[direct]])
    _, distinct = number_rows(reading, group)
    is_shared = np.bincount(reading[distinct], minlength=len(first)) > 1
    through = np.full(len(slots.value), -1)
    through[direct] = np.where(is_shared, np.cumsum(is_shared) - 1, -1)[reading]
    first = first[is_shared]
    items, start, _ = sort_by(through, len(first))
    readers = list(zip(slots.group[items].tolist(), slots.rank[items].tolist(), strict=True))
    rows = zip(value[first].tolist(), phase[first].tolist(), pairwise(start.tolist()), strict=True)
    return [Shared(v, PHASES[number], tuple(readers[a:b])) for v, number, (a, b) in rows], through


def _quotient(grouping: Grouping, tokens: Ints, group_class: Ints) -> Folded:
    """The classes' shared readings and edges, given the class of each group."""
    slots, home, place = grouping.slots, grouping.placed.home, grouping.values.rank
    shared, through = _shared_readings(grouping)
    num_groups, first_shared = len(group_class), int(group_class.max(initial=-1)) + 1
    value = np.array([reading.value for reading in shared], np.int64)
    phase = np.array([PHASES.index(reading.phase) for reading in shared], np.int64)
    readers, start, _ = sort_by(through, len(shared))
    label = pack(group_class[slots.group], slots.rank)
    readers = readers[np.lexsort((label[readers], through[readers]))]
    shared_class = first_shared + number_stretches(label[readers], start, group_class[home[value]], place[value], phase)
    classes = np.concatenate([group_class, shared_class])

    # The edges to shared readings come first, then the edges to groups.
    passed = through >= 0
    source = np.concatenate([home[value], np.where(passed, num_groups + through, home[slots.value])])
    position = np.concatenate([place[value], np.where(passed, -1, place[slots.value])])
    reader = np.concatenate([num_groups + np.arange(len(shared)), slots.group])
    slot = np.concatenate([np.full(len(shared), -1), slots.rank])
    which, first = number_rows(classes[source], position, classes[reader], slot)
    keys = zip(*(column[first].tolist() for column in (classes[source], position, classes[reader], slot)), strict=True)
    members = _members(group_class)
    return Folded(
        group_class.tolist(),
        members,
        tokens[[m[0] for m in members]].tolist(),
        shared,
        shared_class.tolist(),
        _members(shared_class - first_shared),
        Counter(dict(zip(keys, np.bincount(which).tolist(), strict=True))),
        Untied(source, reader, which),
        through,
    )


def _members(classes: Ints) -> list[list[int]]:
    items, start, _ = sort_by(classes, int(classes.max(initial=-1)) + 1)
    return [items[a:b].tolist() for a, b in pairwise(start.tolist())]
