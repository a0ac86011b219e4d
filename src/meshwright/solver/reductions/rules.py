"""The reductions themselves: each looks at one node or edge, with its proof in a sentence.

Writing θ for costs and E for matrices; "rows" are memory rows, and a node without rows cannot affect any memory limit.
"""

import numpy as np

from meshwright.jit import inline, kernel
from meshwright.solver.reductions import numpy_matrices
from meshwright.solver.reductions.edge_matrices import pull_columns, pull_rows, round_down
from meshwright.solver.reductions.mutable_graph import (
    EDGES,
    FULL,
    INFEASIBLE,
    MATS,
    ROWS,
    STATUS,
    UNDOS,
    USAGES,
    cut,
    entry,
    hang_row,
    join,
    line,
    line_step,
    other,
    push,
    push_neighbours,
    shrink,
)
from meshwright.solver.reductions.undo import record_fixed, record_one, record_pair

_NOWHERE = -2
_ROUNDING = 4e-16  # relative to the largest entry: below 1 for whole numbers up to 1e15, so their sums stay exact


@kernel
def settle_edge(work, e):
    """Normalises one edge and drops states without a possible partner.

    Proof: moving a row's minimum into its state's own cost changes no total; a state whose whole row is impossible
    occurs in no finite choice; an edge that is then zero everywhere adds nothing.
    """
    u, v = work.eu[e], work.ev[e]
    ku, kv = np.int64(work.k[u]), np.int64(work.k[v])
    largest, dead_u = pull_rows(work, u, work.eoff[e], ku, kv)
    dead_v = pull_columns(work, v, work.eoff[e], ku, kv)
    zero = round_down(work.mat, work.eoff[e], ku * kv, largest * _ROUNDING)
    work.fresh[e] = 0
    if dead_u:
        drop_impossible(work, u)
    if dead_v:
        drop_impossible(work, v)
    if work.used[STATUS] == INFEASIBLE:
        return
    if zero:
        cut(work, e)
        push(work, u)
        push(work, v)


@kernel
def drop_impossible(work, u):
    """Removes the states of u whose cost is infinite."""
    for s in range(work.k[u]):
        work.keep[s] = work.cost[work.off[u] + s] < np.inf
    shrink(work, u)
    push(work, u)
    push_neighbours(work, u)


@kernel
def drop_dominated(work, u, most_work):
    """Removes state a where some state b is never worse: in cost whatever the neighbours do, and in every row.

    Proof: θ(a) - θ(b) ≥ Σ_v max_t (E(b,t) - E(a,t)) means that swapping a for b in any choice lowers or keeps the cost,
    and a usage no larger in every row keeps every time within its cap.
    """
    k = work.k[u]
    effort = 0
    h = work.head[u]
    while h >= 0:
        effort += work.k[other(work, h)]
        h = work.hnext[h]
    if np.int64(k) * k * max(effort, 1) > most_work:
        return False
    dropped = _mark_dominated(work, u, k)
    if dropped:
        shrink(work, u)
        push_neighbours(work, u)
    return dropped


@inline(plain=numpy_matrices.mark_dominated)
def _mark_dominated(work, u, k):
    """Marks in work.keep the states that are not dominated; returns whether any is."""
    for s in range(k):
        work.keep[s] = 1
    dropped = False
    for a in range(k):
        h, t = -1, 0  # where the last state was found worse than this one: the next mostly is there, too
        for b in range(k):
            slack = work.cost[work.off[u] + a] - work.cost[work.off[u] + b]
            if a == b or not work.keep[b] or slack < 0:
                continue  # every settled row holds a zero, so each neighbour can only take more of the slack
            if h >= 0 and entry(work, h, b, t) - entry(work, h, a, t) > slack:
                continue
            h, t = _worse(work, u, b, a, slack, h, t)
            if h == _NOWHERE:
                work.keep[a] = 0
                dropped = True
                break
    return dropped


