"""Decimation: fixes the most certain nodes of a model round by round, reducing after each, until a choice is left."""

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.bounds.dual import Dual, ascend_prices, carried, reparametrised
from meshwright.solver.deadline import Deadline
from meshwright.solver.model.model import Model
from meshwright.solver.reductions.reduce import Reduced, WayBack, reduce_model
from meshwright.solver.tuning import TUNING, Tuning

_SWEEPS = 2  # in each round


def decimate(
    model: Model,
    prices: np.ndarray,
    deadline: Deadline,
    part: float = 0.005,
    seed: int = 0,
    tuning: Tuning = TUNING,
):
    """A choice of the model that fits all caps, or None where the rounds end in a dead end or the time is up.

    Every round sweeps the dual of what is left, fixes the `part` of the nodes whose best state leads by most, and lets
    the reductions carry the consequences: impossible partners, memory that is spent, nodes that follow. A round that
    proves infeasible is taken back and tried with fewer nodes. What the sweeps have learnt is written into the costs,
    so that the next round starts from there: many small rounds are better than few large ones.
    """
    chain: list[WayBack] = []
    rng = np.random.default_rng(seed)
    step = part
    while model.num_nodes and not deadline.is_over:
        dual = Dual(model, prices=prices)
        dual.converge(_SWEEPS, 1e-9, deadline)
        if len(model.cap) and prices.any():
            ascend_prices(dual, dual.bound + 0.01 * abs(dual.bound), _SWEEPS, deadline, tuning=tuning)
            prices = dual.prices
        model = reparametrised(dual)
        count = max(1, int(step * model.num_nodes)) if model.num_nodes > 40 else 1
        reduced, fixed = _fix_some(model, dual.reduced, count, rng, deadline)
        if reduced is None:
            return None
        # After a round that had to be undone, the next rounds are small.
        step = min(part, 2.0 * fixed / model.num_nodes) if fixed < count else min(part, 1.5 * step)
        chain.append(reduced.way_back)
        prices = carried(prices, model.when, reduced.model.when)
        model = reduced.model
    if model.num_nodes:
        return None
    choice = np.zeros(0, dtype=np.int64)
    for way_back in reversed(chain):
        choice = way_back.expand(choice).astype(np.int64)
    return choice


def _fix_some(model: Model, costs: np.ndarray, count: int, rng, deadline: Deadline) -> tuple[Reduced | None, int]:
    """Fixes the best states of up to `count` nodes; one that alone proves impossible is ruled out instead."""
    noise = rng.random(model.num_nodes)
    while not deadline.is_over:
        alive = lead(model.off, model.eu, model.ev, model.eoff, model.mat, costs, noise, count)
        reduced = reduce_model(model, alive, deadline=deadline)
        if not reduced.infeasible:
            return reduced, count
        if count > 1:
            count = max(1, count // 4)
            continue
        node = int(np.flatnonzero(np.add.reduceat(alive, model.off[:-1]) < np.diff(model.off))[0])
        here = slice(model.off[node], model.off[node + 1])
        others = np.ones(len(model.cost), dtype=np.uint8)
        others[here] = 1 - alive[here]
        reduced = reduce_model(model, others, deadline=deadline)
        return (None, 0) if reduced.infeasible else (reduced, 1)
    return None, 0


@kernel(interpretable=False)
def lead(off, eu, ev, eoff, mat, reduced, noise, count):
    """Marks all states; of the `count` nodes whose best state leads by most, the best states only."""
    num_nodes = len(off) - 1
    margin = np.empty(num_nodes)
    best = np.empty(num_nodes, dtype=np.int64)
    for u in range(num_nodes):
        least, second, place = np.inf, np.inf, 0
        for s in range(off[u + 1] - off[u]):
            value = reduced[off[u] + s]
            if value < least:
                least, second, place = value, least, s
            elif value < second:
                second = value
        best[u] = place
        margin[u] = second - least
    scale = max(np.median(margin[margin < np.inf]) if (margin < np.inf).any() else 1.0, 1e-300)
    order = np.argsort(-(margin + 1e-3 * scale * noise))
    fixed = np.zeros(num_nodes, dtype=np.bool_)
    for i in range(min(count, num_nodes)):
        fixed[order[i]] = True
    for e in range(len(eu)):
        u, v = eu[e], ev[e]
        if fixed[u] and fixed[v] and mat[eoff[e] + best[u] * (off[v + 1] - off[v]) + best[v]] == np.inf:
            fixed[u if margin[u] < margin[v] else v] = False
    alive = np.ones(off[num_nodes], dtype=np.uint8)
    for u in range(num_nodes):
        if fixed[u]:
            for s in range(off[u + 1] - off[u]):
                alive[off[u] + s] = s == best[u]
    return alive
