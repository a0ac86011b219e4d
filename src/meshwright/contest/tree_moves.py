"""Tree moves: a random induced tree of nodes takes its best states at once while all others keep theirs.

The tree is solved by dynamic programming; memory counts by what its price adds to the costs, and no move may break a
cap. Where the best states of a tree do, memory at the worst time is charged at the price that makes the tree's old
states as good, and the tree is solved again: what wins then, if anything, lies between the two.
"""

from typing import NamedTuple

import numpy as np

from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.jit import inline, kernel, place
from meshwright.solver.model.half_edges import Links
from meshwright.solver.model.model import Model

_INSIDE = 1 << 20  # added to `touched` of the tree's own nodes


class Rows(NamedTuple):
    """The rows of a model by node: those of u are first[u]:first[u + 1]."""

    first: np.ndarray  # int64 [nodes + 1]
    start: np.ndarray
    end: np.ndarray
    off: np.ndarray  # where the row's vector begins in usage
    usage: np.ndarray


class Tree(NamedTuple):
    """Room for one tree: its nodes, parents first, each with the half-edge that leads to it from its parent."""

    node: np.ndarray  # int64 [most nodes]
    parent: np.ndarray  # int64 [most nodes], place in the tree
    half: np.ndarray  # int64 [most nodes]
    off: np.ndarray  # int64 [most nodes + 1], where the node's states begin in the costs
    old: np.ndarray  # int64 [most nodes], states before the move
    new: np.ndarray  # int64 [most nodes], the best states
    cost: np.ndarray  # of the states, edges to outer neighbours included
    taxed: np.ndarray  # the same with memory charged at single times
    best: np.ndarray  # the same with the best of all that hangs below
    spare: np.ndarray  # [most states of a node]
    moved: np.ndarray  # [most states of a node]
    touched: np.ndarray  # int32 [all nodes], neighbours in the tree; zero between moves
    rim: np.ndarray  # int64 [half-edges], half-edges that lead out of the tree


class Trees:
    """Improves choices of one model by tree moves."""

    def __init__(self, model: Model, links: Links, tuning: SearchTuning = SEARCH):
        self.model, self.links, self.tuning = model, links, tuning
        order = np.argsort(model.rnode, kind="stable")
        first = np.searchsorted(model.rnode[order], np.arange(model.num_nodes + 1)).astype(np.int64)
        self.rows = Rows(first, model.rstart[order], model.rend[order], model.roff[order], model.usage)
        widest, most = int(np.diff(model.off).max(initial=1)), tuning.tree_nodes[1]
        self.tree = Tree._make(
            [np.empty(most + 1, dtype=np.int64) for _ in range(6)]
            + [np.empty(most * widest) for _ in range(3)]
            + [np.empty(widest) for _ in range(2)]
            + [np.zeros(model.num_nodes, dtype=np.int32), np.empty(len(links.far) + 1, dtype=np.int64)]
        )

    def move(self, choice: np.ndarray, load: np.ndarray, cost: np.ndarray, roots: np.ndarray, seed: int) -> None:
        """Makes one move around each root, in place; no move raises the sum of the given costs and the edges'."""
        sizes = self.tuning.tree_nodes
        move_trees(
            self.tree, self.links, self.rows, self.model.off, cost, self.model.cap, choice, load, roots, sizes, seed
        )


@kernel(interpretable=False)
def move_trees(tree, links, rows, off, cost, cap, choice, load, roots, sizes, seed):
    """One tree around every root; sizes are its least and most nodes."""
    least_nodes, most_nodes = sizes
    np.random.seed(seed)
    for root in roots:
        count = grow(tree, links, off, root, np.random.randint(least_nodes, most_nodes + 1))
        for i in range(count):
            tree.old[i] = choice[tree.node[i]]
        charge(tree, links, off, cost, choice, count)
        release(tree, links, count)
        before = value(tree, tree.cost, links, tree.old, count)
        for taxed in (False, True):
            if not solve(tree, links, count):
                break
            if taxed and value(tree, tree.cost, links, tree.new, count) > before:
                break
            shift(tree, rows, load, tree.old, tree.new, count)
            when = worst(tree, rows, load, cap, count)
            if when < 0:
                for i in range(count):
                    choice[tree.node[i]] = tree.new[i]
                break
            shift(tree, rows, load, tree.new, tree.old, count)
            if taxed or not levy(tree, links, rows, when, count):
                break


@inline
def grow(tree, links, off, root, most):
    """Grows a random tree in which only parent and child are linked; returns its number of nodes."""
    count, waiting = 0, 0
    u, parent, half = root, -1, -1
    tree.off[0] = 0
    while True:
        tree.node[count], tree.parent[count], tree.half[count] = u, parent, half
        tree.off[count + 1] = tree.off[count] + off[u + 1] - off[u]
        tree.touched[u] += _INSIDE
        for h in range(links.hoff[u], links.hoff[u + 1]):
            v = links.far[h]
            tree.touched[v] += 1
            if tree.touched[v] == 1:
                tree.rim[waiting] = h
                waiting += 1
        count += 1
        half = -1
        while half < 0 and waiting > 0 and count < most:
            pick = np.random.randint(waiting)
            h = tree.rim[pick]
            waiting -= 1
            tree.rim[pick] = tree.rim[waiting]
            u = links.far[h]
            if tree.touched[u] == 1:
                half = h
        if half < 0:
            return count
        near = links.far[links.back[half]]
        parent = count - 1
        while tree.node[parent] != near:
            parent -= 1


