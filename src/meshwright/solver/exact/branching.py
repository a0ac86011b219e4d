"""Chooses where to branch when the dual leaves a gap: at the node where the dual is furthest from a choice."""

from typing import NamedTuple

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.bounds.dual import Dual, ascend_prices
from meshwright.solver.tuning import TUNING, Tuning


class Split(NamedTuple):
    """The parts of a model that together hold all choices below a goal.

    Attributes:
        parts: Masks of states: none where nothing is below the goal, one where some states turned out to be ruled
            out, two that part the states of one node.
        bounds: What the choices in each of them cost at least.
        worth: By how much the better half raises the bound, as a part of the gap.
    """

    parts: tuple[np.ndarray, ...]
    bounds: tuple[float, ...]
    worth: float


NONE = Split((), (), 1.0)


def split(dual: Dual, goal: float, tuning: Tuning = TUNING) -> Split:
    """Rules out states, or parts those of one node.

    Candidates are, where memory is priced, the nodes whose two best states differ most in priced memory, parted between
    them; else the nodes where a decoded choice exceeds the bound most, parted into the states that agree with the
    neighbour they are at odds with and the rest. A few sweeps on each half tell how far it raises the bound. A half
    that reaches the goal is ruled out, and the next candidate is tried; else the one that raises it most is taken.
    """
    model = dual.model
    dual.sweep()
    if dual.price.any():
        scores, low = spreads(model.off, dual.reduced, dual.spent())
    else:
        scores, low = odds(dual.links, model.off, dual.m, dual.reduced, dual.decode())
    ruled_out = np.zeros(len(model.cost), dtype=bool)
    best, found, tried = -1.0, NONE, 0
    for node in np.argsort(-scores, kind="stable"):
        if tried == tuning.split_candidates or scores[node] == -np.inf:  # one state only, as have all that follow
            break
        own = np.zeros(len(model.cost), dtype=bool)
        own[model.off[node] : model.off[node + 1]] = True
        high, rest = own & ~low, own & low
        gains = [_gain(dual, banned, goal, tuning) for banned in (high, rest)]
        if min(gains) >= 1.0:
            return NONE
        if max(gains) >= 1.0:
            ruled_out |= rest if gains[0] >= 1.0 else high
            tried = 0
            continue
        tried += 1
        least = 1e-3 * max(gains)
        score = max(gains[0], least) * max(gains[1], least)
        if score > best:
            bounds = tuple(dual.now + gain * (goal - dual.now) for gain in gains)
            best, found = score, Split((~high, ~rest), bounds, max(gains))
    return Split((~ruled_out,), (dual.now,), 1.0) if ruled_out.any() else found


def _gain(dual: Dual, banned: np.ndarray, goal: float, tuning: Tuning) -> float:
    """By how much the bound rises within a few sweeps without some states, as a part of the gap."""
    gap = max(goal - dual.now, 1e-12 * abs(dual.now))
    trial = Dual(dual.model._replace(cost=dual.model.cost + 4.0 * gap * banned), dual.links, dual.price)
    trial.m[:] = dual.m
    trial.sweep()
    if len(dual.model.cap):
        ascend_prices(trial, goal, tuning.part_price_sweeps // 2, step=0.2, tuning=tuning)
    return max(trial.bound - dual.now, 0.0) / gap


@kernel
def spreads(off, reduced, spent):
    """How much the two best states of every node differ in priced memory; and the states below the middle of them."""
    scores, low = np.full(len(off) - 1, -np.inf), np.zeros(len(reduced), dtype=np.bool_)
    for u in range(len(off) - 1):
        first, second = _two_best(off, reduced, u)
        if second < 0:
            continue
        scores[u] = abs(spent[first] - spent[second]) - reduced[second]
        middle = 0.5 * (spent[first] + spent[second])
        for s in range(off[u], off[u + 1]):
            low[s] = spent[s] <= middle
        _fill_both_sides(off, low, first, u)
    return scores, low


@kernel
def odds(links, off, m, reduced, choice):
    """The excess of a choice over the dual at every node; and the states that agree with the worst neighbour."""
    scores, low = np.full(len(off) - 1, -np.inf), np.zeros(len(reduced), dtype=np.bool_)
    for u in range(len(off) - 1):
        first, second = _two_best(off, reduced, u)
        if second < 0:
            continue
        scores[u] = reduced[off[u] + choice[u]]
        edge, largest = -1, 0.0
        for h in range(links.hoff[u], links.hoff[u + 1]):
            slack = _slack(links, off, m, h, choice[u], choice[links.far[h]])
            scores[u] += slack
            if slack > largest:
                edge, largest = h, slack
        if edge >= 0:
            for s in range(off[u], off[u + 1]):
                low[s] = _slack(links, off, m, edge, s - off[u], choice[links.far[edge]]) < 0.5 * largest
        _fill_both_sides(off, low, first, u)
    return scores, low


@inline
def _fill_both_sides(off, low, first, u):
    """Where all states of u are on one side, puts the best one on one and the rest on the other."""
    count = 0
    for s in range(off[u], off[u + 1]):
        count += low[s]
    if count == 0 or count == off[u + 1] - off[u]:
        for s in range(off[u], off[u + 1]):
            low[s] = s == first


@inline
def _two_best(off, reduced, u):
    """The states of least reduced cost; the second is -1 where there is one state only."""
    first, second = off[u], -1
    for s in range(off[u] + 1, off[u + 1]):
        if reduced[s] < reduced[first]:
            first, second = s, first
        elif second < 0 or reduced[s] < reduced[second]:
            second = s
    return first, second


@inline
def _slack(links, off, m, h, own, far):
    """By how much a pair of states costs more than its edge has given to the two nodes."""
    size = off[links.far[h] + 1] - off[links.far[h]]
    pair = links.mats[links.plane[h] + own * size + far]
    return pair - m[links.msg[h] + own] - m[links.msg[links.back[h]] + far]