@inline
def _worse(work, u, b, a, slack, h, t):
    """The half-edge and the neighbour's state with which b is worse than a: as given for a row, `_NOWHERE` for none."""
    r = work.rhead[u]
    while r >= 0:
        if work.usage[work.roff[r] + b] > work.usage[work.roff[r] + a]:
            return h, t
        r = work.rnext[r]
    h = work.head[u]
    while h >= 0:
        worst = 0.0
        mine, theirs, step = line(work, h, b), line(work, h, a), line_step(work, h)
        for t in range(work.k[other(work, h)]):
            if work.mat[theirs] < np.inf:
                worst = max(worst, work.mat[mine] - work.mat[theirs])
                if worst > slack:
                    return h, t
            mine, theirs = mine + step, theirs + step
        slack -= worst
        h = work.hnext[h]
    return _NOWHERE, 0


@kernel
def fix_alone(work, u):
    """R0: a node without edges and rows takes its cheapest state. Proof: nothing else depends on it."""
    best = 0
    for s in range(1, work.k[u]):
        if work.cost[work.off[u] + s] < work.cost[work.off[u] + best]:
            best = s
    work.total[0] += work.cost[work.off[u] + best]
    record_fixed(work, u, work.label[work.off[u] + best])
    work.alive[u] = 0


@kernel
def fold_leaf(work, u):
    """R1: a node of degree one follows its neighbour's state t by f(t) = argmin_s θ(s) + E(s,t).

    Proof: given t, that state is cheapest; where u has rows, it is also required to use least in every row among all
    states possible with t, so no choice fits with another state that does not fit with f(t).
    """
    h = work.head[u]
    v = other(work, h)
    for t in range(work.k[v]):
        best, least = 0, np.inf
        for s in range(work.k[u]):
            here = work.cost[work.off[u] + s] + entry(work, h, s, t)
            if here < least:
                best, least = s, here
        if least == np.inf:
            return False  # the edge is not settled yet
        if work.rhead[u] >= 0 and not _uses_least(work, u, h, best, t):
            return False
        work.buffer[t] = best
    return fold(work, u, h)


@inline
def _uses_least(work, u, h, best, t):
    for s in range(work.k[u]):
        if s != best and entry(work, h, s, t) < np.inf:
            r = work.rhead[u]
            while r >= 0:
                if work.usage[work.roff[r] + s] < work.usage[work.roff[r] + best]:
                    return False
                r = work.rnext[r]
    return True


@kernel
def contract(work, v, growth):
    """Contraction: where each state of some neighbour u allows exactly one state f of v, v follows u.

    Proof: every finite choice has x_v = f(x_u), so v's cost, rows and edges may be read at f(x_u).
    """
    h = work.head[v]
    while h >= 0:
        if _is_function(work, h ^ 1, v) and _stays_small(work, v, h, growth):
            return fold(work, v, h)
        h = work.hnext[h]
    return False


@inline
def _is_function(work, h, v):
    """Whether every state at the half-edge's own node allows exactly one state of v; leaves the map in work.buffer."""
    u = other(work, h ^ 1)
    for s in range(work.k[u]):
        found = -1
        for t in range(work.k[v]):
            if entry(work, h, s, t) < np.inf:
                if found >= 0:
                    return False
                found = t
        if found < 0:
            return False
        work.buffer[s] = found
    return True


@inline
def _stays_small(work, v, h, growth):
    """Whether moving v's edges to the neighbour keeps the matrices within `growth` times their size."""
    ku, kv = np.int64(work.k[other(work, h)]), np.int64(work.k[v])
    far = np.int64(0)
    g = work.head[v]
    while g >= 0:
        if g != h:
            far += work.k[other(work, g)]
        g = work.hnext[g]
    return ku * far <= growth * (ku * kv + kv * far) + 1024


@kernel
def fold(work, v, h):
    """Removes v, which follows the node u at the far end of h by the map in work.buffer; moves all it has to u."""
    u = other(work, h)
    ku, kv = np.int64(work.k[u]), work.k[v]
    if not _has_room(work, v, h, ku):
        return False
    record_one(work, v, u)
    for s in range(ku):
        to = np.int64(work.buffer[s])
        work.cost[work.off[u] + s] += work.cost[work.off[v] + to] + entry(work, h, to, s)
    r = work.rhead[v]
    while r >= 0:
        begin = work.used[USAGES]
        for s in range(ku):
            work.usage[begin + s] = work.usage[work.roff[r] + np.int64(work.buffer[s])]
        if not _merge_row(work, u, work.rstart[r], work.rend[r], begin, ku):
            work.used[USAGES] = begin + ku
            hang_row(work, u, work.rstart[r], work.rend[r], begin)
        r = work.rnext[r]
    cut(work, h >> 1)
    while work.head[v] >= 0:
        g = work.head[v]
        w = other(work, g)
        kw = np.int64(work.k[w])
        begin = work.used[MATS]
        for s in range(ku):
            for t in range(kw):
                work.mat[begin + s * kw + t] = entry(work, g, np.int64(work.buffer[s]), t)
        cut(work, g >> 1)
        work.used[MATS] = begin + ku * kw
        join(work, u, w, begin)
        push(work, w)
    work.alive[v] = 0
    push(work, u)
    push_neighbours(work, u)
    return kv > 0