@inline
def release(tree, links, count):
    """Forgets which nodes the tree touches."""
    for i in range(count):
        u = tree.node[i]
        tree.touched[u] = 0
        for h in range(links.hoff[u], links.hoff[u + 1]):
            tree.touched[links.far[h]] = 0


@inline
def charge(tree, links, off, cost, choice, count):
    """Costs of the tree's states while all nodes outside keep theirs."""
    for i in range(count):
        u = tree.node[i]
        k = off[u + 1] - off[u]
        here = tree.cost[tree.off[i] : tree.off[i + 1]]
        for s in range(k):
            here[s] = cost[off[u] + s]
        for h in range(links.hoff[u], links.hoff[u + 1]):
            v = links.far[h]
            if tree.touched[v] < _INSIDE:
                line = links.plane[links.back[h]] + choice[v] * k
                for s in range(k):
                    here[s] += links.mats[line + s]
        for s in range(k):
            tree.taxed[tree.off[i] + s] = here[s]


@inline
def solve(tree, links, count):
    """The best states by the taxed costs; returns whether they differ from the old ones."""
    for x in range(tree.off[count]):
        tree.best[x] = tree.taxed[x]
    for i in range(count - 1, 0, -1):
        h, here = tree.half[i], place(tree.off[tree.parent[i]])
        other = links.back[h]
        own, far = place(links.num_kinds[h]), place(links.num_kinds[other])
        for t in range(far):
            tree.spare[t] = np.inf
        kind, there = place(links.kind[other]), place(tree.off[i])
        for t in range(place(tree.off[i + 1] - tree.off[i])):
            k = place(links.kinds[kind + t])
            tree.spare[k] = min(tree.spare[k], tree.best[there + t])
        for s in range(own):
            tree.moved[s] = np.inf
        line = place(links.lean[h])
        for t in range(far):
            base = tree.spare[t]
            for s in range(own):
                total = base + links.leans[line + s]
                tree.moved[s] = total if total < tree.moved[s] else tree.moved[s]
            line += own
        kind = place(links.kind[h])
        for s in range(place(tree.off[tree.parent[i] + 1]) - here):
            tree.best[here + s] += tree.moved[place(links.kinds[kind + s])]
    differ = False
    for i in range(count):
        least, pick = np.inf, 0
        for t in range(tree.off[i + 1] - tree.off[i]):
            here = tree.best[tree.off[i] + t]
            if i > 0:
                here += pair(tree, links, i, tree.new[tree.parent[i]], t)
            if here < least:
                least, pick = here, t
        tree.new[i] = pick
        differ = differ or pick != tree.old[i]
    return differ


@inline
def pair(tree, links, i, s, t):
    """What the edge above the tree's node i costs where the parent has state s and the node t."""
    h = tree.half[i]
    column = links.kinds[links.kind[h] + s]
    row = links.kinds[links.kind[links.back[h]] + t]
    return links.leans[links.lean[h] + row * links.num_kinds[h] + column]


@inline
def value(tree, cost, links, states, count):
    """What given states of the tree cost."""
    total = cost[states[0]]
    for i in range(1, count):
        total += cost[tree.off[i] + states[i]] + pair(tree, links, i, states[tree.parent[i]], states[i])
    return total


@inline
def shift(tree, rows, load, old, new, count):
    """Moves the load from old states to new ones."""
    for i in range(count):
        if old[i] != new[i]:
            u = tree.node[i]
            for r in range(rows.first[u], rows.first[u + 1]):
                change = rows.usage[rows.off[r] + new[i]] - rows.usage[rows.off[r] + old[i]]
                if change != 0.0:
                    for t in range(rows.start[r], rows.end[r]):
                        load[t] += change


@inline
def worst(tree, rows, load, cap, count):
    """The time at which the load exceeds its cap by most where the new states use more, or -1."""
    excess, when = 0.0, -1
    for i in range(count):
        if tree.old[i] != tree.new[i]:
            u = tree.node[i]
            for r in range(rows.first[u], rows.first[u + 1]):
                if rows.usage[rows.off[r] + tree.new[i]] > rows.usage[rows.off[r] + tree.old[i]]:
                    most = 0.0
                    for t in range(rows.start[r], rows.end[r]):
                        most = max(most, load[t] - cap[t])
                    if most > excess:
                        excess, when = most, rows.start[r]
                        while load[when] - cap[when] != most:
                            when += 1
    return when


@inline
def levy(tree, links, rows, when, count):
    """Charges memory at one time so that old and new states cost the same; returns whether there is such a price."""
    gain = value(tree, tree.taxed, links, tree.old, count) - value(tree, tree.taxed, links, tree.new, count)
    more = 0.0
    for i in range(count):
        u = tree.node[i]
        for r in range(rows.first[u], rows.first[u + 1]):
            if rows.start[r] <= when < rows.end[r]:
                more += rows.usage[rows.off[r] + tree.new[i]] - rows.usage[rows.off[r] + tree.old[i]]
    if gain <= 0.0 or more <= 0.0:
        return False
    price = gain / more
    for i in range(count):
        u = tree.node[i]
        for r in range(rows.first[u], rows.first[u + 1]):
            if rows.start[r] <= when < rows.end[r]:
                for s in range(tree.off[i + 1] - tree.off[i]):
                    tree.taxed[tree.off[i] + s] += price * rows.usage[rows.off[r] + s]
    return True
