"""The graph that reductions change in place: linked edges and rows, states that shrink, pools that only grow."""

from typing import NamedTuple

import numpy as np

from meshwright.jit import inline, kernel, place
from meshwright.solver.model.model import Model, read_only

# Places in Work.used.
EDGES, MATS, ROWS, USAGES, UNDOS, RECORDS, QUEUED, HEAD, STATUS = range(9)
# Values of used[STATUS].
FINE, FULL, INFEASIBLE = 0, 1, 2


class Work(NamedTuple):
    """Node i has k[i] states at off[i]; half-edge 2e hangs at eu[e], 2e+1 at ev[e]; matrices are k[eu] × k[ev]."""

    k: np.ndarray
    off: np.ndarray
    alive: np.ndarray
    cost: np.ndarray
    label: np.ndarray  # the state's number in the problem that came in
    head: np.ndarray  # first half-edge of every node, -1 for none
    deg: np.ndarray
    eu: np.ndarray
    ev: np.ndarray
    eoff: np.ndarray
    fresh: np.ndarray  # edge was changed and is not yet normalised
    hnext: np.ndarray
    hprev: np.ndarray
    mat: np.ndarray
    rhead: np.ndarray  # first row of every node, -1 for none
    rnext: np.ndarray
    rstart: np.ndarray
    rend: np.ndarray
    roff: np.ndarray
    usage: np.ndarray
    cap: np.ndarray
    when: np.ndarray
    undo: np.ndarray  # int32 payload of the undo records
    record: np.ndarray  # where each record begins
    queue: np.ndarray  # ring buffer of nodes to look at
    queued: np.ndarray
    used: np.ndarray  # how much of each pool is used
    total: np.ndarray  # [0] the cost already settled; [1] how far the worst cap is exceeded
    keep: np.ndarray  # scratch, as long as the largest node
    buffer: np.ndarray  # scratch, as long as the largest node
    mark: np.ndarray  # scratch, one per node: the edge to it, or -1

    @property
    def num_used(self) -> int:
        """How much there is to walk through: room that is not used does not count."""
        return int(len(self.k) + len(self.cost) + self.used[MATS] + self.used[USAGES] + len(self.cap))


