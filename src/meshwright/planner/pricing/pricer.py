"""Prices every strategy of a group on one mesh: shardings, compute, collectives and memory, all strategies at once."""

from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats
from meshwright.cost.load import Loads
from meshwright.cost.rates import cluster_rates
from meshwright.cost.work import loads_of
from meshwright.cost.xla_gpu.kernels import workspace_bytes
from meshwright.cost.xla_gpu.traffic import TAKING, Traffic
from meshwright.graph import Graph
from meshwright.graph.accumulation import Accumulated
from meshwright.hardware import Mesh
from meshwright.planner.grouping.groups import Group, Grouping
from meshwright.planner.grouping.joined_sums import PartialSum
from meshwright.planner.pricing.corrections import CorrectedTimes, Corrections
from meshwright.planner.pricing.group_table import Event, GroupTable
from meshwright.planner.pricing.neighbours import borders, mixed
from meshwright.planner.pricing.user_shardings import as_written
from meshwright.rules.base import settled_itemsize
from meshwright.strategy.candidates import (
    Assignment,
    Candidates,
    enumerate_candidates,
    follow,
    keeps_apart,
    most_split,
    reducing_axes,
    result_holders,
    settlements,
    tensor_holders,
    uniform,
)
from meshwright.strategy.reshard import SLICE, Resharding
from meshwright.strategy.sharding import Axes, Codes, Holders

# On three axes a product has up to a thousand strategies. All strategies that a mesh of two axes has are kept, so that
# a third axis does not make the plan worse, and so are the cheapest of the others: on 8 layers of Llama-3-8B, 2×4×8,
# that gave the optimum over all strategies in a fortieth of the time; the cheapest alone were 22% off.
MAX_STRATEGIES = 160

_REWRITTEN_ON = ("NVIDIA", "AMD")  # where XLA turns products of scaled float8 numbers into products of float8
_IN_PLACE = ("scatter", "dynamic_update_slice", "select_and_scatter")
_PUTTING = ("dynamic_update_slice", "loop_stack")  # write only the update; the rest stays in place


class Pricer:
    """Prices groups on one mesh, at the rates inside a step.

    Args:
        grouping: The groups.
        traffic: The bytes that the operations move.
        mesh: The mesh.
        itemise: Whether collectives are listed one by one.
        corrections: What was measured.
        num_devices: How many devices work, where the mesh has a part of them.
    """

    def __init__(
        self,
        grouping: Grouping,
        traffic: Traffic,
        mesh: Mesh,
        itemise: bool = False,
        corrections: Corrections | None = None,
        num_devices: int | None = None,
    ):
        self.grouping = grouping
        self.corrections = corrections
        self.itemise = itemise
        self.graph: Graph = grouping.graph
        self.mesh = mesh
        self.axes = Axes(mesh.sizes)
        company = 1 if corrections is not None and corrections.alone else num_devices
        self.rates = None if mesh.cluster is None else cluster_rates(mesh.cluster, company)
        self.times = CorrectedTimes(mesh, {} if corrections is None else corrections.collectives)
        self.resharding = Resharding(self.times, self.axes)
        self.traffic = traffic
        self._candidates: dict[tuple[int, bool], Candidates] = {}
        self._tables: dict[tuple[int | None, int | None, bool], GroupTable] = {}

    def price(self, group: Group, scatter: bool = True) -> GroupTable:
        """The table of one group; ``scatter`` says whether partial sums may be settled by reduce-scatter.

        It is computed once: methods that fix different choices share it, and must copy a table they `select` from.
        """
        key = (group.leader, group.argument, scatter)
        if key not in self._tables:
            self._tables[key] = self._price(group, scatter)
        return self._tables[key]

    def _price(self, group: Group, scatter: bool) -> GroupTable:
        if group.argument is not None:
            codes = self.axes.legal_codes(self.graph.types[group.argument].shape)
            table = GroupTable(None, [codes] if group.values else [])
            size = len(codes)
        else:
            assert group.leader is not None
            nest = self.grouping.nests[group.leader]
            key = (id(nest), scatter)
            if key not in self._candidates:
                found = enumerate_candidates(nest, self.axes, scatter)
                found = as_written(self.graph.ops[group.leader], nest, self.mesh, found)
                # If compute is free, replicating all work would win: on an abstract mesh the work must be split.
                spread = self.mesh.is_abstract and nest.flops > 0
                self._candidates[key] = most_split(found, self.axes) if spread else found
            table = GroupTable(self._candidates[key], [])
            size = len(self._candidates[key].loops)
        table = self._walk(group, table, size)
        if group.leader is not None and size > MAX_STRATEGIES:
            assert table.candidates is not None
            costs = table.compute + table.communication
            first = np.lexsort((costs, ~uniform(table.candidates)))[:MAX_STRATEGIES]
            table.select(np.sort(first))
        return table

    def explain(self, group: Group, table: GroupTable, strategy: int) -> GroupTable:
        """The table of one strategy alone, with every collective named."""
        one = GroupTable(None, [codes[[strategy]] for codes in table.codes[:1]])
        if (chosen := table.candidates) is not None:
            one = GroupTable(Candidates(chosen.loops[[strategy]], chosen.scatter[[strategy]]), [])
        return self._walk(group, one, 1)

    def _walk(self, group: Group, table: GroupTable, size: int) -> GroupTable:
        table.compute, table.communication, table.gradients = np.zeros(size), np.zeros(size), np.zeros(size)
        _Walk(self, group, table).run()
        return table


