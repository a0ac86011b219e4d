"""Drops times that others imply, and merges the rows that then cover the same times."""

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.model.model import Model
from meshwright.solver.tuning import TUNING, Tuning


def tighten_times(model: Model, tuning: Tuning = TUNING) -> Model:
    """The same model with only the times that can decide whether a choice fits.

    Proof: time t is implied by time p if Σ_nodes max_s (usage_t(s) - usage_p(s)) ≤ cap_t - cap_p, for then any choice
    that fits at p fits at t. Comparisons run against recent times first, then against all, tightest first.
    """
    if len(model.cap) == 0 or len(model.cost) > tuning.giant_states:  # two times are compared state by state
        return model
    starts = np.argsort(model.rstart, kind="stable")
    ends = np.argsort(model.rend, kind="stable")
    probes = _probes(model, tuning.times_compared)
    recent = keep_recent(model, starts, ends, probes, tuning.times_compared)
    model = with_times(model, recent)
    if len(model.cap) * len(model.cost) <= tuning.most_work:
        dense = dense_usage(model)
        most = np.maximum.reduceat(dense, model.off[:-1], axis=1).sum(axis=1)
        order = np.argsort(model.cap - most, kind="stable")
        excess = _excess(model, dense, probes)
        keep = keep_tightest(model.off, model.cap, dense, order, excess, tuning.times_compared)
        model = with_times(model, keep)
    return model


def _probes(model: Model, count: int) -> np.ndarray:
    """A few random choices, as places of states: time p can imply time t only if none of them exceeds t's cap more."""
    sizes = np.diff(model.off)
    draws = np.random.default_rng(0).random((count, len(sizes)))
    return model.off[:-1] + (draws * sizes).astype(np.int64)


def _excess(model: Model, dense: np.ndarray, probes: np.ndarray) -> np.ndarray:
    """By how much each probe exceeds the cap at every time."""
    return np.stack([dense[:, probe].sum(axis=1) for probe in probes], axis=1) - model.cap[:, None]


def with_times(model: Model, keep: np.ndarray) -> Model:
    """Renumbers the times and adds up the rows of a node that now cover the same ones."""
    place = np.concatenate([[0], np.cumsum(keep)]).astype(np.int32)
    start, end = place[model.rstart], place[model.rend]
    order = np.lexsort((end, start, model.rnode))
    order = order[start[order] < end[order]]
    key = np.stack([model.rnode[order], start[order], end[order]])
    opens = np.ones(len(order), dtype=bool)
    opens[1:] = (key[:, 1:] != key[:, :-1]).any(axis=0)
    first = order[opens]
    sizes = np.diff(model.off)[model.rnode[first]]
    roff = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    usage = np.zeros(int(roff[-1]))
    add_rows(model.off, model.rnode, model.roff, model.usage, order, np.cumsum(opens) - 1, roff, usage)
    return model._replace(
        rnode=model.rnode[first],
        rstart=start[first],
        rend=end[first],
        roff=roff[:-1],
        usage=usage,
        cap=model.cap[keep],
        when=model.when[keep],
    )


@kernel
def add_rows(off, rnode, roff, usage, order, target, new_roff, new_usage):
    for i in range(len(order)):
        u = rnode[order[i]]
        for s in range(off[u + 1] - off[u]):
            new_usage[new_roff[target[i]] + s] += usage[roff[order[i]] + s]


@kernel
def dense_usage(model):
    """Usage over (time, state)."""
    dense = np.zeros((len(model.cap), len(model.cost)))
    for r in range(len(model.rnode)):
        u = model.rnode[r]
        for t in range(model.rstart[r], model.rend[r]):
            for s in range(model.off[u + 1] - model.off[u]):
                dense[t, model.off[u] + s] += model.usage[model.roff[r] + s]
    return dense


@inline
def _implied(off, mine, theirs, slack):
    """Whether Σ_nodes max_s (mine - theirs) stays within the slack."""
    total = 0.0
    for u in range(len(off) - 1):
        most = -np.inf
        for s in range(off[u], off[u + 1]):
            most = max(most, mine[s] - theirs[s])
        total += most
    return total <= slack


@inline
def _no_more(mine, theirs):
    """Whether no probe exceeds the cap by more here than there; sums of floats may differ in their last digits."""
    return (mine <= theirs + 1e-9 * np.abs(theirs)).all()


@kernel
def keep_recent(model, starts, ends, probes, window):
    """Compares every time with the last few kept ones, in both directions, walking along the times."""
    num_times, num_states = len(model.cap), len(model.cost)
    keep = np.zeros(num_times, dtype=np.bool_)
    now = np.zeros(num_states)
    held = np.zeros((window, num_states))
    held_time = np.full(window, -1, dtype=np.int64)
    excess, held_excess = np.zeros(len(probes)), np.zeros((window, len(probes)))
    i, j, turn = 0, 0, 0
    for t in range(num_times):
        while j < len(ends) and model.rend[ends[j]] <= t:
            _add(model, ends[j], now, -1.0)
            j += 1
        while i < len(starts) and model.rstart[starts[i]] <= t:
            _add(model, starts[i], now, 1.0)
            i += 1
        for k in range(len(probes)):
            excess[k] = -model.cap[t]
            for place in probes[k]:
                excess[k] += now[place]
        implied = False
        for w in range(window):
            p = held_time[w]
            if p < 0 or not _no_more(excess, held_excess[w]):
                continue
            if _implied(model.off, now, held[w], model.cap[t] - model.cap[p]):
                implied = True
                break
        if implied:
            continue
        for w in range(window):
            p = held_time[w]
            if p < 0 or not _no_more(held_excess[w], excess):
                continue
            if _implied(model.off, held[w], now, model.cap[p] - model.cap[t]):
                keep[p] = False
                held_time[w] = -1
        keep[t] = True
        w = turn % window
        for q in range(window):
            if held_time[q] < 0:
                w = q
                break
        held[w] = now
        held_time[w], held_excess[w] = t, excess
        turn += 1
    return keep


@inline
def _add(model, r, now, sign):
    u = model.rnode[r]
    for s in range(model.off[u + 1] - model.off[u]):
        now[model.off[u] + s] += sign * model.usage[model.roff[r] + s]


@kernel
def keep_tightest(off, cap, dense, order, excess, most):
    """Walks from the tightest time to the loosest, keeping those that none of `most` kept ones implies."""
    keep = np.zeros(len(cap), dtype=np.bool_)
    kept = np.empty(len(cap), dtype=np.int64)
    n = 0
    for t in order:
        implied = False
        for i in range(min(n, most)):
            p = kept[i]
            possible = True
            for j in range(excess.shape[1]):
                if excess[t, j] > excess[p, j]:
                    possible = False
                    break
            if possible and _implied(off, dense[t], dense[p], cap[t] - cap[p]):
                implied = True
                for j in range(i, 0, -1):  # move to the front: the next time is likely implied by the same one
                    kept[j] = kept[j - 1]
                kept[0] = p
                break
        if not implied:
            kept[n] = t
            n += 1
            keep[t] = True
    return keep