def build(model: Model, alive_state: np.ndarray | None = None) -> Work:
    """Copies a model into a work graph; parallel edges are added up, states that are not alive are left out."""
    sizes = np.diff(model.off)
    num_nodes, num_edges, num_rows = len(sizes), len(model.eu), len(model.rnode)
    entries = int((sizes[model.eu] * sizes[model.ev]).sum()) if num_edges else 0
    usages = int(sizes[model.rnode].sum()) if num_rows else 0
    largest = int(sizes.max()) if num_nodes else 0
    work = Work(
        k=sizes.astype(np.int32),
        off=model.off[:-1].copy(),
        alive=np.ones(num_nodes, dtype=np.uint8),
        cost=model.cost.copy(),
        label=(np.arange(len(model.cost)) - np.repeat(model.off[:-1], sizes)).astype(np.int32),
        head=np.full(num_nodes, -1, dtype=np.int32),
        deg=np.zeros(num_nodes, dtype=np.int32),
        eu=np.empty(num_edges + 16, dtype=np.int32),
        ev=np.empty(num_edges + 16, dtype=np.int32),
        eoff=np.empty(num_edges + 16, dtype=np.int64),
        fresh=np.ones(num_edges + 16, dtype=np.uint8),
        hnext=np.empty(2 * (num_edges + 16), dtype=np.int32),
        hprev=np.empty(2 * (num_edges + 16), dtype=np.int32),
        mat=np.empty(entries + entries // 2 + 1024),  # room that is not used takes no memory, growing takes a copy
        rhead=np.full(num_nodes, -1, dtype=np.int32),
        rnext=np.empty(num_rows + 16, dtype=np.int32),
        rstart=np.empty(num_rows + 16, dtype=np.int32),
        rend=np.empty(num_rows + 16, dtype=np.int32),
        roff=np.empty(num_rows + 16, dtype=np.int64),
        usage=np.empty(usages + 1024),
        cap=model.cap.copy(),
        when=model.when,
        undo=np.empty(4 * len(model.cost) + entries // 2 + 1024, dtype=np.int32),
        record=np.empty(num_nodes + 1, dtype=np.int64),
        queue=np.empty(num_nodes + 1, dtype=np.int32),
        queued=np.zeros(num_nodes, dtype=np.uint8),
        used=np.zeros(9, dtype=np.int64),
        total=np.zeros(2),
        keep=np.zeros(largest + 1, dtype=np.uint8),
        buffer=np.zeros(2 * largest + 2),
        mark=np.full(num_nodes, -1, dtype=np.int32),
    )
    alive = np.ones(len(model.cost), dtype=np.uint8) if alive_state is None else alive_state.astype(np.uint8)
    fill(work, model._replace(mat=read_only(model.mat)), alive)
    return work


def grown(work: Work) -> Work:
    """The same graph with room in every pool; called when a kernel stops with FULL."""
    edges, mats, rows, usages, undos = (int(work.used[place]) for place in (EDGES, MATS, ROWS, USAGES, UNDOS))
    work.used[STATUS] = FINE
    return work._replace(
        eu=_room(work.eu, edges),
        ev=_room(work.ev, edges),
        eoff=_room(work.eoff, edges),
        fresh=_room(work.fresh, edges),
        hnext=_room(work.hnext, 2 * edges, 2),
        hprev=_room(work.hprev, 2 * edges, 2),
        mat=_room(work.mat, mats),
        rnext=_room(work.rnext, rows),
        rstart=_room(work.rstart, rows),
        rend=_room(work.rend, rows),
        roff=_room(work.roff, rows),
        usage=_room(work.usage, usages),
        undo=_room(work.undo, undos),
    )


def _room(pool: np.ndarray, used: int, scale: int = 1) -> np.ndarray:
    bigger = np.empty(
        max(used + used // 2, scale * 4096) + (1 << 22 if pool.dtype == np.float64 else 1 << 16), pool.dtype
    )
    bigger[:used] = pool[:used]
    return bigger


@kernel
def fill(work, model, alive_state):
    """Adds the nodes' states, the edges and the rows of a model to an empty work graph."""
    for e in range(len(model.eu)):
        u, v = model.eu[e], model.ev[e]
        begin = work.used[MATS]
        size = np.int64(work.k[u]) * work.k[v]
        work.mat[begin : begin + size] = model.mat[model.eoff[e] : model.eoff[e] + size]
        work.used[MATS] = begin + size
        join(work, u, v, begin)
    for r in range(len(model.rnode)):
        u = model.rnode[r]
        begin = work.used[USAGES]
        work.usage[begin : begin + work.k[u]] = model.usage[model.roff[r] : model.roff[r] + work.k[u]]
        work.used[USAGES] = begin + work.k[u]
        hang_row(work, u, model.rstart[r], model.rend[r], begin)
    for u in range(len(work.k)):
        dropped = False
        for s in range(work.k[u]):
            work.keep[s] = alive_state[work.off[u] + s] != 0 and work.cost[work.off[u] + s] < np.inf
            dropped = dropped or work.keep[s] == 0
        if dropped:
            shrink(work, u)
        push(work, u)


@inline
def push(work, u):
    """Queues a node to be looked at again."""
    if work.alive[u] and not work.queued[u]:
        work.queued[u] = 1
        size = len(work.queue)
        work.queue[(work.used[HEAD] + work.used[QUEUED]) % size] = u
        work.used[QUEUED] += 1


@inline
def push_neighbours(work, u):
    h = work.head[u]
    while h >= 0:
        push(work, other(work, h))
        h = work.hnext[h]


@inline
def other(work, h):
    """The node at the far end of a half-edge."""
    return work.ev[h >> 1] if h & 1 == 0 else work.eu[h >> 1]


@inline
def entry(work, h, s, t):
    """Cost of state s at the half-edge's own node and t at the other."""
    e = h >> 1
    if h & 1 == 0:
        return work.mat[work.eoff[e] + np.int64(s) * work.k[work.ev[e]] + t]
    return work.mat[work.eoff[e] + np.int64(t) * work.k[work.ev[e]] + s]


@inline
def line(work, h, s):
    """Where the costs of state s at the half-edge's own node begin; `line_step` leads from one to the next."""
    e = h >> 1
    return place(work.eoff[e] + (np.int64(s) * work.k[work.ev[e]] if h & 1 == 0 else np.int64(s)))


@inline
def line_step(work, h):
    return place(1 if h & 1 == 0 else work.k[work.ev[h >> 1]])


@inline
def find(work, u, v):
    """The half-edge at u that leads to v, or -1."""
    if work.deg[v] < work.deg[u]:
        h = work.head[v]
        while h >= 0:
            if other(work, h) == u:
                return h ^ 1
            h = work.hnext[h]
        return -1
    h = work.head[u]
    while h >= 0:
        if other(work, h) == v:
            return h
        h = work.hnext[h]
    return -1


@kernel
def join(work, u, v, begin):
    """Adds an edge whose k[u] × k[v] matrix is already in the pool at `begin`; adds up with an edge that is there."""
    h = find(work, u, v)
    if h < 0:
        e = work.used[EDGES]
        work.used[EDGES] = e + 1
        work.eu[e], work.ev[e], work.eoff[e], work.fresh[e] = u, v, begin, 1
        hang_half(work, 2 * e, u)
        hang_half(work, 2 * e + 1, v)
        return
    e = h >> 1
    work.fresh[e] = 1
    here, kv = work.eoff[e], np.int64(work.k[v])
    if work.eu[e] == u:
        for i in range(np.int64(work.k[u]) * kv):
            work.mat[here + i] += work.mat[begin + i]
    else:
        ku = np.int64(work.k[u])
        for s in range(ku):
            for t in range(kv):
                work.mat[here + t * ku + s] += work.mat[begin + s * kv + t]


@inline
def hang_half(work, h, u):
    work.hprev[h] = -1
    work.hnext[h] = work.head[u]
    if work.head[u] >= 0:
        work.hprev[work.head[u]] = h
    work.head[u] = h
    work.deg[u] += 1


@inline
def unhang_half(work, h, u):
    before, after = work.hprev[h], work.hnext[h]
    if before >= 0:
        work.hnext[before] = after
    else:
        work.head[u] = after
    if after >= 0:
        work.hprev[after] = before
    work.deg[u] -= 1


@inline
def cut(work, e):
    """Removes an edge."""
    unhang_half(work, 2 * e, work.eu[e])
    unhang_half(work, 2 * e + 1, work.ev[e])
    work.eu[e] = -1


@inline
def hang_row(work, u, start, end, begin):
    """Adds a memory row whose vector is already in the pool at `begin`."""
    r = work.used[ROWS]
    work.used[ROWS] = r + 1
    work.rstart[r], work.rend[r], work.roff[r] = start, end, begin
    work.rnext[r] = work.rhead[u]
    work.rhead[u] = r


@kernel
def shrink(work, u):
    """Keeps only the states of u marked in work.keep, in its costs, rows and matrices."""
    old = np.int64(work.k[u])
    new = _shrink_lists(work, u, old)
    h = work.head[u]
    while h >= 0:
        _shrink_matrix(work, h, old)
        work.fresh[h >> 1] = 1
        h = work.hnext[h]
    work.k[u] = new
    if new == 0:
        work.used[STATUS] = INFEASIBLE


@inline
def _shrink_lists(work, u, old):
    """Shrinks a node's costs, labels and rows; returns how many states it has then."""
    new = compact(work.cost, work.off[u], work.keep, old)
    compact(work.label, work.off[u], work.keep, old)
    r = work.rhead[u]
    while r >= 0:
        compact(work.usage, work.roff[r], work.keep, old)
        r = work.rnext[r]
    return new


@inline
def _shrink_matrix(work, h, old):
    """Shrinks the matrix of a half-edge by the states of its own node."""
    begin = work.eoff[h >> 1]
    far = np.int64(work.k[other(work, h)])
    to = begin
    if h & 1 == 0:
        for s in range(old):
            if work.keep[s]:
                for t in range(far):
                    work.mat[to + t] = work.mat[begin + s * far + t]
                to += far
    else:
        for t in range(far):
            for s in range(old):
                if work.keep[s]:
                    work.mat[to] = work.mat[begin + t * old + s]
                    to += 1


@inline
def compact(pool, begin, keep, size):
    place = begin
    for s in range(size):
        if keep[s]:
            pool[place] = pool[begin + s]
            place += 1
    return place - begin
