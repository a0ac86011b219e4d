"""Reductions of memory: constants move into the caps, times that cannot bind go, states that cannot fit go."""

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.reductions.mutable_graph import INFEASIBLE, STATUS, Work, push, push_neighbours, shrink


def settle_memory(work: Work) -> Work:
    """Settles rows and times; returns the work with its caps compressed.

    Proofs: a usage common to all states is spent whatever is chosen, so it may be taken off the caps. A time at which
    even the largest usages fit binds no choice. A time whose live rows are among those of another with no larger cap
    is satisfied whenever the other is. A state that exceeds a cap alone (all others at least 0) fits in no choice.
    """
    if len(work.cap) == 0:
        return work
    settle_rows(work)
    if work.used[STATUS] == INFEASIBLE:
        return work
    binding = binding_times(work)
    place = np.concatenate([[0], np.cumsum(binding)]).astype(np.int32)
    move_rows(work, place)
    work = work._replace(cap=work.cap[binding], when=work.when[binding])
    needed = needed_times(work)
    place = np.concatenate([[0], np.cumsum(needed)]).astype(np.int32)
    move_rows(work, place)
    work = work._replace(cap=work.cap[needed], when=work.when[needed])
    drop_too_large(work)
    return work


@kernel
def settle_rows(work):
    """Takes every row's least usage off the caps; notes how far the worst cap is then exceeded."""
    change = np.zeros(len(work.cap) + 1)
    for u in range(len(work.k)):
        if work.alive[u]:
            r = work.rhead[u]
            while r >= 0:
                least = np.inf
                for s in range(work.k[u]):
                    least = min(least, work.usage[work.roff[r] + s])
                if least > 0:
                    for s in range(work.k[u]):
                        work.usage[work.roff[r] + s] -= least
                    change[work.rstart[r]] += least
                    change[work.rend[r]] -= least
                r = work.rnext[r]
    spent = 0.0
    for t in range(len(work.cap)):
        spent += change[t]
        before = work.cap[t]
        work.cap[t] -= spent
        if work.cap[t] < 0:
            if work.cap[t] >= -1e-12 * max(abs(before), abs(spent)):
                work.cap[t] = 0.0  # rounding of fractional usages, not a real excess
            else:
                work.total[1] = max(work.total[1], -work.cap[t])
                work.used[STATUS] = INFEASIBLE


@kernel
def binding_times(work):
    """Marks the times at which the rows' largest usages together exceed the cap."""
    most = np.zeros(len(work.cap) + 1)
    for u in range(len(work.k)):
        if work.alive[u]:
            r = work.rhead[u]
            while r >= 0:
                largest = 0.0
                for s in range(work.k[u]):
                    largest = max(largest, work.usage[work.roff[r] + s])
                most[work.rstart[r]] += largest
                most[work.rend[r]] -= largest
                r = work.rnext[r]
    binding = np.zeros(len(work.cap), dtype=np.bool_)
    load = 0.0
    for t in range(len(work.cap)):
        load += most[t]
        binding[t] = load > work.cap[t] * (1 + 1e-12)
    return binding


@kernel
def needed_times(work):
    """Marks the times that no neighbouring kept time implies."""
    num_times = len(work.cap)
    begins = np.zeros(num_times + 1, dtype=np.bool_)
    ends = np.zeros(num_times + 1, dtype=np.bool_)
    for u in range(len(work.k)):
        if work.alive[u]:
            r = work.rhead[u]
            while r >= 0:
                begins[work.rstart[r]] = True
                ends[work.rend[r]] = True
                r = work.rnext[r]
    needed = np.ones(num_times, dtype=np.bool_)
    last, grew, fell = 0, False, False
    for t in range(1, num_times):
        grew, fell = grew or begins[t], fell or ends[t]
        if not grew and work.cap[t] >= work.cap[last]:
            needed[t] = False
            continue
        if not fell and work.cap[last] >= work.cap[t]:
            needed[last] = False
        last, grew, fell = t, False, False
    return needed


@kernel
def move_rows(work, place):
    """Renumbers the times of all rows; a row left without times, or with one usage for all states, goes."""
    for u in range(len(work.k)):
        if work.alive[u]:
            before, r = -1, work.rhead[u]
            while r >= 0:
                work.rstart[r], work.rend[r] = place[work.rstart[r]], place[work.rend[r]]
                if work.rstart[r] >= work.rend[r] or _is_flat(work, u, r):
                    if before < 0:
                        work.rhead[u] = work.rnext[r]
                    else:
                        work.rnext[before] = work.rnext[r]
                    push(work, u)
                else:
                    before = r
                r = work.rnext[r]


@inline
def _is_flat(work, u, r):
    most = 0.0
    for s in range(work.k[u]):
        most = max(most, work.usage[work.roff[r] + s])
    return most <= 0.0


@kernel
def drop_too_large(work):
    """Removes states that exceed a cap on their own."""
    if len(work.cap) == 0:
        return
    lowest = work.cap.min()
    for u in range(len(work.k)):
        if not work.alive[u] or work.rhead[u] < 0:
            continue
        for s in range(work.k[u]):
            work.keep[s] = 1
        dropped = False
        r = work.rhead[u]
        while r >= 0:
            cap = -1.0
            for s in range(work.k[u]):
                used = work.usage[work.roff[r] + s]
                if used > lowest * (1 + 1e-12):
                    if cap < 0:
                        cap = work.cap[work.rstart[r] : work.rend[r]].min() * (1 + 1e-12)
                    if used > cap:
                        work.keep[s] = 0
                        dropped = True
            r = work.rnext[r]
        if dropped:
            shrink(work, u)
            push(work, u)
            push_neighbours(work, u)
            if work.used[STATUS] == INFEASIBLE:
                return
