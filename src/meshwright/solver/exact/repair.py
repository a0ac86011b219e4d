"""Repairs a choice: single and paired changes of state until it fits all caps, then until none makes it cheaper."""

import numpy as np

from meshwright.jit import inline, kernel, pause
from meshwright.solver.model.half_edges import Links
from meshwright.solver.model.model import Model, State
from meshwright.solver.reductions.times import dense_usage
from meshwright.solver.tuning import TUNING, Tuning


def repaired(model: Model, links: Links, choice: np.ndarray, tuning: Tuning = TUNING) -> State:
    """The choice after changes of single nodes: first those that lower the excess at least cost, then cheaper ones.

    A change that makes it cheaper but does not fit may be paired with one elsewhere that makes room. The result may
    still not fit where no single change lowers the excess.
    """
    state = State.of(model, choice)
    choice, load = state.choice.copy(), state.load.copy()
    repair(links, model.off, model.cost, dense_usage(model).T.copy(), model.cap, choice, load, tuning.most_work)
    return State.of(model, choice)


@kernel(pauses=True)
def repair(links, off, cost, usage, cap, choice, load, most_pairs):
    """Changes the choice in place, and the load with it; usage is over (state, time)."""
    num_nodes = len(off) - 1
    here, node = np.empty(len(cost)), np.empty(len(cost), dtype=np.int64)
    for u in range(num_nodes):
        node[off[u] : off[u + 1]] = u
        _price(links, off, cost, choice, u, here)
    tiny = 1e-12 * np.abs(cost).max()
    pairs = 0
    for _ in range(4 * num_nodes + 200):
        over = _excess(load, cap)
        best, least = -1, np.inf
        for i in range(len(cost)):
            pause()
            now = off[node[i]] + choice[node[i]]
            rise = here[i] - here[now]
            if i == now or not rise < np.inf or (over == 0.0 and rise >= -tiny):
                continue
            after = _excess_after(load, cap, usage, now, i)
            value = rise
            if over > 0.0:
                if after >= over * (1 - 1e-9):
                    continue
                value = rise / (over - after)
            elif after > 0.0:
                continue
            if value < least:
                best, least = i, value
        if best >= 0:
            _change(links, off, cost, usage, choice, load, node, here, best)
            continue
        if over > 0.0 or pairs > most_pairs:
            break
        first, second, spent = _pair(links, off, usage, cap, choice, load, node, here, tiny, most_pairs - pairs)
        pairs += spent
        if first < 0:
            break
        _change(links, off, cost, usage, choice, load, node, here, first)
        _change(links, off, cost, usage, choice, load, node, here, second)


@inline
def _pair(links, off, usage, cap, choice, load, node, here, tiny, most):
    """Two changes of unlinked nodes that together fit and save most: the first saves, the second makes room."""
    one, other, least, spent = -1, -1, -tiny, 0
    for i in range(len(here)):
        u = node[i]
        now = off[u] + choice[u]
        saved = here[i] - here[now]
        if not saved < least:
            continue
        pause()
        for j in range(len(here)):
            v = node[j]
            then = off[v] + choice[v]
            if v == u or j == then or not saved + here[j] - here[then] < least:
                continue
            fits = True
            for t in range(len(cap)):
                after = load[t] + usage[i, t] - usage[now, t] + usage[j, t] - usage[then, t]
                fits = fits and after <= cap[t]
            if not fits:
                continue
            for h in range(links.hoff[u], links.hoff[u + 1]):
                fits = fits and links.far[h] != v
            if fits:
                one, other, least = i, j, saved + here[j] - here[then]
        spent += len(here)
        if spent > most:
            break
    return one, other, spent


@inline
def _change(links, off, cost, usage, choice, load, node, here, i):
    u = node[i]
    now = off[u] + choice[u]
    for t in range(len(load)):
        load[t] += usage[i, t] - usage[now, t]
    choice[u] = i - off[u]
    for h in range(links.hoff[u], links.hoff[u + 1]):
        _price(links, off, cost, choice, links.far[h], here)


@inline
def _price(links, off, cost, choice, u, here):
    """What every state of u costs beside the neighbours' present states."""
    for s in range(off[u], off[u + 1]):
        here[s] = cost[s]
    for h in range(links.hoff[u], links.hoff[u + 1]):
        v = links.far[h]
        size = off[v + 1] - off[v]
        for s in range(off[u + 1] - off[u]):
            here[off[u] + s] += links.mats[links.plane[h] + s * size + choice[v]]


@inline
def _excess(load, cap):
    """How far the loads exceed the caps, relative to these."""
    over = 0.0
    for t in range(len(cap)):
        over += max(0.0, load[t] - cap[t]) / max(abs(cap[t]), 1e-300)
    return over


@inline
def _excess_after(load, cap, usage, now, i):
    over = 0.0
    for t in range(len(cap)):
        over += max(0.0, load[t] + usage[i, t] - usage[now, t] - cap[t]) / max(abs(cap[t]), 1e-300)
    return over
