"""A model without the memory that hardly matters: what small tensors take, whichever way they are split.

Half of the nodes of a planning problem hold vectors, such as biases: all their splits together change a thousandth of
the memory. Each may save a little for a little, in any combination, which is what makes such problems hard to prove.
Taken at their least, these rows are constants, and nodes without rows are folded away. What is cheapest then bounds
what is cheapest at all, and mostly fits as it is.
"""

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.model.model import Model


def coarsened(model: Model, part: float) -> Model:
    """The model with its smallest rows at their least, as far as that leaves out no more than a part of any cap."""
    least, spread, share = row_extents(
        model.off, model.rnode, model.rstart, model.rend, model.roff, model.usage, model.cap
    )
    order = np.argsort(share, kind="stable")
    kept, cap = drop_small(order, model.rstart, model.rend, least, spread, model.cap, part)
    rows = {name: getattr(model, name)[kept] for name in ("rnode", "rstart", "rend", "roff")}
    return model._replace(cap=cap, **rows)


@kernel
def row_extents(off, rnode, rstart, rend, roff, usage, cap):
    """The least of each row, how much more its most is, and that as a part of the tightest cap."""
    least, spread, share = np.empty(len(rnode)), np.empty(len(rnode)), np.zeros(len(rnode))
    for r in range(len(rnode)):
        values = usage[roff[r] : roff[r] + off[rnode[r] + 1] - off[rnode[r]]]
        least[r] = values.min()
        spread[r] = values.max() - least[r]
        for t in range(rstart[r], rend[r]):
            if spread[r] > 0.0:
                share[r] = max(share[r], spread[r] / cap[t] if cap[t] > 0.0 else np.inf)
    return least, spread, share


@kernel
def drop_small(order, rstart, rend, least, spread, cap, part):
    """Which rows are kept, of those in order, and what is left of the caps without the least of the others."""
    kept, left, dropped = np.ones(len(order), np.bool_), cap.copy(), np.zeros(len(cap))
    for r in order:
        for t in range(rstart[r], rend[r]):
            if dropped[t] + spread[r] > part * cap[t]:
                return kept, left
        kept[r] = False
        for t in range(rstart[r], rend[r]):
            dropped[t] += spread[r]
            left[t] -= least[r]
    return kept, left
