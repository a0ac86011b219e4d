"""Where to split a model in two when its dual leaves a gap: at the node over which the dual is most at odds."""

import numpy as np

from meshwright.solver.dual import Dual, ascend_prices
from meshwright.solver.kernel import inline, kernel

_CANDIDATES = 3
_TRIAL_STEPS = 6


def halves(dual: Dual, goal: float) -> tuple[np.ndarray, np.ndarray]:
    """Two masks of states that part the states of one node, the more promising first.

    Candidates are, where memory is priced, the nodes whose two best states differ most in priced memory, parted between
    them; else the nodes where a decoded choice exceeds the bound most, parted into the states that agree with the
    neighbour they are at odds with and the rest. A few sweeps on each half tell which candidate raises the bound most.
    """
    model = dual.model
    dual.sweep()
    if dual.price.any():
        scores, low = spreads(model.off, dual.reduced, dual.spent())
    else:
        scores, low = odds(dual.links, model.off, dual.m, dual.reduced, dual.decode())
    best, parts = -1.0, None
    for node in np.argsort(-scores, kind="stable")[:_CANDIDATES]:
        if scores[node] == -np.inf:  # it has one state only, and so have all that follow
            break
        own = np.zeros(len(model.cost), dtype=bool)
        own[model.off[node] : model.off[node + 1]] = True
        first, second = own & ~low, own & low
        gains = [_gain(dual, banned, goal) for banned in (first, second)]
        score = max(gains[0], 1e-3 * max(gains)) * max(gains[1], 1e-3 * max(gains))
        if score > best:
            best, parts = score, (~first, ~second) if gains[0] <= gains[1] else (~second, ~first)
    assert parts is not None
    return parts


def _gain(dual: Dual, banned: np.ndarray, goal: float) -> float:
    """By how much the bound rises within a few sweeps without some states, up to the goal."""
    gap = max(goal - dual.now, 1e-12 * abs(dual.now))
    trial = Dual(dual.model._replace(cost=dual.model.cost + 4.0 * gap * banned), dual.links, dual.price)
    trial.m[:] = dual.m
    trial.sweep()
    if len(dual.model.cap):
        ascend_prices(trial, goal, _TRIAL_STEPS, step=0.2)
    return min(max(trial.bound - dual.now, 0.0), gap)


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
        _mend(off, low, first, u)
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
        _mend(off, low, first, u)
    return scores, low


@inline
def _mend(off, low, first, u):
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
