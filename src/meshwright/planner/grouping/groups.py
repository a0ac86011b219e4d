"""Groups: operations that share one choice, so that a choice problem has hundreds of nodes instead of thousands.

Contractions, summing gathers and scatters, arguments and loop carries lead a group; every other operation follows its
largest operand into that operand's group. Values that cost nothing to compute (broadcasts, iotas, masks, random bits)
are *virtual*: they belong to no group, and each reader computes them in the sharding it needs.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.graph import BACKWARD, UPDATE, Graph
from meshwright.graph.accumulation import Accumulated, find_accumulated
from meshwright.graph.columns import Lazy
from meshwright.graph.low_precision import dequantized
from meshwright.graph.phases import PHASES
from meshwright.planner.grouping.joined_sums import find_joining
from meshwright.planner.grouping.numbering import Numbers, sort_by
from meshwright.planner.grouping.placement import Facts, Placed, follow_gradients, place
from meshwright.rules import LoopNest, loop_nest
from meshwright.rules.base import REDUCING
from meshwright.rules.families.islands import ISLAND
from meshwright.rules.written import written


@dataclass(slots=True)
class Slot:
    """One read of another group's value by a group.

    Attributes:
        value: The value read.
        member: Index within the group's `ops` of the reading operation; -1 for the value an argument or carry takes on.
        operand: Position of the operand, or the operand through which virtual values lead to the value; for a value
            that is taken on, the position within the group's `values` of the argument or carry.
        trips: How often it is read in one step.
    """

    value: int
    member: int
    operand: int
    trips: float


@dataclass(slots=True)
class Group:
    """Operations that share one choice.

    Attributes:
        leader: Index of the leading operation, or None if an argument leads.
        argument: Value id of the leading argument, or None.
        ops: Indices of the operations, in order.
        follows: For each operation the position of the operand it follows; -1 for the leader.
        values: Ids of the values that belong to the group, in the order they are computed.
        slots: The values it reads from other groups.
    """

    leader: int | None
    argument: int | None
    ops: list[int] = field(default_factory=list)
    follows: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)


class Reads(NamedTuple):
    """Every read of a real value by an operation, directly or through virtual values.

    Attributes:
        at: Index into the `reads` of the graph's columns.
        root: The real value.
    """

    at: Ints
    root: Ints


class Slots(NamedTuple):
    """The slots of all groups as columns, one group after another.

    Attributes:
        start: Index of the first slot of each group.
        group: The slot's group.
        rank: Its position among the group's slots.
        op: The operation that reads; -1 for a value that is taken on.
        value, member, operand, trips: As in `Slot`.
    """

    start: Ints
    group: Ints
    rank: Ints
    op: Ints
    value: Ints
    member: Ints
    operand: Ints
    trips: NDArray[np.float64]


class Grouping:
    """The groups of a graph; nothing here depends on a mesh.

    Attributes:
        groups: All groups; arguments first, then in the order their leaders run.
        home: Group index of each real value.
        place: Position of each real value within its group's `values`.
        nests: Loop nest of each operation.
        accumulated: Operations whose results a loop adds up: their partial sums are settled after the loop.
        joining: Which sums may be settled together, since they are added to one another.
        gradients: Values of the backward pass that the update reads, or that only change shape on the way to it.
        dequantized: Products of scaled narrow floats, by operation.
        starts: For each operation, the part of a collective's fixed time that settling its sums costs.
        placed: The groups of operations and values, as columns.
        ops: Operations by group.
        values: Real values by group.
        reads: All reads of real values.
        slots: The reads that are slots, as columns.
    """

    def __init__(self, graph: Graph, known: Mapping[int, LoopNest] | None = None):
        """Groups a graph; ``known`` holds loop nests, by signature's number, that the rules could not provide."""
        columns = graph.columns
        self.graph = graph
        nests = known or {n: loop_nest(columns.signatures[n]) for n in columns.examples}
        self.nests: list[LoopNest] = list(map(nests.__getitem__, columns.signature.tolist()))
        facts = _facts(graph, nests)
        self.placed = _placed(graph, facts)
        num_groups = len(self.placed.leader)
        self.ops, self.values = sort_by(self.placed.group, num_groups), sort_by(self.placed.home, num_groups)
        self.home, self.place = Numbers(self.placed.home), Numbers(self.values.rank)
        self._pulls: dict[int, list[int]] = {}
        self._roots: dict[int, list[int]] = {}
        self.reads = self._find_reads()
        self.slots = self._find_slots()
        self.groups = Groups(self)
        self.gradients = _gradients(graph, facts)
        self.dequantized = dequantized(graph)
        self.accumulated = self._in_groups(find_accumulated(graph))
        self.joining = find_joining(graph, self.placed, self.accumulated)
        self.starts = find_starts(graph, nests, self.gradients, self.accumulated)

    def _in_groups(self, found: dict[int, Accumulated]) -> dict[int, Accumulated]:
        """The operations whose results are real: an outer product of vectors is virtual, being larger than they are."""
        group = self.placed.group
        return {op: one for op, one in found.items() if (group[[op, *one.chain]] >= 0).all()}

    def is_real(self, value: int) -> bool:
        """Whether the value belongs to a group."""
        return value in self.home

    def pulled(self, value: int) -> list[int]:
        """Operations that compute a virtual value from real ones, last first."""
        found = self._pulls.get(value)
        if found is None:
            seen: set[int] = set()
            stack = [value]
            while stack:
                v = stack.pop()
                index = int(self.graph.columns.producer[v])
                if self.placed.rooted[v] and index not in seen:
                    seen.add(index)
                    stack += self.graph.columns.reads_of(index).tolist()
            found = self._pulls[value] = sorted(seen, reverse=True)
        return found

    def roots(self, value: int) -> list[int]:
        """The real values that must be read to compute this value."""
        if value in self.home:
            return [value]
        found = self._roots.get(value)
        if found is None:
            inputs = (v for index in self.pulled(value) for v in self.graph.columns.reads_of(index).tolist())
            found = self._roots[value] = list(dict.fromkeys(v for v in inputs if v in self.home))
        return found

    def _find_reads(self) -> Reads:
        values, rooted = self.graph.columns.reads, self.placed.rooted
        through = np.flatnonzero(rooted[values])
        roots = [self.roots(v) for v in values[through].tolist()]
        count = (self.placed.home[values] >= 0).astype(np.int64)
        count[through] = [len(found) for found in roots]
        root = np.repeat(values, count)
        root[rooted[root]] = [v for found in roots for v in found]
        return Reads(np.repeat(np.arange(len(values)), count), root)

    def _find_slots(self) -> Slots:
        columns, home, (at, root) = self.graph.columns, self.placed.home, self.reads
        group = self.placed.group[columns.reader[at]]
        other = (group >= 0) & (group != home[root])
        at, root, reader = at[other], root[other], columns.reader[at[other]]
        made, taken, trips = self._taken_on()
        group = np.concatenate([group[other], home[taken]])
        order, start, rank = sort_by(group, len(self.placed.leader))
        columns_of = (
            (group,),
            (rank,),
            (reader, np.full(len(made), -1)),
            (root, made),
            (self.ops.rank[reader], np.full(len(made), -1)),
            (at - columns.start[reader], self.values.rank[taken]),
            (columns.read_trips[reader], trips),
        )
        return Slots(start, *(np.concatenate(parts)[order] for parts in columns_of))

    def _taken_on(self) -> tuple[Ints, Ints, NDArray[np.float64]]:
        """Values that arguments and carries of other groups take on: the value, the argument or carry, trips."""
        graph, home = self.graph, self.placed.home
        pairs = [(t.made, t.carry, t.trips) for t in graph.ties]
        pairs += [(graph.outputs[o], graph.inputs[i], 1.0) for o, i in graph.state.items()]
        made, taken = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
        trips = np.array([pair[2] for pair in pairs], np.float64)
        kept = (home[taken] >= 0) & (home[made] >= 0) & (home[made] != home[taken])
        return made[kept], taken[kept], trips[kept]


