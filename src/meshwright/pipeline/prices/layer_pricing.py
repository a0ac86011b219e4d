"""Prices every layer at once: one intra-op solve on one view, its costs and bytes attributed to layers.

The number of solves therefore does not depend on the number of layers or of ranges of layers: the cost of a range is
the sum of the costs of its layers.
"""

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from meshwright.arrays import Bools, Floats, Ints
from meshwright.cost.xla_gpu.liveness import held_for_backward, liveness
from meshwright.errors import ShardingError
from meshwright.graph.phases import BACKWARD, FORWARD, PHASES, UPDATE
from meshwright.hardware import Mesh
from meshwright.pipeline.layers.batch_sizes import Resized
from meshwright.pipeline.layers.forward_pass import Flow
from meshwright.pipeline.layers.layers import Layers
from meshwright.pipeline.prices.layer_prices import Item, LayerPrices
from meshwright.planner.grouping.folding import Folded, fold
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.roles import find_roles
from meshwright.planner.methods import Method
from meshwright.planner.pricing.formulation import Formulation
from meshwright.planner.pricing.group_table import SETTLING
from meshwright.planner.pricing.pricer import Pricer
from meshwright.planner.reading.readback import Readback
from meshwright.solver import ChoiceProblem, solve

_MEMORY_PRICE = 100.0  # price of the least feasible memory, in times of the step, that makes the solver minimise memory


# Limit for one solve. Optimality is mostly proved in hundredths of a second, and in five at most for the models of the
# tests: it is there so that none is endless, and no slow machine prices a choice that is far from the best.
_SECONDS = 120.0


