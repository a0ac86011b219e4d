"""Cuts a run of forward operations into balanced pieces where the fewest bytes cross, by dynamic programming."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from meshwright.arrays import Floats, Ints
from meshwright.graph.repeats import RepeatedRun, find_runs
from meshwright.pipeline.layers.forward_pass import Flow

_TOLERANCES = (0.5, 1.0, np.inf)  # tried relative deviations of a layer's compute from its target
_IMBALANCE = 0.1  # price of an imbalance of one whole layer, in bytes of a mean cut


def balanced_cuts(
    flow: Flow, start: int, stop: int, weights: Sequence[float], aligned: bool = False
) -> tuple[list[int], float]:
    """Where to cut the operations ``[start, stop)`` into layers, and the penalty of these cuts.

    Of all cuts that leave each layer within a tolerance of its share of the compute, it takes the cuts that the fewest
    bytes cross; ties go to the most balanced.

    Args:
        flow: The forward pass.
        start: The first operation.
        stop: One past the last.
        weights: The layers' shares of the compute, in any unit.
        aligned: Whether repeated blocks are all cut at the same place.

    Returns:
        The operations before which to cut, one fewer than layers, and the mean bytes that cross a cut plus the penalty
        for imbalance; if there are too few places to cut, all of them.
    """
    places = _candidates(flow, start, stop, aligned)
    work = np.concatenate([[0.0], np.cumsum(_work(flow, start, stop))])
    done = np.array([work[p - start] for p in (start, *places, stop)])
    bytes_at = np.array([0.0, *(flow.crossing_bytes[p] for p in places), 0.0])
    wanted = np.array(weights, float) / sum(weights) * done[-1]
    for tolerance in _TOLERANCES:
        chosen, cost = _solve(done, bytes_at, wanted, tolerance)
        if chosen is not None:
            return [places[i - 1] for i in chosen], cost
    return places, float(bytes_at.max())


def _work(flow: Flow, start: int, stop: int) -> Floats:
    """Compute of each operation; bytes where nothing contracts."""
    inside = flow.flops[start:stop].copy()
    inside[flow.graph.columns.phase[start:stop] != 0] = 0.0
    if not inside.any():
        inside = flow.num_bytes[flow.graph.columns.first_made[start:stop]]
    return inside


def _candidates(flow: Flow, start: int, stop: int, aligned: bool) -> list[int]:
    """Between each two operations that compute, the place that the fewest bytes cross; the last of equals."""
    working = np.flatnonzero(_work(flow, start, stop) > 0) + start
    found: dict[int, int] = {}  # by the number of the gap
    for gap, (before, after) in enumerate(pairwise(working.tolist())):
        places = np.arange(before + 1, after + 1)
        places = places[flow.cuttable[places]]
        if len(places):
            crossing = flow.crossing_bytes[places]
            found[gap] = int(places[np.flatnonzero(crossing == crossing.min())[-1]])
    run = repeated(flow, start, stop) if aligned else None
    if run is not None:
        inside = range(run.start, run.stop - 1)
        turns = [[g for g in inside[turn :: run.period] if g in found] for turn in range(run.period)]
        totals = [np.mean([flow.crossing_bytes[found[g]] for g in turn]) if turn else np.inf for turn in turns]
        kept = set(turns[len(totals) - 1 - int(np.argmin(totals[::-1]))])
        found = {g: place for g, place in found.items() if g not in inside or g in kept}
    return list(found.values())


def repeated(flow: Flow, start: int, stop: int) -> RepeatedRun | None:
    """The run of repeating operations that does most of what can be cut, counted in operations that compute."""
    working = np.flatnonzero(_work(flow, start, stop) > 0) + start
    runs = find_runs(flow.graph.columns.signature[working])
    work = [flow.flops[working[run.start : run.stop]].sum() for run in runs]
    if not runs or max(work) <= flow.flops[working[~flow.in_data_loop[working]]].sum() / 2:
        return None
    return runs[int(np.argmax(work))]


def _solve(done: Floats, bytes_at: Floats, wanted: Floats, tolerance: float) -> tuple[list[int] | None, float]:
    """The best cuts, as indices of `done`; None if no cuts keep the tolerance."""
    num_layers, last = len(wanted), len(done) - 1
    unit = _IMBALANCE * (bytes_at[1:-1].mean() if last > 1 else 1.0)
    best = np.where(np.arange(last + 1) == 0, 0.0, np.inf)
    came: list[Ints] = []
    for layer in range(num_layers):
        size = done[None, :] - done[:, None]  # from each place to each other
        off = np.abs(size / max(wanted[layer], 1e-30) - 1)
        legal = (size > 0) & (off <= tolerance)
        if layer == num_layers - 1:
            legal[:, :last] = False
        cost = np.where(legal, best[:, None] + bytes_at[None, :] + unit * np.minimum(off, 2) ** 2, np.inf)
        came.append(cost.argmin(axis=0))
        best = cost.min(axis=0)
    if not np.isfinite(best[last]):
        return None, np.inf
    at, cuts = last, []
    for layer in range(num_layers - 1, 0, -1):
        at = int(came[layer][at])
        cuts.append(at)
    return cuts[::-1], float(best[last] / max(num_layers - 1, 1))
