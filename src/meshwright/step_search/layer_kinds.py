"""What each kind of layer may keep for its backward pass: the bytes that it keeps, and the time to compute the rest.

Which results of a layer to keep, at a price for each byte, is a minimum cut: a value that the backward pass needs is
kept or computed again, and what is computed again needs its operands in turn. As a linear programme its corners are
whole choices. Prices from nothing upwards give the corners of the trade of bytes for time, exactly; no mixture of other
choices over the layers of a kind is better than one of these.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.cost.rates import cluster_rates
from meshwright.graph.phases import FORWARD
from meshwright.plans.plan import PlanData
from meshwright.program.program import Operation
from meshwright.runtime.recomputation.layers import num_bytes
from meshwright.runtime.recomputation.policies import (
    FULL,
    LEVELS,
    NONE,
    OFFLOAD,
    level_of,
    places,
    worth_keeping,
)
from meshwright.runtime.recomputation.recomputed import Region

_SAME = 0.01  # a choice of places within this of a level that has a name, in bytes and in time, is left out for that
_LEAST_GAIN = 0.02  # part of the trade between its ends that a corner must gain to be looked for: further ones are near


class Figures:
    """What a plan says of each operation of its program, by id: seconds of a step, and the bytes of its results.

    Args:
        plan: A plan without recomputation of the whole batch.
        on_host: Whether layers may keep on the host what they hand on.
    """

    def __init__(self, plan: PlanData, on_host: bool = False):
        assert plan.mesh.cluster is not None
        self.on_host, self.host_bandwidth = on_host, plan.mesh.cluster.chip.host_bandwidth
        back, rates = plan.details.back, cluster_rates(plan.mesh.cluster)  # type: ignore[attr-defined]
        graph, columns = back.graph, back.graph.columns
        self.num_devices = plan.mesh.num_devices
        self._seconds: dict[int, float] = {}
        for op in plan.ops:
            if op.load is not None:
                self._add(op.serial, op.load.trips * rates.load_s(op.load))
        for item in plan.collectives:
            if item.phase == FORWARD and not item.argument:
                self._add(item.serial, item.seconds)
        held = graph.num_bytes * (back.grouping.placed.home >= 0) / back.axes.num_parts(back.made)
        rows = zip(columns.serial.tolist(), columns.first_made.tolist(), columns.num_made.tolist(), strict=True)
        made = [(serial, slice(first, first + count)) for serial, first, count in rows]
        self._bytes = {serial: held[values].tolist() for serial, values in made}
        self._fused = {serial for serial, values in made if not back.formulation.live.stored[values].any()}

    def _add(self, serial: int, seconds: float) -> None:
        self._seconds[serial] = self._seconds.get(serial, 0.0) + seconds

    def seconds(self, operation: Operation) -> float:
        """Seconds of an operation in a step, with all that is inside of it; 0 where it is fused to what reads it."""
        return (
            0.0
            if self.is_fused(operation)
            else sum(self._seconds.get(operation.id + n, 0.0) for n in range(operation.num_ids))
        )

    def is_fused(self, operation: Operation) -> bool:
        """Whether its results are in no memory: the kernels that read them compute them, in the backward pass, too."""
        return operation.id in self._fused

    def result_bytes(self, operation: Operation, types: Sequence[object]) -> list[float]:
        """Bytes that a device holds of each of its results; of loops and branches, an even share."""
        known = self._bytes.get(operation.id, [])
        if not operation.regions and len(known) == len(operation.outputs):
            return known
        return [num_bytes(types[value]) / self.num_devices for value in operation.outputs]


@dataclass(frozen=True)
class Choice:
    """A level of a kind's layers: what one layer keeps by it, and the time in which it computes the rest again."""

    level: str
    num_bytes: float
    seconds: float


