"""What settling an edge does with its matrix, in loops over entries that lie side by side."""

import numpy as np

from meshwright.jit import inline, place
from meshwright.solver.reductions import numpy_matrices


@inline(plain=numpy_matrices.pull_rows)
def pull_rows(work, u, begin, ku, kv):
    """Moves every row's minimum into its state's own cost; returns the largest entry, and whether a state is dead."""
    mat, largest, dead = work.mat, 0.0, False
    for s in range(ku):
        least = np.inf
        for i in range(place(begin + s * kv), place(begin + (s + 1) * kv)):
            here = mat[i]
            least = here if here < least else least
            size = abs(here) if here < np.inf else 0.0
            largest = size if size > largest else largest
        if least == np.inf:
            dead = True
        elif least != 0.0:
            for i in range(place(begin + s * kv), place(begin + (s + 1) * kv)):
                mat[i] -= least
        work.cost[work.off[u] + s] += least
    return largest, dead


@inline(plain=numpy_matrices.pull_columns)
def pull_columns(work, v, begin, ku, kv):
    """The same for columns, row by row: entries that lie side by side are read together."""
    mat, least, dead, some = work.mat, work.buffer, False, False
    for t in range(kv):
        least[t] = np.inf
    for s in range(ku):
        row = place(begin + s * kv)
        for t in range(place(kv)):
            here = mat[row + t]
            least[t] = here if here < least[t] else least[t]
    for t in range(kv):
        work.cost[work.off[v] + t] += least[t]
        if least[t] == np.inf:
            dead, least[t] = True, 0.0
        some = some or least[t] != 0.0
    if some:
        for s in range(ku):
            row = place(begin + s * kv)
            for t in range(place(kv)):
                mat[row + t] -= least[t]
    return dead


@inline(plain=numpy_matrices.round_down)
def round_down(mat, begin, size, most):
    """Puts entries that are no more than rounding to zero; returns whether all are."""
    count = 0
    for i in range(place(begin), place(begin + size)):
        here = mat[i]
        small = here <= most
        mat[i] = 0.0 if small else here
        count += small
    return count == size
