"""Layers: the forward pass cut where little data crosses, and every other operation with the layer it belongs to.

A layer is a run of forward operations between two cheap cuts, or one iteration of a loop over layers. The number of
layers follows from the program: from its repeated blocks, from the trip counts of its loops, or from the user's own
marks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise

import numpy as np

from meshwright.arrays import Floats, Ints
from meshwright.errors import ShardingError
from meshwright.pipeline.boundary import MARK
from meshwright.pipeline.layers.cuts import balanced_cuts, repeated
from meshwright.pipeline.layers.forward_pass import Flow
from meshwright.pipeline.layers.placement import Places, follow

_MOST = 16  # layers of a program without repeated blocks
_WRAPPED = re.compile(r"^(?:jvp|vmap|jit|checkpoint|transpose)\((.*)\)$")


@dataclass(frozen=True)
class Wishes:
    """The user's constraints on layers.

    Attributes:
        layers: Their number, or their shares of the compute; None to infer them.
        boundaries: Globs of name scopes: a layer begins where one is entered.
    """

    layers: int | Sequence[float] | None = None
    boundaries: Sequence[str] = ()

    @property
    def shares(self) -> list[float] | None:
        """The layers' shares of the compute; None if they are to be inferred.

        Raises:
            ShardingError: They are not numbers above 0.
        """
        if self.layers is None:
            return None
        try:
            found = [1.0] * self.layers if isinstance(self.layers, int) else [float(w) for w in self.layers]
        except (TypeError, ValueError):
            found = []
        if not found or isinstance(self.layers, bool) or not all(0 < share < np.inf for share in found):
            raise ShardingError(
                f"layers is {self.layers!r}; give a whole number above 0, or shares of the compute, all above 0"
            )
        return found

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs as a tuple; the user may give a single one.

        Raises:
            ShardingError: They are not strings.
        """
        found = (self.boundaries,) if isinstance(self.boundaries, str) else self.boundaries
        if not isinstance(found, Sequence) or not all(isinstance(glob, str) for glob in found):
            raise ShardingError(f"boundaries is {found!r}; give globs of name scopes, e.g. ('block*',)")
        return tuple(found)


@dataclass(frozen=True)
class Layers:
    """The layers of a graph.

    Operations belong to *units*: a unit is a layer, or a loop whose iterations are several equal layers.

    Attributes:
        num_layers: The number of layers.
        first: The first layer of each unit.
        count: The number of layers of each unit.
        places: The unit of each operation and argument.
        crossing_bytes: Bytes of activations that cross the cut before each layer; 0 before the first.
    """

    num_layers: int
    first: Ints
    count: Ints
    places: Places
    crossing_bytes: Floats = field(repr=False)

    def gather(self, unit: Ints, weights: Floats) -> Floats:
        """Sums weights of units by layer; the layers of a unit have equal shares."""
        units, layers = self._shares
        per_layer = np.bincount(unit, weights, len(self.first)) / self.count
        totals: Floats = np.bincount(layers, per_layer[units], self.num_layers).astype(
            float
        )  # also where there are none
        return totals

    @cached_property
    def _shares(self) -> tuple[Ints, Ints]:
        """Every pair of a unit and one of its layers."""
        units = np.repeat(np.arange(len(self.first)), self.count)
        start = np.cumsum(self.count) - self.count
        return units, np.arange(len(units)) - start[units] + self.first[units]


@dataclass(frozen=True)
class _Piece:
    """A run of forward operations of ``layers`` layers, separated by cuts or, in a loop, by its iterations."""

    cuts: tuple[int, ...]  # starts of its units, then its end
    trips: int = 0


def find_layers(flow: Flow, wishes: Wishes) -> Layers:
    """Cuts the forward pass into layers.

    Raises:
        ShardingError: The user's wishes cannot be met.
    """
    marks = _marks(flow, wishes.globs)
    pieces = _marked(flow, marks) if marks else _found(flow, wishes.shares)
    first, count, starts, layer = [], [], [], 0
    whole = any(piece.trips for piece in pieces)
    for number, piece in enumerate(pieces):
        if whole and not piece.trips and len(piece.cuts) == 2 and _is_light(flow, piece, pieces):
            # Operations before a loop belong to its first layer, operations after it to its last.
            first.append(max(layer - 1, 0) if number else 0)
            count.append(1)
            starts.append(piece.cuts[0])
            continue
        for start in piece.cuts[:-1]:
            first.append(layer)
            count.append(max(piece.trips, 1))
            starts.append(start)
            layer += count[-1]
    crossing = np.zeros(layer + 1)
    for start, begin, many in zip(starts, first, count, strict=True):
        if begin:
            crossing[begin] = max(crossing[begin], flow.crossing_bytes[start])
        crossing[begin + 1 : begin + many] = _carried(flow, start)
    unit = np.searchsorted(np.array(starts), np.arange(len(flow.nests)), side="right") - 1
    places = follow(flow, np.maximum(unit, 0), len(starts))
    return Layers(layer, np.array(first), np.array(count), places, crossing)


def _marked(flow: Flow, marks: list[int]) -> list[_Piece]:
    """The pieces between the user's marks."""
    forward = flow.forward
    edges = [int(forward[0]), *marks, int(forward[-1]) + 1]
    loops = {start: (stop, trips) for start, stop, trips in flow.loops}
    pieces = []
    for start, stop in pairwise(dict.fromkeys(edges)):
        at = start
        for begin, (end, trips) in sorted(loops.items()):
            if start <= begin < stop:
                pieces += [_Piece((at, begin))] if at < begin else []
                pieces.append(_Piece((begin, end), trips))
                at = end
        pieces += [_Piece((at, stop))] if at < stop else []
    return pieces