class Pricing:
    """A graph at one number of rows, ready to be priced on any view of a part of some devices."""

    def __init__(self, resized: Resized, layers: Layers, num_devices: int | None = None):
        self.graph, nests = resized
        self.layers, self.num_devices = layers, num_devices
        self.grouping = Grouping(self.graph, nests)
        self.roles = find_roles(self.graph)
        self.live = liveness(self.graph, self.grouping.nests)
        self.flow = Flow(self.graph, self.grouping.nests, self.roles)
        self._folded: dict[str, Folded] = {}
        self._pricers: dict[Mesh, Pricer] = {}
        self._known: dict[tuple[Mesh, int, bytes], LayerPrices] = {}  # by view, tied values, and choice
        self._last: tuple[tuple[Mesh, str], Formulation] | None = None

    def price(self, mesh: Mesh, method: Method, least_memory: bool = False) -> LayerPrices | None:
        """The layers' prices under the fastest choice for one microbatch, or None if no choice is feasible.

        Args:
            mesh: The view.
            method: The constraints on the choice.
            least_memory: Whether to take the choice that needs least memory instead.
        """
        try:
            formulation = self.formulate(mesh, method)
        except ShardingError:
            return None
        return self.solve(
            formulation, formulation.problem({}, None, byte_prices=_byte_prices(formulation) if least_memory else {})
        )

    def solve(self, formulation: Formulation, problem: ChoiceProblem) -> LayerPrices | None:
        """The layers' prices under the best choice of a view's problem, whatever its costs; None if infeasible."""
        choice = solve(problem, seconds=_SECONDS).choice
        if choice is None:
            return None
        key = (formulation.mesh, id(formulation.folded), choice.tobytes())
        if key not in self._known:
            self._known[key] = self._read(Readback(formulation, choice))
        return self._known[key]

    def formulate(self, mesh: Mesh, method: Method) -> Formulation:
        """The problem of one view; the last one is cached, since it is used twice."""
        key = (mesh, method.name)
        if self._last is None or self._last[0] != key:
            if method.name not in self._folded:
                self._folded[method.name] = fold(self.grouping, method.pins(self.graph, self.roles), self.live.traffic)
            if mesh not in self._pricers:
                self._pricers[mesh] = Pricer(
                    self.grouping, self.live.traffic, mesh, itemise=True, num_devices=self.num_devices
                )
            pricer, folded = self._pricers[mesh], self._folded[method.name]
            restrictions = method.restrict(self.graph, self.roles, mesh, pricer.axes)
            self._last = key, Formulation(pricer, folded, self.live, restrictions)
        return self._last[1]

    def units(self, folded: Folded) -> Ints:
        """The unit of each group, then of each shared reading: that of its first reader."""
        places, slots = self.layers.places, self.grouping.slots
        led = [
            places.unit[group.leader] if group.argument is None else places.arguments[group.argument][0]
            for group in self.grouping.groups
        ]
        read = [slots.op[slots.start[group] + rank] for group, rank in (s.readers[0] for s in folded.shared)]
        return np.array([*led, *places.unit[read]], np.int64)

    def _read(self, back: Readback) -> LayerPrices:
        compute, sent, gradients = self._seconds(back)
        masks, products = self._masks, self.flow.flops > 0
        items = np.zeros((len(Item), self.layers.num_layers))
        for item, weights in (
            (Item.FORWARD, compute * masks["forward"]),
            (Item.FORWARD_SENT, sent * masks["forward"]),
            (Item.BACKWARD, compute * masks["backward"]),
            (Item.BACKWARD_SENT, sent * masks["backward"]),
            (Item.WEIGHTS, compute * masks["weights"]),
            (Item.FORWARD_PRODUCTS, compute * masks["forward"] * products),
            (Item.BACKWARD_PRODUCTS, compute * masks["backward"] * products),
            (Item.REPEATED, compute * masks["repeated"]),
            (Item.REPEATED_SENT, sent * masks["repeated"]),
            (Item.AGAIN, compute * masks["again"]),
            (Item.AGAIN_PRODUCTS, compute * masks["again"] * products),
            (Item.AGAIN_SENT, sent * masks["again"]),
            (Item.GRADIENTS_SENT, gradients),
            (Item.UPDATE, compute * masks["update"]),
            (Item.UPDATE_SENT, sent * masks["update"]),
        ):
            items[item] = self._by_layer(self.layers.places.unit, weights)
        self._bytes(back, items)
        state = [*self.roles.parameters, *self.roles.optimizer]
        codes = back.made[state]
        ranks = [len(self.graph.types[v].shape) for v in state]
        specs = {v: back.spec(*key) for v, *key in zip(state, codes.tolist(), ranks, strict=True)}
        held = self.flow.num_bytes[state] / back.axes.num_parts(codes)
        local = dict(zip(state, held.tolist(), strict=True))
        over = [back.axes.dims(back.code(v), 1)[0] for v in self.roles.data if self.graph.types[v].shape]
        split = max((math.prod(back.axes.sizes[a] for a in axes) for axes in over), default=1)
        return LayerPrices(items, split, specs, local)

    def _seconds(self, back: Readback) -> tuple[Floats, Floats, Floats]:
        """Compute, communication and reductions of gradients of each operation."""
        ops, size = self.grouping.ops, len(self.graph.columns.signature)
        compute, sent, gradients = np.zeros(size), np.zeros(size), np.zeros(size)
        alone = np.ones(size, bool)
        alone[list(back.joined)] = False
        for which, members in enumerate(back.folded.members):
            strategy = back.choice[which]
            for member, purpose, seconds in back.formulation.tables[which].items:
                if seconds[strategy]:
                    target = compute if purpose == "compute" else sent if purpose == "reshard" else gradients
                    at = ops.items[ops.start[members] + member]
                    target[at[alone[at]] if purpose in SETTLING else at] += seconds[strategy]
        last = self.ends
        sent += np.where(last, 0.0, gradients)
        gradients[~last] = 0.0
        known: dict[tuple[int, int, int, int], float] = {}
        for item in back.resharded():
            if item.op >= 0:
                kind, size = int(self.graph.kind[item.value]), int(self.graph.sent_itemsize[item.value])
                key = (kind, size, item.source, item.target)
                if key not in known:
                    known[key] = sum(hop.seconds for hop in back.hops(item))
                sent[item.op] += item.trips * known[key]
        return compute, sent, gradients

    def _bytes(self, back: Readback, items: Floats) -> None:
        made, live, columns = back.made, self.live, self.graph.columns
        local = self.flow.num_bytes / back.axes.num_parts(made)
        owner = {v: units[0] for v, units in self.layers.places.arguments.items()}
        for item, state in (
            (Item.PARAMETER_BYTES, self.roles.parameters),
            (Item.OPTIMIZER_BYTES, self.roles.optimizer),
        ):
            items[item] = self._by_layer(np.array([owner[v] for v in state], np.int64), local[list(state)])
        data = [v for v in self.roles.data if v in owner]  # each device of a replica has all rows of the replica
        units = np.array([owner[v] for v in data], np.int64)
        items[Item.DATA_BYTES] = self._by_layer(units, self.flow.num_bytes[data])
        if self.trains:
            items[Item.GRADIENT_BYTES] = items[Item.PARAMETER_BYTES]
        reads = [(u, v) for v in self.roles.parameters for u in self.layers.places.arguments[v]]
        units, values = np.array(reads, np.int64).reshape(-1, 2).T
        items[Item.READ_BYTES] = self._by_layer(units, local[values])
        held, copies, kept = self._held
        unit = self.layers.places.unit
        for item, values in ((Item.HELD_BYTES, held), (Item.COPY_BYTES, copies), (Item.KEPT_BYTES, kept)):
            items[item] = self._by_layer(unit[columns.producer[values]], local[values])
        for layer, values in self._inputs.items():
            items[[Item.INPUT_BYTES, Item.CROSSING_BYTES], layer] = local[values].sum()
        items[Item.KEPT_BYTES] += items[Item.INPUT_BYTES]
        for item in (Item.KEPT_BYTES, Item.INPUT_BYTES):  # the user's own checkpoints may keep less
            items[item] = np.minimum(items[item], items[Item.HELD_BYTES])
        brief = live.stored & (live.stop > live.start) & (columns.producer >= 0)
        brief &= live.stop <= self._update_at
        brief[held] = brief[copies] = False
        change = back.copies().change(len(unit))
        np.add.at(change, live.start[brief], local[brief])
        np.add.at(change, np.minimum(live.stop[brief], len(unit)), -local[brief])
        peak = np.zeros(len(self.layers.first))
        working = ~self._masks["update"].astype(bool)
        np.maximum.at(peak, unit[working], np.cumsum(change)[:-1][working])
        for first, count, size in zip(self.layers.first, self.layers.count, peak, strict=True):
            place = items[Item.TRANSIENT_BYTES, first : first + count]
            np.maximum(place, size, out=place)

    @property
    def trains(self) -> bool:
        return bool(self._masks["backward"].any())

    @property
    def copies(self) -> Ints:
        """Copies of parameters that are kept for the backward pass."""
        return self._held[1]

    def homes(self, values: Ints) -> Ints:
        """The unit of each of some values: that of its owner or, if an operation computes it, that of the operation."""
        made, arguments = self.graph.columns.producer[values], self.layers.places.arguments
        found = [arguments[v][0] if at < 0 else -1 for v, at in zip(values.tolist(), made.tolist(), strict=True)]
        return np.where(made < 0, np.array(found, np.int64), self.layers.places.unit[made])

    def often(self, checkpoint: str) -> Floats:
        """How often a microbatch runs each operation; the user's own recomputation is already in the program twice."""
        if checkpoint == "none" or self.flow.recomputed.any():
            return np.ones(len(self.graph.columns.signature))
        return 1 + self._masks["forward" if checkpoint == "full" else "again"]

    def kept(self, checkpoint: str, chunks: Sequence[tuple[int, int]], share: Floats) -> tuple[Ints, Floats]:
        """Values that are held for the backward pass of one microbatch, and the part of each that some layers hold."""
        held, _, products = self._held
        own = {"none": held, "selective": products, "full": held[:0]}[checkpoint]
        parts = share[self.homes(own)]
        if checkpoint == "none":
            return own, parts
        inputs = [self._inputs[layer] for a, b in chunks for layer in range(a, b) if layer in self._inputs]
        come = np.concatenate([own[:0], *inputs])
        return np.concatenate([own, come]), np.concatenate([parts, np.ones(len(come))])

    def _by_layer(self, unit: Ints, weights: Floats) -> Floats:
        return self.layers.gather(unit, weights)

    @cached_property
    def _masks(self) -> dict[str, Floats]:
        """For each item, 1 at the operations that belong to it."""
        columns, flow = self.graph.columns, self.flow
        phase = {name: columns.phase == PHASES.index(name) for name in (FORWARD, BACKWARD, UPDATE)}
        masks = {
            "forward": phase[FORWARD],
            "backward": phase[BACKWARD],
            "update": phase[UPDATE],
            "weights": self.ends & (flow.flops > 0),
            "repeated": flow.recomputed,
            "again": phase[FORWARD] & ~self._on_weights,
        }
        return {name: mask.astype(float) for name, mask in masks.items()}

    @cached_property
    def ends(self) -> Bools:
        """Backward operations on which no contraction or summing scatter of the backward pass depends: weights'
        gradients.

        Their reductions over devices are deferred until the gradients of all microbatches are summed.
        """
        columns, backward = self.graph.columns, self.graph.columns.phase == PHASES.index(BACKWARD)
        leads = [nest.leads for nest in self.grouping.nests]
        carried = {t.carry: t.made for t in self.graph.ties}
        first, count, start = columns.first_made.tolist(), columns.num_made.tolist(), columns.start.tolist()
        awaited, ends, reads = bytearray(columns.num_values), np.zeros(len(first), bool), columns.reads.tolist()
        for i in np.flatnonzero(backward)[::-1].tolist():
            feeds = any(awaited[first[i] : first[i] + count[i]])
            ends[i] = not feeds
            if feeds or leads[i]:
                for value in reads[start[i] : start[i + 1]]:
                    awaited[value] = True
                    if value in carried:
                        awaited[carried[value]] = True
        return ends

    @cached_property
    def _on_weights(self) -> Bools:
        """Contractions of activations with weights, which selective recomputation does not repeat."""
        columns, flow = self.graph.columns, self.flow
        weights = np.zeros(len(columns.signature), bool)
        weights[columns.reader[~flow.from_data[columns.reads]]] = True
        return weights & (flow.flops > 0)

    @cached_property
    def _update_at(self) -> int:
        """Index of the first operation of the update."""
        update = np.flatnonzero(self.graph.columns.phase == PHASES.index(UPDATE))
        return int(update[0]) if len(update) else len(self.graph.columns.signature)

    @cached_property
    def _held(self) -> tuple[Ints, Ints, Ints]:
        """Values kept for the backward pass: activations, copies of weights, and those kept when recomputing."""
        waits = held_for_backward(self.graph, self.live) & (self.grouping.placed.home >= 0)
        held = np.flatnonzero(waits & self.flow.from_data)
        kept = held[self._on_weights[self.graph.columns.producer[held]]]
        return held, np.flatnonzero(waits & ~self.flow.from_data), kept

    @cached_property
    def _inputs(self) -> dict[int, Ints]:
        """For each layer the values that cross the cut before it."""
        columns, flow, unit = self.graph.columns, self.flow, self.layers.places.unit
        forward = columns.phase[columns.reader] == PHASES.index(FORWARD)
        made = columns.producer[columns.reads]
        forward &= (made >= 0) & flow.from_data[columns.reads]
        value, begin, end = columns.reads[forward], unit[made[forward]], unit[columns.reader[forward]]
        first, count = self.layers.first, self.layers.count
        found: dict[int, Ints] = {}
        for number, (layer, many) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
            if many > 1:
                carried = [t.carry for t in self.graph.ties if unit[columns.producer[t.carry]] == number]
                here = np.array([v for v in carried if flow.from_data[v]], np.int64)
                found |= dict.fromkeys(range(layer + 1, layer + many), here)
            if layer:
                crosses = (first[begin] < layer) & (first[end] >= layer)
                found[layer] = np.unique(value[crosses])
        return found


def _byte_prices(formulation: Formulation) -> dict[int, float]:
    """A price of memory, at the point where the least is needed, that outweighs time."""
    least = formulation.memory.least()
    rate = _MEMORY_PRICE * sum(n * cost.max() for n, cost in zip(formulation.copies, formulation.costs, strict=True))
    return {least.peak_at: rate / max(least.peak_bytes, 1)}
