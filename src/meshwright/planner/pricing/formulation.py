"""Formulates the choice problem of a folded graph on one mesh.

Nodes are classes of groups and of shared readings; a node's strategies are its leader's. Choosing strategy ``s_i`` for
each node ``i`` minimises

    Σ_i  n_i · (compute_i(s_i) + collectives_i(s_i))                    (`_node_costs`)
  + Σ_e  n_e · (reshard(sharding made by s_u, sharding needed by s_v)   (`_edge_matrices`)
                − seconds saved if the sum of u joins v's)

subject to, at every operation ``t`` of the step, ``Σ bytes live at t ≤ memory``   (`MemoryModel.usage`)

where ``n`` counts the tied copies. `exposed` is the same problem with the communication that can run beside compute at
the part of its time in which compute waits for it.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats, Ints
from meshwright.cost.xla_gpu.liveness import Liveness
from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.planner.grouping.folding import Folded
from meshwright.planner.grouping.groups import Group
from meshwright.planner.grouping.numbering import sort_by
from meshwright.planner.pricing.group_table import GroupTable
from meshwright.planner.pricing.memory import MemoryModel
from meshwright.planner.pricing.pricer import Pricer
from meshwright.solver import ChoiceProblem
from meshwright.solver.problem.copies import NO_INTS, Copied, EdgeKey, Lifetimes, Route
from meshwright.solver.problem.priced import Usage, choice_problem
from meshwright.strategy.candidates import most_scattered
from meshwright.strategy.sharding import Axes, Codes


@dataclass(frozen=True)
class Restrictions:
    """The choices that a method or the user fixes beforehand.

    Attributes:
        allowed: For an argument's value id, the codes it may have.
        results: For an output position, the code it must have.
        scatter_gradients: Whether partial sums of the backward pass may be settled by reduce-scatter.
        scattered: Axes over which sums of gradients must be settled by reduce-scatter, as far as their dims allow, and
            over no others; empty for any.
        stay: Value ids of arguments that may not be gathered before the update.
        gathered: Axes along which they may be gathered all the same.
        whole: Value ids of arguments that must be whole on every device, even if their dims could be split.
        splits: For an operation that leads, the loops of which every axis must split one.
    """

    allowed: Mapping[int, frozenset[int]] = field(default_factory=dict)
    results: Mapping[int, int] = field(default_factory=dict)
    scatter_gradients: bool = True
    scattered: frozenset[int] = frozenset()
    stay: frozenset[int] = frozenset()
    gathered: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    splits: Mapping[int, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Exposure:
    """The part of its time in which compute waits for communication that can run beside it.

    Attributes:
        fetches: Of copies of arguments, which are fetched ahead of the operations that read them.
        gradients: Of reductions of gradients, which run beside the rest of the backward pass.
    """

    fetches: float = 1.0
    gradients: float = 1.0


#: Operations that only pass an argument on in another type or order.
_HANDING_ON = frozenset(
    {"convert_element_type", "transpose", "reshape", "squeeze", "broadcast_in_dim", "copy", "optimization_barrier"}
)


def early_values(graph: Graph) -> set[int]:
    """Values that are available from the start: arguments, and casts and transposed copies of one."""
    early = set(graph.inputs)
    for op in graph.ops:
        if op.primitive in _HANDING_ON:
            early.update(made for given, made in zip(op.inputs, op.outputs, strict=False) if given in early)
    return early


class Formulation:
    """One mesh's tables and costs, and how to read a choice back."""

    def __init__(self, pricer: Pricer, folded: Folded, live: Liveness, restrictions: Restrictions):
        self.pricer = pricer
        self.grouping, self.mesh = pricer.grouping, pricer.mesh
        self.folded = folded
        self.live = live
        self.restrictions = restrictions
        self.exposure, self.whole = Exposure(), self
        alike: dict[int, GroupTable] = {}
        for which, members in enumerate(folded.members):
            if folded.alike[which] not in alike:
                alike[folded.alike[which]] = self._table(members[0])
        self.tables = [alike[token] for token in folded.alike]
        self.num_groups = len(self.tables)
        self.shared_codes = self._shared_codes()
        self.copies = [len(m) for m in (*folded.members, *folded.shared_members)]
        self.costs = self._node_costs()
        self.edges = self._edge_matrices()
        self._memory: MemoryModel | None = None

    @property
    def axes(self) -> Axes:
        return self.pricer.axes

    @property
    def memory(self) -> MemoryModel:
        if self._memory is None:
            self._memory = MemoryModel(self.grouping, self.folded, self.live, self.tables, self.axes, self.mesh)
        return self._memory

    def problem(
        self,
        times: Mapping[int, float],
        limit: float | None,
        routes: Mapping[EdgeKey, Route] = MappingProxyType({}),
        byte_prices: Mapping[int, float] = MappingProxyType({}),
    ) -> ChoiceProblem:
        """The folded problem with the memory limit at some times; see `choice_problem`."""
        held, copied = self.memory if times or byte_prices else Usage(0), self.copied if byte_prices else {}
        return choice_problem(self.copies, self.costs, self.edges, held, times, limit, routes, byte_prices, copied)

    def restricted(self, to: Restrictions) -> "Self | None":
        """The same problem, its strategies numbered alike, with those impossible that some restrictions rule out.

        None where they leave some node no strategy: one that ties what they tell apart, or of a mesh they do not suit.
        """
        kept = [self._kept(which, to) & np.isfinite(self.costs[which]) for which in range(self.num_groups)]
        if not all(keep.any() for keep in kept):
            return None
        found = copy(self)
        found._memory = self.memory
        costs = [np.where(keep, cost, np.inf) for keep, cost in zip(kept, self.costs, strict=False)]
        found.costs = [*costs, *self.costs[self.num_groups :]]
        if to.stay - self.restrictions.stay:
            stay = self.restrictions.stay | to.stay
            found.restrictions = replace(self.restrictions, stay=stay, gathered=to.gathered)
            found.edges = found._edge_matrices()
            found.__dict__.pop("copied", None)
        return found

    def exposed(self, exposure: Exposure) -> Self:
        """The same problem, its strategies numbered alike, with communication priced at what compute waits for it.

        Its least cost bounds that of the `whole` problem from below, since nothing costs more.
        """
        found = copy(self)
        found._memory, found.exposure = self.memory, exposure
        found.costs, found.edges = found._node_costs(), found._edge_matrices()
        found.__dict__.pop("copied", None)
        return found

    def _kept(self, which: int, to: Restrictions) -> NDArray[np.bool_]:
        """The strategies of a class that some restrictions allow all its members."""
        table = self.tables[which]
        keep = np.ones(len(self.costs[which]), bool)
        arguments = (self.grouping.groups[member].argument for member in self.folded.members[which])
        for allowed in {to.allowed[one] for one in arguments if one is not None and one in to.allowed}:
            if table.codes:
                keep &= np.isin(table.codes[0], sorted(allowed))
        leader = self.grouping.groups[self.folded.members[which][0]].leader
        if leader is None or table.candidates is None:
            return keep
        if to.scattered and self._sums_gradient(leader):
            return keep & most_scattered(table.candidates, self.axes, to.scattered)
        if not to.scatter_gradients and self.grouping.graph.ops[leader].phase == "backward":
            return keep & (table.candidates.scatter < 0).all(axis=1)
        return keep

    @cached_property
    def copied(self) -> dict[EdgeKey, Copied]:
        """The copies that each edge makes."""
        graph, order = self.grouping.graph, np.argsort(self.folded.untied.which, kind="stable")
        ends = np.searchsorted(self.folded.untied.which[order], np.arange(len(self.edges) + 1))
        times, found = self._lifetimes(), {}
        for number, (key, (_, matrix)) in enumerate(self.edges.items()):
            source, place, reader, slot = key
            if slot >= 0:
                needed, free = self.tables[reader].needs[slot], self.tables[reader].duplicate[slot]
            else:
                needed = self.shared_codes[reader - self.num_groups]
                free = np.zeros(len(needed), bool)
            saved, value = self.joined_s(*key), self.value_of(source, place)
            size = float(graph.sizes[value] * graph.sent_itemsize[value])
            some = order[ends[number] : ends[number + 1]]
            made, seconds = self._made(source, place), matrix if saved is None else matrix + saved
            found[key] = Copied(self.axes, made, needed, free, seconds, saved, size, times.of_some(some))
        return found

    def value_of(self, source: int, place: int) -> int:
        """One of the values that an edge transfers, by its source and the position there."""
        if place >= 0:
            return self.grouping.groups[self.folded.members[source][0]].values[place]
        return self.folded.shared[self.folded.shared_members[source - self.num_groups][0]].value

    def _made(self, source: int, place: int) -> Codes:
        return self.tables[source].codes[place] if place >= 0 else self.shared_codes[source - self.num_groups]

    def _lifetimes(self) -> Lifetimes:
        """When the copy of each untied edge is live: copies of shared readings, then copies of slots."""
        slots, columns, shared = self.grouping.slots, self.grouping.graph.columns, self.folded.shared
        if not len(columns.signature):
            nothing = np.zeros(len(self.folded.untied.which), np.int64)
            return Lifetimes(nothing, nothing, nothing, nothing > 0)
        readers, start, _ = sort_by(self.folded.through, len(shared))
        at = np.where(slots.op >= 0, slots.op, columns.producer[slots.value])
        at = np.where(at >= 0, at, len(columns.signature) - 1)
        begin = np.concatenate([start[:-1], len(readers) + np.arange(len(at))])
        values = np.concatenate([np.array([reading.value for reading in shared], np.int64), slots.value])
        return lifetimes(self.live, np.concatenate([slots.op[readers], at]), begin, values)

    def _table(self, group_id: int) -> GroupTable:
        group = self.grouping.groups[group_id]
        backward = group.leader is not None and self.grouping.graph.ops[group.leader].phase == "backward"
        table = self.pricer.price(group, self.restrictions.scatter_gradients or not backward)
        allowed = self.restrictions.allowed.get(group.argument) if group.argument is not None else None
        if allowed is not None and group.values:
            keep = np.isin(table.codes[0], sorted(allowed))
            if not keep.any():
                raise ShardingError(self._no_code(group.argument))
            return _selected(table, keep)
        loops = self.restrictions.splits.get(group.leader) if group.leader is not None else None
        if loops is not None and table.candidates is not None:
            keep = np.logical_and.reduce(np.isin(table.candidates.loops, sorted(loops)), axis=1)
            if not keep.any():
                raise ShardingError(self._no_split(group.leader))
            return _selected(table, keep)
        if self.restrictions.scattered and table.candidates is not None and self._sums_gradient(group.leader):
            return _selected(table, most_scattered(table.candidates, self.axes, self.restrictions.scattered))
        return table

    def _sums_gradient(self, leader: int | None) -> bool:
        """Whether an operation computes a gradient of an argument."""
        made = () if leader is None else self.grouping.graph.ops[leader].outputs
        return leader in self.grouping.accumulated or not self.grouping.gradients.isdisjoint(made)

    def _no_split(self, leader: int | None) -> str:
        assert leader is not None
        op = self.grouping.graph.ops[leader]
        return (
            f"{op.label} cannot be split as asked for on mesh {self.mesh.shape}: no loop of that type has a size that "
            "the axes divide; choose another split or mesh"
        )

    def _no_code(self, argument: int | None) -> str:
        graph = self.grouping.graph
        assert argument is not None
        path = graph.input_paths[graph.inputs.index(argument)]
        return (
            f"{path} has shape {graph.types[argument].shape}, which mesh {self.mesh.shape} cannot split evenly in the "
            "way asked for; choose dims that the axes divide, or another mesh"
        )

    def _shared_codes(self) -> list[Codes]:
        found = []
        for members in self.folded.shared_members:
            reading = self.folded.shared[members[0]]
            home = self.folded.group_class[self.grouping.home[reading.value]]
            codes = [self.tables[home].codes[self.grouping.place[reading.value]]]
            codes += [self.tables[self.folded.group_class[g]].needs[s] for g, s in reading.readers]
            found.append(np.unique(np.concatenate(codes)))
        return found

    def _node_costs(self) -> list[Floats]:
        hidden = 1.0 - self.exposure.gradients
        costs = [table.compute + table.communication - hidden * table.gradients for table in self.tables]
        graph, grouping = self.grouping.graph, self.grouping
        for output, code in self.restrictions.results.items():
            value = graph.outputs[output]
            if output not in graph.state and value in grouping.home:
                which = self.folded.group_class[grouping.home[value]]
                made = self.tables[which].codes[grouping.place[value]]
                kind = graph.types[value]
                extra = self.pricer.resharding.cost(
                    kind.shape, int(graph.sent_itemsize[value]), made, np.array([code])
                )[:, 0]
                costs[which] = costs[which] + extra / len(self.folded.members[which])
        return costs + [np.zeros(len(codes)) for codes in self.shared_codes]

    def _edge_matrices(self) -> dict[EdgeKey, tuple[int, Floats]]:
        found = {}
        early = early_values(self.grouping.graph) if self.exposure.fetches < 1.0 else set()
        for (source, place, reader, slot), count in self.folded.edges.items():
            matrix, saved = self.resharding_s(source, place, reader, slot), self.joined_s(source, place, reader, slot)
            if early and self.value_of(source, place) in early:
                matrix = np.where(np.isfinite(matrix), matrix * self.exposure.fetches, matrix)
            found[source, place, reader, slot] = count, matrix if saved is None else matrix - saved
        return found

    def joined_s(self, source: int, place: int, reader: int, slot: int) -> Floats | None:
        """Seconds that an edge saves, by strategies of its ends; None if no sum joins another."""
        if place < 0 or slot < 0:
            return None
        saved = self.tables[source].joined_s(self.tables[reader], slot)
        leader = self.grouping.groups[self.folded.members[source][0]].leader
        return saved if saved is None or not self._sums_gradient(leader) else self.exposure.gradients * saved

    def resharding_s(self, source: int, place: int, reader: int, slot: int) -> Floats:
        """Seconds of resharding of an edge, by strategies of its ends."""
        value, made = self.value_of(source, place), self._made(source, place)
        free = None
        stay = self.grouping.groups[self.grouping.home[value]].argument in self.restrictions.stay  # so do its casts
        if slot >= 0:
            group = self.grouping.groups[self.folded.members[reader][0]]
            needed, free, trips = (
                self.tables[reader].needs[slot],
                self.tables[reader].duplicate[slot],
                group.slots[slot].trips,
            )
            stay = stay and self._can_follow(group, slot)
        else:
            reading = self.folded.shared[self.folded.shared_members[reader - self.num_groups][0]]
            needed = self.shared_codes[reader - self.num_groups]
            trips = max(self.grouping.groups[g].slots[s].trips for g, s in reading.readers)
            stay = stay and all(self._can_follow(self.grouping.groups[g], s) for g, s in reading.readers)
        kind = self.grouping.graph.types[value]
        itemsize = int(self.grouping.graph.sent_itemsize[value])
        matrix = self.pricer.resharding.cost(kind.shape, itemsize, made, needed)
        if trips != 1:
            matrix *= trips
        if stay:
            gathered = self._parts_kept(needed)[None, :] < self._parts_kept(made)[:, None]
            matrix = np.where(gathered & ~gathered.all(axis=1, keepdims=True), np.inf, matrix)
        if free is not None and free.any():
            matrix[:, free] = 0.0
        return matrix

    def _parts_kept(self, codes: Codes) -> Floats:
        """Into how many parts shardings split a value along the axes along which it may not be gathered."""
        kept = np.ones(self.axes.num_axes, bool)
        kept[list(self.restrictions.gathered)] = False
        return np.where((self.axes.unpack(codes) >= 0) & kept, np.array(self.axes.sizes), 1).prod(axis=1)

    def _can_follow(self, group: Group, slot: int) -> bool:
        """Whether a group can read an argument without resharding: not in the update, nor if another argument leads."""
        member = group.slots[slot].member
        if member < 0 or group.argument is not None:
            return False
        return self.grouping.graph.ops[group.ops[member]].phase != "update"


def _selected(table: GroupTable, keep: NDArray[np.bool_]) -> GroupTable:
    """A table with some of the strategies; the pricer shares whole tables."""
    found = copy(table)
    found.select(keep)
    return found


def lifetimes(live: Liveness, readers: Ints, begin: Ints, values: Ints) -> Lifetimes:
    """When copies of some values are live.

    A copy that is sent is live early, since it is sent ahead. A copy that is only a slice of a value is computed inside
    the kernels that read it, if they can fuse other work at all.

    Args:
        live: When values can be sent, and which operations fuse other work.
        readers: The operations that read the first copy, then the operations that read the second and so on.
        begin: Where the readers of each copy begin; each copy has at least one.
        values: The value that each copy is of.
    """
    if not len(begin):
        return Lifetimes(NO_INTS, NO_INTS, NO_INTS, NO_INTS > 0)
    start, stop = np.minimum.reduceat(readers, begin), np.maximum.reduceat(readers, begin) + 1
    before = np.minimum.reduceat(live.before[readers], begin)
    ahead = np.minimum(start, np.maximum(before, live.ready[values]))
    return Lifetimes(start, stop, ahead, np.logical_and.reduceat(live.fuses[readers], begin))