class LayerKind:
    """Layers that repeat one another, and what one of them may keep.

    Args:
        region: The region that they are in.
        number: Their number among the kinds of the region.
        figures: What is known of its operations.
    """

    def __init__(self, region: Region, number: int, figures: Figures):
        self.region, self.figures = region, figures
        numbers = region.layers.of_kind(number)
        self.count = len(numbers)
        self.inside = max((np.flatnonzero(region.layers.layer == n) for n in numbers), key=len)
        operations = region.program.operations
        self.operations = [operations[n] for n in self.inside]
        # The first and the last layer may be cut off: all layers together count as often as their operations say.
        whole = np.isin(region.layers.layer, numbers).sum() / (self.count * len(self.inside))
        self.seconds = whole * np.array([figures.seconds(one) for one in self.operations])
        self.maker = {value: n for n, one in enumerate(self.operations) for value in one.outputs}
        sizes = (figures.result_bytes(one, region.program.types) for one in self.operations)
        self.size = dict(
            zip(self.maker, (whole * size * max(region.trips, 1) for row in sizes for size in row), strict=True)
        )
        self.free, self.wanted = self._read(set(self.inside.tolist()))
        self.places = region.layers.place[self.inside]
        self.fused = [figures.is_fused(one) for one in self.operations]
        self.effects = [bool(one.equation.effects) for one in self.operations]

    def _read(self, inside: set[int]) -> tuple[set[int], set[int]]:
        """The values that are there anyway, and the others that the backward pass reads."""
        program, layers = self.region.program, self.region.layers
        behind = {v for n in np.flatnonzero(layers.backward) for v in program.operations[n].inputs}
        if self.region.trips:
            return set(), (behind | set(program.outputs)) & self.maker.keys()
        others = set(np.flatnonzero(~layers.backward).tolist()) - inside
        free = {v for n in others for v in program.operations[n].inputs} | set(program.outputs)
        free &= self.maker.keys()
        return free, (behind & self.maker.keys()) - free

    def choices(self) -> list[Choice]:
        """The corners of the trade of bytes for time, and the levels that have names."""
        worth = worth_keeping(self.region.program, self.region.moving)
        named = []
        for level in LEVELS:
            if level != OFFLOAD:
                kept, _ = level_of(level, self.region.layers, self.inside, worth)
                numbers = np.flatnonzero(np.isin(self.inside, kept)).tolist()
                named.append(self.priced(level, [n for n in numbers if not self.fused[n]]))
        corners = self._corners(named[LEVELS.index(NONE)], named[LEVELS.index(FULL)])
        corners = [one for one in corners if not any(_are_alike(one, other) for other in named)]
        on_host = map(self._on_host, (named[LEVELS.index(FULL)], *corners)) if self.figures.on_host else ()
        return [*named, *corners, *on_host]

    def _on_host(self, choice: Choice) -> Choice:
        """A choice with what the layer hands on kept on the host: XLA copies it there and back without computing."""
        handed = np.flatnonzero(self.region.layers.hands_on[self.inside])
        size = sum(self.size[value] for n in handed for value in self.operations[n].outputs)
        level = OFFLOAD if choice.level == FULL else f"{choice.level} {places([], self.places[handed].tolist())}"
        return Choice(level, choice.num_bytes - size, choice.seconds + 2 * size / self.figures.host_bandwidth)

    def priced(self, level: str, kept: Iterable[int]) -> Choice:
        """What a layer keeps and computes again where the results of some of its operations, by number, are kept."""
        there = {value for n in kept for value in self.operations[n].outputs} | self.free
        missing, seconds = self.wanted - there, 0.0
        read = self.wanted & there
        for number in reversed(range(len(self.operations))):
            if not missing.isdisjoint(self.operations[number].outputs):
                inputs = self.maker.keys() & set(self.operations[number].inputs)
                seconds += self.seconds[number]
                read |= inputs & there
                missing |= inputs - there
        return Choice(level, sum(self.size[value] for value in read - self.free), seconds)

    def _corners(self, most: Choice, least: Choice) -> list[Choice]:
        """The corners between keeping everything and keeping nothing."""
        found, pairs = [], [(most, least)]
        whole = (most.num_bytes - least.num_bytes) * (least.seconds - most.seconds)
        while pairs:
            left, right = pairs.pop()
            saved, longer = left.num_bytes - right.num_bytes, right.seconds - left.seconds
            if saved <= 0 or longer <= 0:
                continue
            price = longer / saved
            one = self._cheapest(price)
            gain = left.seconds + price * left.num_bytes - one.seconds - price * one.num_bytes
            if gain * saved > _LEAST_GAIN * whole:
                found.append(one)
                pairs += [(left, one), (one, right)]
        return found

    def _cheapest(self, price: float) -> Choice:
        """The choice that is cheapest where a byte that is kept costs so many seconds."""
        from scipy.optimize import linprog
        from scipy.sparse import coo_matrix

        values = {value: n for n, value in enumerate(v for v in self.maker if v not in self.free)}
        count, operations = len(values), len(self.operations)
        # Columns: a value is available, is kept; an operation runs again. Rows: what must not be above 0.
        cost = np.concatenate([np.zeros(count), [price * self.size[v] for v in values], self.seconds])
        scale = cost.max(initial=0.0) or 1.0
        entries: list[tuple[int, int, float]] = []
        row = 0
        for value, place in values.items():
            maker = 2 * count + self.maker[value]
            entries += [(row, place, 1.0), (row, count + place, -1.0), (row, maker, -1.0)]
            row += 1
        for number, operation in enumerate(self.operations):
            for value in values.keys() & set(operation.inputs):
                entries += [(row, 2 * count + number, 1.0), (row, values[value], -1.0)]
                row += 1
        rows, columns, numbers = zip(*entries, strict=True)
        lower, upper = np.zeros(2 * count + operations), np.ones(2 * count + operations)
        lower[[values[value] for value in self.wanted]] = 1.0
        upper[2 * count :] = ~np.array(self.effects)
        matrix = coo_matrix((numbers, (rows, columns)), shape=(row, len(cost)))
        bounds = np.stack([lower, upper], axis=1)
        found = linprog(cost / scale, A_ub=matrix, b_ub=np.zeros(row), bounds=bounds, method="highs-ds")
        assert found.x is not None, found.message
        kept = {self.maker[value] for value, n in values.items() if found.x[count + n] > 0.5}
        return self.priced(places(self.places[self._with_fused(kept)].tolist()), kept)

    def _with_fused(self, kept: set[int]) -> list[int]:
        """Operations whose results are kept, and those fused to their readers whose operands are all there."""
        there = {value for n in kept for value in self.operations[n].outputs} | self.free
        for number, operation in enumerate(self.operations):
            if self.fused[number] and self.maker.keys() & set(operation.inputs) <= there:
                kept = kept | {number}
                there.update(operation.outputs)
        return sorted(kept)


def _are_alike(one: Choice, other: Choice) -> bool:
    pairs = ((one.num_bytes, other.num_bytes), (one.seconds, other.seconds))
    return all(abs(a - b) <= _SAME * max(a, b) for a, b in pairs)