class Groups(Lazy[Group]):
    """All groups, built from the grouping's columns."""

    def __init__(self, grouping: Grouping):
        super().__init__(len(grouping.placed.leader))
        self._columns = grouping.placed, grouping.ops, grouping.values, grouping.slots

    def _make(self, first: int, stop: int) -> Iterable[Group]:
        placed, ops, values, slots = self._columns
        of_ops, of_values, of_slots = (slice(*table.start[[first, stop]]) for table in (ops, values, slots))
        rows = zip(*(column[of_slots].tolist() for column in slots[4:]), strict=True)
        lists = (
            (ops.start, ops.items[of_ops].tolist()),
            (ops.start, placed.follows[ops.items[of_ops]].tolist()),
            (values.start, values.items[of_values].tolist()),
            (slots.start, [Slot(*row) for row in rows]),
        )
        leads = (
            [None if number < 0 else number for number in column[first:stop].tolist()]
            for column in (placed.leader, placed.argument)
        )
        return map(Group, *leads, *(_split(items, start[first : stop + 1]) for start, items in lists))


def _split(items: list[Any], start: Ints) -> list[list[Any]]:
    return [items[a:b] for a, b in pairwise((start - start[0]).tolist())]


def _facts(graph: Graph, nests: Mapping[int, LoopNest]) -> Facts:
    """The facts that placement uses."""
    columns = graph.columns
    leads, parallel, carries = (np.zeros(len(columns.signatures), bool) for _ in range(3))
    for number, nest in nests.items():
        leads[number] = nest.leads
        parallel[number] = all(loop.kind == "parallel" for loop in nest.loops)
        signature = columns.signatures[number]
        # A value whose sharding the user wrote is real, however cheap it is to compute.
        carries[number] = signature.primitive in ("loop_carry", ISLAND) or written(signature) is not None
    shapes: dict[tuple[int, ...], int] = {(): 0}
    shape = np.array([shapes.setdefault(kind.shape, len(shapes)) for kind in graph.kinds], np.int64)
    returned, state = np.zeros(columns.num_values, bool), np.full(columns.num_values, -1)
    returned[[*graph.outputs, *(t.made for t in graph.ties)]] = True
    for output, argument in graph.state.items():
        state[graph.outputs[output]] = graph.inputs[argument]
    return Facts(
        columns.start,
        columns.reads,
        columns.first_made,
        columns.num_made,
        leads[columns.signature],
        parallel[columns.signature],
        carries[columns.signature],
        columns.phase == PHASES.index(UPDATE),
        graph.sizes,
        shape[graph.kind],
        returned,
        state,
        graph.read_before_update,
    )