@inline
def _merge_row(work, u, start, end, begin, ku):
    """Adds the vector at `begin` to a row of u with the same interval, if there is one."""
    q = work.rhead[u]
    while q >= 0:
        if work.rstart[q] == start and work.rend[q] == end:
            for s in range(ku):
                work.usage[work.roff[q] + s] += work.usage[begin + s]
            return True
        q = work.rnext[q]
    return False


@inline
def _has_room(work, v, h, ku):
    """Whether the pools can take v's rows and edges, moved to a node of ku states; asks for more where not."""
    need_mat, edges = np.int64(0), 0
    g = work.head[v]
    while g >= 0:
        if g != h:
            need_mat += ku * work.k[other(work, g)]
            edges += 1
        g = work.hnext[g]
    rows = 0
    r = work.rhead[v]
    while r >= 0:
        rows += 1
        r = work.rnext[r]
    enough = (
        work.used[MATS] + need_mat <= len(work.mat)
        and work.used[EDGES] + edges <= len(work.eu)
        and work.used[ROWS] + rows <= len(work.rnext)
        and work.used[USAGES] + (rows + 1) * ku <= len(work.usage)
        and work.used[UNDOS] + 4 + 2 * ku <= len(work.undo)
    )
    if not enough:
        work.used[STATUS] = FULL
    return enough


@kernel
def bridge(work, u, growth, most_work):
    """R2: a node of degree two without rows becomes an edge between its neighbours v and w.

    Proof: given (t, q) its best state costs min_s θ(s) + E_v(s,t) + E_w(s,q), a matrix over v and w.
    """
    h, g = work.head[u], work.hnext[work.head[u]]
    v, w = other(work, h), other(work, g)
    ku, kv, kw = np.int64(work.k[u]), np.int64(work.k[v]), np.int64(work.k[w])
    if ku * kv * kw > most_work or kv * kw > growth * ku * (kv + kw) + 1024:
        return False
    if (
        work.used[MATS] + kv * kw + ku * kw > len(work.mat)
        or work.used[EDGES] + 1 > len(work.eu)
        or work.used[UNDOS] + 6 + kv + kw + kv * kw > len(work.undo)
    ):
        work.used[STATUS] = FULL
        return False
    begin = work.used[MATS]
    table = record_pair(work, u, v, w)
    _minimise_over(work, u, h, g, begin, table)
    cut(work, h >> 1)
    cut(work, g >> 1)
    work.used[MATS] = begin + kv * kw
    join(work, v, w, begin)
    work.alive[u] = 0
    push(work, v)
    push(work, w)
    return True


@inline(plain=numpy_matrices.minimise_over)
def _minimise_over(work, u, h, g, begin, table):
    """Writes min_s θ(s) + E_v(s,t) + E_w(s,q) at `begin` and the labels of the best s into the undo record."""
    ku, kv, kw = np.int64(work.k[u]), np.int64(work.k[other(work, h)]), np.int64(work.k[other(work, g)])
    copy = begin + kv * kw  # E_w with u's states as rows: the inner loop then runs over neighbouring memory
    for s in range(ku):
        for q in range(kw):
            work.mat[copy + s * kw + q] = entry(work, g, s, q)
    for i in range(kv * kw):
        work.mat[begin + i] = np.inf
        work.undo[table + i] = work.label[work.off[u]]
    for t in range(kv):
        for s in range(ku):
            base = work.cost[work.off[u] + s] + entry(work, h, s, t)
            if base < np.inf:
                label = work.label[work.off[u] + s]
                for q in range(kw):
                    here = base + work.mat[copy + s * kw + q]
                    if here < work.mat[begin + t * kw + q]:
                        work.mat[begin + t * kw + q] = here
                        work.undo[table + t * kw + q] = label
