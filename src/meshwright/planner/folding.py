"""Folding: groups that play the same part in repeated layers share one choice, so planning does not grow with depth.

Every second repetition is tied, not every one: tying neighbours would forbid layers that alternate (a product split by
columns, the next by rows). A class is a set of tied groups. Groups are tied only if they are built alike, so tying is
always legal; it can only cost optimality, which the unfolded problem's lower bound measures.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from meshwright.graph.repeats import find_runs
from meshwright.planner.groups import Group, Grouping

PERIODS = 2


@dataclass(frozen=True, slots=True)
class Shared:
    """A value read by several groups in one phase: it is resharded once for all of them, to a sharding of its own."""

    value: int
    phase: str
    readers: tuple[tuple[int, int], ...]  # (group, slot)


@dataclass(slots=True)
class Folded:
    """Groups and shared readings, tied into classes.

    Attributes:
        group_class: Class of each group.
        members: Groups of each class; the first stands for all of them.
        alike: A number for each class, equal for classes of groups that are built alike though not tied.
        shared: All shared readings.
        shared_class: Class of each shared reading.
        shared_members: Shared readings of each class.
        edges: For each (source class, position of the value, reader class, slot) how often it occurs; readers that
            are shared come as (class, -1), and what they pass on as sources with position -1.
    """

    group_class: list[int]
    members: list[list[int]]
    alike: list[int]
    shared: list[Shared]
    shared_class: list[int]
    shared_members: list[list[int]]
    edges: Counter[tuple[int, int, int, int]] = field(default_factory=Counter)


def fold(grouping: Grouping, pins: Mapping[int, Hashable], enabled: bool = True) -> Folded:
    """Ties groups into classes; ``pins`` tells arguments and results apart that have different restrictions."""
    interned: dict[Hashable, int] = {}
    tokens = [_token(grouping, group, pins, interned) for group in grouping.groups]
    group_class = _classify(grouping, tokens) if enabled else list(range(len(grouping.groups)))
    return _quotient(grouping, _shared_readings(grouping), group_class, tokens)


def _quotient(grouping: Grouping, shared: list[Shared], group_class: list[int], tokens: list[int]) -> Folded:
    """The classes' shared readings and edges, given the class of each group."""
    home, place = grouping.home, grouping.place
    first_shared = max(group_class, default=-1) + 1
    names: dict[Hashable, int] = {}
    shared_class: list[int] = []
    through: dict[tuple[int, int], int] = {}
    members = _members(group_class, 0)
    folded = Folded(group_class, members, [tokens[m[0]] for m in members], shared, shared_class, [])
    for index, reading in enumerate(shared):
        source = (group_class[home[reading.value]], place[reading.value])
        readers = tuple(sorted((group_class[g], s) for g, s in reading.readers))
        key = (source, reading.phase, readers)
        shared_class.append(names.setdefault(key, first_shared + len(names)))
        folded.edges[(*source, shared_class[-1], -1)] += 1
        for reader in reading.readers:
            through[reader] = index
    folded.shared_members = _members(shared_class, first_shared)
    for group_id, group in enumerate(grouping.groups):
        for slot, read in enumerate(group.slots):
            index_or_none = through.get((group_id, slot))
            if index_or_none is not None:
                folded.edges[shared_class[index_or_none], -1, group_class[group_id], slot] += 1
            else:
                folded.edges[group_class[home[read.value]], place[read.value], group_class[group_id], slot] += 1
    return folded


def _members(classes: list[int], first: int) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(max(classes, default=first - 1) + 1 - first)]
    for item, which in enumerate(classes):
        found[which - first].append(item)
    return found


def _shared_readings(grouping: Grouping) -> list[Shared]:
    # A copy made inside a loop does not serve readers outside it, which run another number of times.
    readings: dict[tuple[int, str, float], list[tuple[int, int]]] = {}
    for group_id, group in enumerate(grouping.groups):
        for slot, read in enumerate(group.slots):
            if read.member >= 0:
                phase = grouping.graph.ops[group.ops[read.member]].phase
                readings.setdefault((read.value, phase, read.trips), []).append((group_id, slot))
    return [
        Shared(value, phase, tuple(readers))
        for (value, phase, _), readers in readings.items()
        if len({g for g, _ in readers}) > 1
    ]


def _classify(grouping: Grouping, tokens: list[int]) -> list[int]:
    groups = grouping.groups
    led = [i for i, group in enumerate(groups) if group.leader is not None]
    classes: list[Hashable] = [("argument", tokens[i]) for i in range(len(groups))]
    for i in led:
        classes[i] = ("alone", i)
    for number, run in enumerate(find_runs([tokens[i] for i in led])):
        for position in range(run.start, run.stop):
            lap, offset = divmod(position - run.start, run.period)
            classes[led[position]] = ("run", number, offset, lap % PERIODS)
    arguments = [i for i, group in enumerate(groups) if group.leader is None]
    neighbours = _neighbours(grouping)
    # Arguments belong where their readers belong; optimizer state touches gradients first and parameters second.
    for _ in range(3):
        names: dict[Hashable, int] = {}
        short = [names.setdefault(c, len(names)) for c in classes]
        for i in arguments:
            seen = frozenset((short[j], how) for j, how in neighbours[i])
            classes[i] = ("argument", tokens[i], seen)
    final: dict[Hashable, int] = {}
    return [final.setdefault(c, len(final)) for c in classes]


def _neighbours(grouping: Grouping) -> list[list[tuple[int, tuple[int, int, bool]]]]:
    """For each group, the groups it reads from and is read by, and through which slot and position."""
    found: list[list[tuple[int, tuple[int, int, bool]]]] = [[] for _ in grouping.groups]
    for group_id, group in enumerate(grouping.groups):
        for slot, read in enumerate(group.slots):
            source, position = grouping.home[read.value], grouping.place[read.value]
            found[source].append((group_id, (slot, position, True)))
            found[group_id].append((source, (slot, position, False)))
    return found


def _token(grouping: Grouping, group: Group, pins: Mapping[int, Hashable], interned: dict[Hashable, int]) -> int:
    """Equal for groups that are built alike: same operations, wired alike, restricted alike."""
    graph, home, place = grouping.graph, grouping.home, grouping.place
    own = home[group.values[0]] if group.values else -1
    first_read: dict[int, int] = {}
    parts: list[Hashable] = [
        graph.types[group.argument] if group.argument is not None else None,
        tuple(pins.get(v) for v in group.values),
    ]
    for index, followed in zip(group.ops, group.follows, strict=True):
        op = graph.ops[index]
        wiring: list[Hashable] = []
        for value in op.inputs:
            if home.get(value) == own and own >= 0:
                wiring.append(place[value])
            elif value in home:
                wiring.append(("read", first_read.setdefault(value, len(first_read))))
            elif value in grouping.virtual:
                made = tuple(id(graph.ops[i].signature) for i in grouping.pulled(value))
                roots = tuple(
                    ("own", place[r]) if home[r] == own else ("read", first_read.setdefault(r, len(first_read)))
                    for r in grouping.roots(value)
                )
                wiring.append((made, roots))
        parts.append((id(op.signature), followed, op.trips, op.phase, tuple(wiring)))
    parts.append(tuple((s.member, s.operand, first_read.get(s.value, -1)) for s in group.slots))
    return interned.setdefault(tuple(parts), len(interned))
