"""Reduces a model to a smaller one with the same optimum, node by node, and expands its choices back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.model.model import Model
from meshwright.solver.reductions import memory, undo
from meshwright.solver.reductions.mutable_graph import (
    EDGES,
    FINE,
    FULL,
    HEAD,
    INFEASIBLE,
    QUEUED,
    RECORDS,
    STATUS,
    UNDOS,
    Work,
    build,
    grown,
    push,
)
from meshwright.solver.reductions.rules import bridge, contract, drop_dominated, fix_alone, fold_leaf, settle_edge


@dataclass(frozen=True, eq=False)
class WayBack:
    """What leads from a choice of a reduced model to one of the model it was made from."""

    off: np.ndarray  # of the reduced model
    nodes: np.ndarray  # the node of the incoming model behind each node of the model
    labels: np.ndarray  # the incoming state behind each state of the model
    num_incoming: int
    records: tuple[np.ndarray, np.ndarray]

    def expand(self, choice: np.ndarray) -> np.ndarray:
        """The choice of the incoming model that a choice of the reduced model stands for."""
        full = np.full(self.num_incoming, -1, dtype=np.int32)
        full[self.nodes] = self.labels[self.off[:-1] + choice]
        payload, record = self.records
        undo.replay(payload, record, len(record), full)
        return full

    def restrict(self, choice: np.ndarray) -> np.ndarray | None:
        """The choice of the reduced model behind one of the incoming; None where a state is no longer there."""
        sizes = np.diff(self.off)
        hit = np.flatnonzero(self.labels == np.repeat(choice[self.nodes], sizes))
        node = np.repeat(np.arange(len(sizes)), sizes)[hit]
        return hit - self.off[:-1] if len(node) == len(sizes) else None


def restrict(chain: Sequence[WayBack], choice: np.ndarray) -> np.ndarray | None:
    """The choice of a model that was reduced several times behind one of the first; None where a state is gone."""
    known: np.ndarray | None = choice
    for way_back in chain:
        if known is not None:
            known = way_back.restrict(known)
    return known


@dataclass(frozen=True, eq=False)
class Reduced:
    """A smaller model, the cost already settled, and the way back.

    Attributes:
        model: What is left to choose.
        offset: Cost of all that was settled: full cost = offset + cost in the model.
        infeasible: Whether the reductions proved that no choice fits.
        excess: How much more limit the proof asks for, at least; 0 where impossible pairs are the reason.
        way_back: From choices of the model to choices of the incoming one; small beside the model.
    """

    model: Model
    offset: float
    infeasible: bool
    excess: float
    way_back: WayBack


def reduce_model(
    model: Model,
    alive_state: np.ndarray | None = None,
    growth: float = 4.0,
    most_work: int = 2_000_000,
    deadline: Deadline = NEVER,
) -> Reduced:
    """Applies all reductions until none fits (or the deadline passes, which is always safe).

    Args:
        model: What to reduce; it is not changed.
        alive_state: Marks the states that may still be chosen; None for all.
        growth: How much larger than the matrices it replaces a new matrix may be.
        most_work: Most elementary steps for one reduction of one node.
        deadline: When to stop.
    """
    work = build(model, alive_state)
    while work.used[STATUS] != INFEASIBLE:
        work = memory.settle_memory(work)
        if work.used[STATUS] == INFEASIBLE or work.used[QUEUED] == 0:
            break
        work = _drained(work, growth, most_work, deadline)
        if deadline.is_over:
            settle_fresh(work)
            break
    return _extract(work, len(model.off) - 1)


def _drained(work: Work, growth: float, most_work: int, deadline: Deadline) -> Work:
    """Empties the queue, giving the pools more room as needed."""
    while work.used[QUEUED] and work.used[STATUS] != INFEASIBLE and not deadline.is_over:
        drain(work, growth, most_work, 1000)
        if work.used[STATUS] == FULL:
            work = grown(work)
    return work


def _extract(work: Work, num_incoming: int) -> Reduced:
    """Copies what is left of a work graph into a fresh model."""
    nodes = np.flatnonzero(work.alive)
    payload = work.undo[: work.used[UNDOS]].copy()
    record = work.record[: work.used[RECORDS]].copy()
    infeasible = bool(work.used[STATUS] == INFEASIBLE)
    if infeasible:
        nodes = nodes[:0]
    off = np.concatenate([[0], np.cumsum(work.k[nodes])]).astype(np.int64)
    number = np.full(num_incoming, -1, dtype=np.int32)
    number[nodes] = np.arange(len(nodes), dtype=np.int32)
    cost, labels = np.empty(off[-1]), np.empty(off[-1], dtype=np.int32)
    num_rows, num_usages, num_edges, num_entries = count_left(work, nodes)
    model = Model(
        off=off,
        cost=cost,
        eu=np.empty(num_edges, dtype=np.int32),
        ev=np.empty(num_edges, dtype=np.int32),
        eoff=np.empty(num_edges, dtype=np.int64),
        mat=np.empty(num_entries),
        rnode=np.empty(num_rows, dtype=np.int32),
        rstart=np.empty(num_rows, dtype=np.int32),
        rend=np.empty(num_rows, dtype=np.int32),
        roff=np.empty(num_rows, dtype=np.int64),
        usage=np.empty(num_usages),
        cap=work.cap.copy() if num_rows else work.cap[:0].copy(),
        when=work.when if num_rows else work.when[:0],
    )
    copy_left(work, nodes, number, model, labels)
    way_back = WayBack(off, nodes, labels, num_incoming, (payload, record))
    return Reduced(model, float(work.total[0]), infeasible, float(work.total[1]), way_back)


@kernel
def count_left(work, nodes):
    """Counts rows, usages, edges and matrix entries of the nodes that are left."""
    rows, usages, edges, entries = 0, np.int64(0), 0, np.int64(0)
    for u in nodes:
        r = work.rhead[u]
        while r >= 0:
            rows += 1
            usages += work.k[u]
            r = work.rnext[r]
        h = work.head[u]
        while h >= 0:
            if h & 1 == 0:
                edges += 1
                entries += np.int64(work.k[u]) * work.k[work.ev[h >> 1]]
            h = work.hnext[h]
    return rows, usages, edges, entries


@kernel
def copy_left(work, nodes, number, model, labels):
    """Copies the nodes that are left, with their rows and edges."""
    row, used, entry = 0, np.int64(0), np.int64(0)
    for i in range(len(nodes)):
        u = nodes[i]
        for s in range(work.k[u]):
            model.cost[model.off[i] + s] = work.cost[work.off[u] + s]
            labels[model.off[i] + s] = work.label[work.off[u] + s]
        r = work.rhead[u]
        while r >= 0:
            model.rnode[row], model.rstart[row], model.rend[row], model.roff[row] = (
                i,
                work.rstart[r],
                work.rend[r],
                used,
            )
            for s in range(work.k[u]):
                model.usage[used + s] = work.usage[work.roff[r] + s]
            used += work.k[u]
            row += 1
            r = work.rnext[r]
    edge = 0
    for e in range(work.used[EDGES]):  # in the order in which they came, so that results depend on nothing else
        if work.eu[e] >= 0 and number[work.eu[e]] >= 0:
            u, v = work.eu[e], work.ev[e]
            model.eu[edge], model.ev[edge], model.eoff[edge] = number[u], number[v], entry
            size = np.int64(work.k[u]) * work.k[v]
            model.mat[entry : entry + size] = work.mat[work.eoff[e] : work.eoff[e] + size]
            entry += size
            edge += 1


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
