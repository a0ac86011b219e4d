"""Message passing (TRW-S): reparametrises the costs so that the sum of the nodes' minima bounds the optimum.

State: one message m per half-edge, the cost moved from the edge to its node. Node u then costs θ_u + Σ m, edge (u,v)
costs E - m_u - m_v; no total changes. At the end of a sweep all edges have minimum 0 in every row towards the node that
pulled last, so Σ_u min_s (θ_u + Σ m)(s) is a lower bound. Kolmogorov, "Convergent TRW-S", 2006.
"""

import numpy as np

from meshwright.jit import inline, kernel, place
from meshwright.solver.model import numpy_kernels


@inline(plain=numpy_kernels.pull)
def pull(links, off, m, h, u, spare, moved):
    """Moves as much of the edge's cost as possible into u: m_h(s) = min_t E(s,t) - m_back(t), by kinds of states."""
    v, other = links.far[h], links.back[h]
    back, here = place(links.msg[other]), place(links.msg[h])
    own, far = place(links.num_kinds[h]), place(links.num_kinds[other])
    for t in range(far):
        spare[t] = -np.inf
    kind = place(links.kind[other])
    for t in range(place(off[v + 1] - off[v])):
        k = place(links.kinds[kind + t])
        spare[k] = max(spare[k], m[back + t])
    for s in range(own):
        moved[s] = np.inf
    line = place(links.lean[h])
    for t in range(far):
        base = -spare[t]
        for s in range(own):
            value = base + links.leans[line + s]
            moved[s] = value if value < moved[s] else moved[s]
        line += own
    kind = place(links.kind[h])
    for s in range(place(off[u + 1] - off[u])):
        m[here + s] = moved[place(links.kinds[kind + s])]


@inline(plain=numpy_kernels.gather)
def gather(links, off, theta, m, u, d):
    """d(s) = θ_u(s) + Σ_h m_h(s); returns its minimum."""
    ku, here = place(off[u + 1] - off[u]), place(off[u])
    for s in range(ku):
        d[s] = theta[here + s]
    for h in range(links.hoff[u], links.hoff[u + 1]):
        here = place(links.msg[h])
        for s in range(ku):
            d[s] += m[here + s]
    least = np.inf
    for s in range(ku):
        least = min(least, d[s])
    return least


@kernel
def sweep(links, off, theta, m, rc, forward):
    """One pass over all nodes; returns the lower bound and leaves the nodes' reduced costs in rc.

    rc(s) = d(s) - min d is what choosing s adds to the bound at least: everything else keeps its minimum.
    """
    num_nodes = len(off) - 1
    most = 0
    for u in range(num_nodes):
        most = max(most, off[u + 1] - off[u])
    spare, moved = np.empty(most), np.empty(most)
    bound = 0.0
    for i in range(num_nodes):
        u = i if forward else num_nodes - 1 - i
        begin, middle, end = links.hoff[u], links.split[u], links.hoff[u + 1]
        if forward:
            for h in range(begin, middle):
                pull(links, off, m, h, u, spare, moved)
        else:
            for h in range(middle, end):
                pull(links, off, m, h, u, spare, moved)
        d = rc[off[u] : off[u + 1]]
        least = gather(links, off, theta, m, u, d)
        bound += least
        for s in range(len(d)):
            d[s] -= least
        earlier, later = middle - begin, end - middle
        if earlier + later == 0:
            continue
        share = 1.0 / max(earlier, later)
        first, last = (middle, end) if forward else (begin, middle)
        for h in range(first, last):
            here = place(links.msg[h])
            for s in range(place(len(d))):
                m[here + s] -= share * d[s]
    return bound


@kernel
def there_and_back(links, off, theta, m, rc, floor, spare):
    """A backward and a forward sweep; returns the bound less what the caps are worth, and raises each state's floor.

    A node's reduced costs hold at the moment it is passed: what the sweep gains at later nodes may rest on them.
    """
    before = sweep(links, off, theta, m, rc, False) - spare
    after = sweep(links, off, theta, m, rc, True) - spare
    for s in range(len(rc)):
        floor[s] = max(floor[s], rc[s] + before)
    return after


@kernel
def priced(off, cost, rnode, rstart, rend, roff, usage, price, theta):
    """θ = cost plus every row's usage times the sum of the prices over its times."""
    running = np.zeros(len(price) + 1)
    for t in range(len(price)):
        running[t + 1] = running[t] + price[t]
    theta[:] = cost
    for r in range(len(rnode)):
        rate = running[rend[r]] - running[rstart[r]]
        if rate > 0:
            u = rnode[r]
            for s in range(off[u + 1] - off[u]):
                theta[off[u] + s] += rate * usage[roff[r] + s]


@kernel
def round_choice(links, off, theta, m, choice):
    """Decodes a choice in node order: edges to earlier neighbours are exact, those to later ones are messages."""
    for u in range(len(off) - 1):
        best, least = 0, np.inf
        for s in range(off[u + 1] - off[u]):
            here = theta[off[u] + s]
            for h in range(links.hoff[u], links.split[u]):
                v = links.far[h]
                here += links.mats[links.plane[h] + s * (off[v + 1] - off[v]) + choice[v]]
            for h in range(links.split[u], links.hoff[u + 1]):
                here += m[links.msg[h] + s]
            if here < least:
                best, least = s, here
        choice[u] = best


@kernel
def expected_load(off, rnode, rstart, rend, roff, usage, rc, load):
    """Load at every time when each node takes its state of least reduced cost (ties shared evenly)."""
    load[:] = 0.0
    change = np.zeros(len(load) + 1)
    for r in range(len(rnode)):
        u = rnode[r]
        total, ties = 0.0, 0
        for s in range(off[u + 1] - off[u]):
            if rc[off[u] + s] <= 0.0:
                total += usage[roff[r] + s]
                ties += 1
        change[rstart[r]] += total / ties
        change[rend[r]] -= total / ties
    running = 0.0
    for t in range(len(load)):
        running += change[t]
        load[t] = running


@kernel
def spend(off, rnode, rate, roff, usage, extra):
    """extra(s) += what state s pays for memory at the given prices of rows."""
    for r in range(len(rnode)):
        u = rnode[r]
        for s in range(off[u + 1] - off[u]):
            extra[off[u] + s] += rate[r] * usage[roff[r] + s]