def _placed(graph: Graph, facts: Facts) -> Placed:
    num_ops, num_values, num_inputs = len(facts.leads), len(facts.size), len(graph.inputs)
    leader, argument = np.full(num_inputs + num_ops, -1), np.full(num_inputs + num_ops, -1)
    home, virtual = np.full(num_values, -1), np.zeros(num_values, bool)
    virtual[list(graph.constants)] = True
    inputs = np.array(graph.inputs, np.int64)
    argument[:num_inputs] = inputs
    home[inputs] = np.where(facts.shape[inputs] > 0, np.arange(num_inputs), -1)
    placed = Placed(
        np.full(num_ops, -1), np.full(num_ops, -1), home, virtual, np.zeros(num_values, bool), leader, argument
    )
    num_groups = place(facts, placed, num_inputs)
    return placed._replace(leader=leader[:num_groups], argument=argument[:num_groups])


def _gradients(graph: Graph, facts: Facts) -> set[int]:
    backward = graph.columns.phase == PHASES.index(BACKWARD)
    found = np.zeros(len(facts.size), bool)
    follow_gradients(facts, backward, found)
    producer = graph.columns.producer
    made = np.flatnonzero(found & (producer >= 0))
    return set(made[backward[producer[made]]].tolist())


def find_starts(
    graph: Graph, nests: Mapping[int, LoopNest], gradients: Iterable[int], accumulated: Iterable[int]
) -> NDArray[np.float64]:
    """For each operation, the part of a collective's fixed time that settling its sums costs.

    XLA combines collectives that do not wait for each other, so they share a fixed time. These are the sums of
    gradients, which only the update reads, and the sums of the update itself, such as the norms of all gradients. Each
    costs its share of one start: a choice problem adds up costs and cannot count a cost once for all.

    Args:
        graph: The graph.
        nests: Loop nests by signature's number.
        gradients: Values that are gradients.
        accumulated: Operations whose results a loop adds up, which are gradients, too.
    """
    columns = graph.columns
    summing = [n for n, nest in nests.items() if any(loop.kind in REDUCING for loop in nest.loops)]
    sums = np.isin(columns.signature, summing)
    of_gradients = np.zeros(len(sums), bool)
    of_gradients[[*columns.producer[sorted(gradients)].tolist(), *accumulated]] = True
    of_update = ~of_gradients & (columns.phase == PHASES.index(UPDATE))
    starts = np.ones(len(sums))
    for together in (sums & of_gradients, sums & of_update):
        starts[together] = 1 / max(int(together.sum()), 1)
    return starts
