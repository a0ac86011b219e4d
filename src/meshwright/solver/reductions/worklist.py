"""Works through the queue of nodes, applying to each the first reduction that fits."""

from meshwright.jit import kernel
from meshwright.solver.reductions.mutable_graph import EDGES, FINE, FULL, HEAD, INFEASIBLE, QUEUED, STATUS, UNDOS, push
from meshwright.solver.reductions.rules import bridge, contract, drop_dominated, fix_alone, fold_leaf, settle_edge


@kernel
def drain(work, growth, most_work, steps):
    """Looks at queued nodes until none is left, `steps` are done, a pool is full, or the problem proves infeasible."""
    done = 0
    while work.used[QUEUED] > 0 and work.used[STATUS] == FINE and done < steps:
        done += 1
        u = work.queue[work.used[HEAD]]
        work.used[HEAD] = (work.used[HEAD] + 1) % len(work.queue)
        work.used[QUEUED] -= 1
        work.queued[u] = 0
        if work.alive[u]:
            _reduce_node(work, u, growth, most_work)
            if work.used[STATUS] == FULL:
                push(work, u)


@kernel
def settle_fresh(work):
    """Settles all edges that were changed: a state without a possible partner is more than a dual can reckon with."""
    again = True
    while again:
        again = False
        for e in range(work.used[EDGES]):
            if work.eu[e] >= 0 and work.fresh[e] and work.used[STATUS] != INFEASIBLE:
                settle_edge(work, e)
                again = True


@kernel
def _reduce_node(work, u, growth, most_work):
    """One node: settle its edges, drop dominated states, then remove it if a rule allows."""
    h = work.head[u]
    while h >= 0:
        after = work.hnext[h]
        if work.fresh[h >> 1]:
            settle_edge(work, h >> 1)
            if work.used[STATUS] != FINE:
                return
        h = after
    h = work.head[u]
    while h >= 0:  # settling one edge may drop a state and unsettle another
        if work.fresh[h >> 1]:
            push(work, u)
            return
        h = work.hnext[h]
    if work.k[u] > 1 and drop_dominated(work, u, most_work):
        push(work, u)
        return
    if work.used[UNDOS] + 3 > len(work.undo):
        work.used[STATUS] = FULL
        return
    if work.deg[u] == 0:
        if work.rhead[u] < 0:
            fix_alone(work, u)
    elif work.deg[u] == 1 and fold_leaf(work, u):
        return
    elif work.used[STATUS] == FINE:
        if work.deg[u] == 2 and work.rhead[u] < 0 and bridge(work, u, growth, most_work):
            return
        if work.used[STATUS] == FINE:
            contract(work, u, growth)