class _Walk:
    """One pass over a group's operations."""

    def __init__(self, pricer: Pricer, group: Group, table: GroupTable):
        self.pricer = pricer
        self.grouping = pricer.grouping
        self.graph = pricer.graph
        self.group = group
        self.table = table
        self.size = len(table.compute)
        self.place = pricer.grouping.place
        self.own = set(group.values)
        self.path = self.grouping.joining.paths.get(-1 if group.leader is None else group.leader, ())
        self.paid: dict[tuple[int, str, int], list[Codes]] = {}

    def run(self) -> None:
        for member, (index, followed) in enumerate(zip(self.group.ops, self.group.follows, strict=True)):
            self._operation(member, index, followed)
        for slot in self.group.slots[len(self.table.needs) :]:  # values that arguments and carries take on
            self._need(slot.value, self.table.codes[slot.operand], "")

    def _operation(self, member: int, index: int, followed: int) -> None:
        op, nest, axes = self.graph.ops[index], self.grouping.nests[index], self.pricer.axes
        if followed < 0:
            assert self.table.candidates is not None
            loops, scatter = self.table.candidates.loops, self.table.candidates.scatter
        else:
            have = self.table.codes[self.place[op.inputs[followed]]]
            loops, scatter = follow(nest, axes, nest.operands[followed], axes.unpack(have)), None
        self.table.assignments.append(loops)
        read = [self._operand(member, index, position, value, loops) for position, value in enumerate(op.inputs)]
        written = [self._result(member, index, at, value, loops, scatter) for at, value in enumerate(op.outputs)]
        if index in self.path:
            self._hand_on(member, index, followed, loops)
        if op.primitive in TAKING:
            read[0] = np.minimum(read[0], self._made_bytes(index, loops))
        elif op.primitive in _PUTTING:
            *_, given = read[: 2 if op.primitive == "dynamic_update_slice" else 1]
            read, written = [given], [np.minimum(written[0], given)]
        moved = sum(read + written, np.zeros(self.size))
        sizes = np.array(axes.sizes)
        parts = np.where(loops >= 0, sizes, 1).prod(axis=1)
        fetches = np.zeros(self.size)
        if nest.num_fetches:
            fetches = nest.num_fetches / np.where(np.isin(loops, nest.fetching), sizes, 1).prod(axis=1)
        self._halo(member, index, loops)
        for sent in nest.sent:
            along = tuple(self.pricer.mesh.names.index(name) for name in sent.axes)
            size = np.full(self.size, sent.num_bytes)
            self._event(sent.kind, along, size, member, op.trips * sent.trips, "activation")
        if not self.graph.on_cpu and (workspace := workspace_bytes(op.signature)):
            self.table.transient.append((member, workspace / parts))
        work = self._work(index, parts, moved, fetches)
        seconds = np.zeros(self.size) if self.pricer.rates is None else op.trips * self.pricer.rates.loads_s(work)
        if self.pricer.corrections is not None:
            chosen = None if self.table.candidates is None else self.table.candidates.loops
            seconds = seconds * self.pricer.corrections.factors(axes.sizes, index, self.group.leader, chosen)
        self.table.compute += seconds
        self._item(member, "compute", seconds)
        self._mix(member, index, loops, seconds)
        if self.size == 1:
            self.table.loads.append(work.first)

    def _work(self, index: int, parts: NDArray[np.int64], moved: Floats, fetches: Floats) -> Loads:
        op, nest, traffic = self.graph.ops[index], self.grouping.nests[index], self.pricer.traffic
        chip = self.pricer.mesh.chip
        rewritten = self.grouping.dequantized if chip is not None and chip.vendor in _REWRITTEN_ON else {}
        return loads_of(
            chip,
            op.signature,
            nest,
            parts,
            moved,
            fetches,
            rewritten.get(index),
            int(traffic.computed[index]),
            bool(traffic.starts[index]),
            op.trips,
            op.recomputed,
        )

    def _hand_on(self, member: int, index: int, followed: int, loops: Assignment) -> None:
        """Follows the group's sum to the additions at which it joins another or is joined."""
        nest, joining, table = self.grouping.nests[index], self.grouping.joining, self.table
        inputs, outputs = self.graph.ops[index].inputs, self.graph.ops[index].outputs
        if followed < 0:
            self.sum = PartialSum(self.pricer.axes, nest, loops)
        else:
            self.sum.pass_through(nest, followed, loops, table.codes[self.place[inputs[followed]]])
        held = self.sum.held(table.codes[self.place[outputs[0]]])
        if index in joining.joints:
            slots = enumerate(self.group.slots)
            table.takes[next(i for i, slot in slots if slot.member == member and slot.operand != followed)] = held
        if index == self.path[-1] and self.group.leader in joining.joins:
            table.offers = held

    def _made_bytes(self, index: int, loops: Assignment) -> Floats:
        """Bytes of an operation's first result on one device, before partial sums are settled."""
        nest, value = self.grouping.nests[index], self.graph.ops[index].outputs[0]
        made = self.pricer.axes.pack(tensor_holders(nest.results[0], loops, len(nest.loops)))
        return self.graph.types[value].num_bytes / self.pricer.axes.num_parts(made)

    def _operand(self, member: int, index: int, position: int, value: int, loops: Assignment) -> Floats:
        """Prices the resharding of one operand; returns the bytes of it that are read."""
        kind = self.graph.types[value]
        if not kind.shape:
            return np.zeros(self.size)
        op, nest, axes = self.graph.ops[index], self.grouping.nests[index], self.pricer.axes
        trips = float(self.graph.columns.read_trips[index])
        need = axes.pack(tensor_holders(nest.operands[position], loops, len(nest.loops)))
        local = kind.num_bytes / axes.num_parts(need)
        if value in self.own:
            self._internal(member, value, need, op.phase, trips)
        elif self.grouping.is_real(value):
            self._need(value, need, op.phase)
        else:
            for root, root_need in self._pull(value, need):
                if root in self.own:
                    self._internal(member, root, root_need, op.phase, trips)
                else:
                    self._need(root, root_need, op.phase)
            in_place = position == 0 and op.primitive.startswith(_IN_PLACE)  # the result reuses the operand's memory
            if not nest.fusible and value not in self.graph.constants and not in_place:
                self.table.transient.append((member, local))
                return local
        return local * self.pricer.traffic.reads[self.graph.columns.start[index] + position]

    def _result(
        self, member: int, index: int, position: int, value: int, loops: Assignment, scatter: Holders | None
    ) -> Floats:
        """Settles one result's partial sums and records its sharding; returns the bytes of it that are written."""
        kind, nest, axes = self.graph.types[value], self.grouping.nests[index], self.pricer.axes
        partial = reducing_axes(nest, loops, nest.results[position])
        made = axes.pack(tensor_holders(nest.results[position], loops, len(nest.loops)))
        local, sent = kind.num_bytes / axes.num_parts(made), self.table.communication.copy()
        if partial.any():
            apart, wide = keeps_apart(nest, loops), settled_itemsize(nest, kind) / max(kind.itemsize, 1)
            for waits, on in ((self.grouping.accumulated.get(index), apart), (None, ~apart)):
                self._settle(member, index, local * wide, partial & on[:, None], scatter, waits)
        if index in self.grouping.joining.joins:
            self.table.settling = self.table.communication - sent
        if value in self.own:
            settled = made if scatter is None else axes.pack(result_holders(nest, loops, scatter, position))
            self.table.codes.append(settled)
        return local * self.pricer.traffic.writes[value]

    def _settle(
        self,
        member: int,
        index: int,
        local: Floats,
        partial: NDArray[np.bool_],
        scatter: Holders | None,
        waits: Accumulated | None,
    ) -> None:
        """Adds the collectives of `settlements`."""
        if not partial.any():
            return
        op, mesh = self.graph.ops[index], self.pricer.mesh
        gradient = waits is not None or not self.grouping.gradients.isdisjoint(op.outputs)
        purpose = "gradient" if gradient else "activation"
        trips, left = (op.trips, local.copy()) if waits is None else (waits.trips, local * waits.growth)
        start = 1.0 if mesh.is_abstract else float(self.grouping.starts[index])
        for kind, on_axes, on in settlements(partial, scatter):
            self._event(kind, on_axes, np.where(on, left, 0.0), member, trips, purpose, start)
            if kind == "reduce_scatter":
                left[on] /= prod(mesh.sizes[axis] for axis in on_axes)

    def _halo(self, member: int, index: int, loops: Assignment) -> None:
        """Adds the permutes of windows that are split."""
        op, nest = self.graph.ops[index], self.grouping.nests[index]
        for axis, border in borders(self.graph, op, nest, self.pricer.axes, loops):
            self._event("permute", (axis,), border, member, op.trips, "halo")

    def _mix(self, member: int, index: int, loops: Assignment, seconds: Floats) -> None:
        """Adds what devices send each other where the positions that an operation mixes are split.

        What goes around does so while the device computes with what it has: compute waits for the rest alone.
        """
        op, nest = self.graph.ops[index], self.grouping.nests[index]
        beside = seconds / (2 if nest.mixing.returned else 1)
        for sent in mixed(self.graph, op, nest, self.pricer.axes, loops):
            for num_bytes in sent.exchanged:
                self._event("permute", sent.along, num_bytes, member, 2 * op.trips, "exchange")
            self.table.transient.append((member, sent.held))
            for num_bytes, times in ((sent.passed, sent.num_devices - 1), (sent.returned, sent.num_devices)):
                self._event("permute", sent.along, num_bytes, member, times * op.trips, "ring", beside=beside)

    def _internal(self, member: int, value: int, need: Codes, phase: str, trips: float) -> None:
        """Reshards a value within the group if an operation needs it in another sharding."""
        have = self.table.codes[self.place[value]]
        if np.array_equal(have, need):
            return
        shape, itemsize = self.graph.types[value].shape, int(self.graph.sent_itemsize[value])
        cost = self.pricer.resharding.pairwise(shape, itemsize, have, need)
        paid = self.paid.setdefault((value, phase, int(self.graph.body[self.group.ops[member]])), [])
        for earlier in paid:
            cost = np.where(earlier == need, 0.0, cost)
        paid.append(need)
        self._send("reshard", (), trips * cost)
        self._item(member, "reshard", trips * cost)
        if self.size == 1 and cost[0] > 0:
            for hop in self.pricer.resharding.path(shape, itemsize, int(have[0]), int(need[0])):
                if hop.kind != SLICE:
                    event = Event(hop.kind, hop.axes, hop.num_bytes, trips * hop.seconds, member, "reshard", trips)
                    self.table.events.append(event)

    def _need(self, value: int, need: Codes, phase: str) -> None:
        """Records the sharding that a slot needs; equal needs of a value in one phase and body are priced once."""
        slots, body = self.group.slots, self.graph.body
        number = len(self.table.needs)
        assert slots[number].value == value
        free = np.zeros(self.size, bool)
        if phase:
            for earlier in range(number):
                if slots[earlier].value != value or self._phase_of(earlier) != phase:
                    continue
                if body[self.group.ops[slots[earlier].member]] == body[self.group.ops[slots[number].member]]:
                    free |= self.table.needs[earlier] == need
        self.table.needs.append(need)
        self.table.duplicate.append(free)

    def _phase_of(self, slot: int) -> str:
        member = self.group.slots[slot].member
        return self.graph.ops[self.group.ops[member]].phase if member >= 0 else ""

    def _pull(self, value: int, need: Codes) -> list[tuple[int, Codes]]:
        """The shardings of the real values that a virtual value, needed in some sharding, is computed from."""
        axes = self.pricer.axes
        wanted: dict[int, Codes] = {value: need}
        for index in self.grouping.pulled(value):
            op, nest = self.graph.ops[index], self.grouping.nests[index]
            result = next(p for p, v in enumerate(op.outputs) if v in wanted)
            loops = follow(nest, axes, nest.results[result], axes.unpack(wanted[op.outputs[result]]))
            for position, v in enumerate(op.inputs):
                if self.graph.types[v].shape and v not in wanted:
                    wanted[v] = axes.pack(tensor_holders(nest.operands[position], loops, len(nest.loops)))
        return [(root, wanted[root]) for root in self.grouping.roots(value)]

    def _event(
        self,
        kind: str,
        axes: tuple[int, ...],
        num_bytes: Floats,
        member: int,
        trips: float,
        purpose: str,
        start: float = 1.0,
        beside: Floats | float = 0.0,
    ) -> None:
        seconds = np.where(num_bytes > 0, trips * self.pricer.times.collective_s(kind, axes, num_bytes, start), 0.0)
        seconds = np.maximum(seconds - beside, 0.0)
        self._send(kind, axes, seconds)
        self._item(member, purpose, seconds)
        if purpose == "gradient":
            self.table.gradients += seconds
        if self.size == 1 and num_bytes[0] > 0:
            self.table.events.append(Event(kind, axes, float(num_bytes[0]), float(seconds[0]), member, purpose, trips))

    def _send(self, kind: str, axes: tuple[int, ...], seconds: Floats) -> None:
        self.table.communication += seconds
        self.table.sent[kind, axes] = self.table.sent.get((kind, axes), 0.0) + seconds

    def _item(self, member: int, purpose: str, seconds: Floats) -> None:
        if self.pricer.itemise:
            self.table.items.append((member, purpose, seconds))