def _found(flow: Flow, shares: list[float] | None) -> list[_Piece]:
    """The pieces that the program suggests, or the number that the user asks for."""
    forward = flow.forward
    if not len(forward):
        raise ShardingError("the function has no forward pass to cut into layers; plan it without pipeline=True")
    first, last = int(forward[0]), int(forward[-1]) + 1
    if shares is not None:
        return [_Piece((first, *_wanted(flow, first, last, shares), last))]
    edges = [first, *(edge for start, stop, _ in flow.loops for edge in (start, stop)), last]
    trips = {start: trips for start, _, trips in flow.loops}
    target = max((flow.flops[a:b].sum() / n for a, b, n in flow.loops), default=0.0) or _repeated(flow)
    spans = [span for span in pairwise(edges) if span[0] < span[1]]
    cuts = [() if start in trips else _cut(flow, start, stop, target) for start, stop in spans]
    return [_Piece((a, *inside, b), trips.get(a, 0)) for (a, b), inside in zip(spans, cuts, strict=True)]


def _wanted(flow: Flow, first: int, last: int, weights: list[float]) -> list[int]:
    if flow.loops:
        raise ShardingError(
            f"layers={len(weights)} cannot be had: the model loops over {flow.loops[0][2]} layers, and a loop's trips "
            "are its layers; leave layers out, or unroll the loop"
        )
    most = int((flow.flops[flow.forward] > 0).sum())
    if len(weights) > max(most, 1):
        raise ShardingError(f"layers={len(weights)} is more than the model's {most} contractions; ask for fewer")
    cuts = balanced_cuts(flow, first, last, weights)[0] if len(weights) > 1 else []
    if len(cuts) + 1 < len(weights):
        raise ShardingError(
            f"layers={len(weights)} cannot be had: there are {len(cuts)} places at which the model can be cut; ask for "
            f"at most {len(cuts) + 1}"
        )
    return cuts


def _cut(flow: Flow, start: int, stop: int, target: float) -> list[int]:
    """Cuts a run into layers of about the given compute; a run with less compute stays whole."""
    share = _forward_flops(flow, start, stop) / target if target else 0.0
    options = sorted({max(int(share), 1), max(int(np.ceil(share)), 1)})
    tried = [balanced_cuts(flow, start, stop, [1.0] * n, aligned=True) if n > 1 else ([], np.inf) for n in options]
    return min(tried, key=lambda found: found[1])[0]


def _repeated(flow: Flow) -> float:
    """Compute of one layer: of the most repeated block."""
    working = flow.forward[flow.flops[flow.forward] > 0]
    total = float(flow.flops[working].sum())
    run = repeated(flow, int(flow.forward[0]), int(flow.forward[-1]) + 1)
    if run is not None:
        return float(flow.flops[working[run.start : run.stop]].sum() * run.period / (run.stop - run.start))
    return total / min(max(len(working), 1), _MOST)


def _forward_flops(flow: Flow, start: int, stop: int) -> float:
    inside = flow.forward[(flow.forward >= start) & (flow.forward < stop)]
    return float(flow.flops[inside].sum())


def _is_light(flow: Flow, piece: _Piece, pieces: list[_Piece]) -> bool:
    trip = max(_forward_flops(flow, p.cuts[0], p.cuts[-1]) / p.trips for p in pieces if p.trips)
    return _forward_flops(flow, piece.cuts[0], piece.cuts[-1]) < trip / 2


def _carried(flow: Flow, start: int) -> float:
    """Bytes that a loop carries from iteration to iteration; 0 if the operation starts no loop."""
    stop = next((b for a, b, _ in flow.loops if a == start), start)
    inside = [t.carry for t in flow.graph.ties if start <= flow.graph.columns.producer[t.carry] < stop]
    return float(sum(flow.num_bytes[v] for v in inside if flow.from_data[v]))


def _marks(flow: Flow, globs: Sequence[str]) -> list[int]:
    """Operations before which the user wants a layer to begin; not before the first."""
    columns = flow.graph.columns
    marked = {n for n, s in enumerate(columns.signatures) if s.primitive == "name" and s.params.get("name") == MARK}
    found = [int(i) for i in flow.forward if columns.signature[i] in marked and flow.cuttable[i]]
    if globs:
        entered = [_entered(scope, globs) for scope in columns.scopes]
        keys = [entered[n] for n in columns.scope[flow.forward].tolist()]
        if not any(keys):
            raise ShardingError(f"boundaries: no name scope matches {list(globs)}; mark one with jax.named_scope")
        changes = (i for i, (a, b) in zip(flow.forward[1:], pairwise(keys), strict=True) if b and a != b)
        found += [int(i) for i in changes if flow.cuttable[i]]
    edges: list[int] = []
    for place in sorted(found):  # marks on several leaves of one tree are one boundary
        if _forward_flops(flow, edges[-1] if edges else 0, place):
            edges.append(place)
    return edges


def _entered(scope: str, globs: Sequence[str]) -> str:
    """The prefix of a scope up to the part that a glob matches; empty for none."""
    parts = scope.split("/")
    for i, part in enumerate(parts):
        while (inner := _WRAPPED.match(part)) is not None:
            part = inner[1]
        if any(fnmatchcase(part, glob) for glob in globs):
            return "/".join(parts[: i + 1])
    return ""
