"""Solves choice problems: one strategy per node, least total cost, memory under the limit at every time.

The problem, in the contest's form, with `x[i]` the strategy of node `i`:

    minimise    Σ_i cost_i[x_i]  +  Σ_(i,j) matrix_ij[x_i, x_j]                 (check.price)
    such that   Σ_(rows r alive at t) usage_r[x_node(r)]  ≤  limit   for all t

The flow: `problem.py` holds the arrays, `model.py` compresses time, `reductions/` shrink it exactly, `dual.py` bounds
it, `closing.py` closes small problems by the searches of `exact.py`, `search.py` searches giant ones, `pipeline.py`
ties them together, and `check.py` re-prices every answer without sharing code with any of them. Importing this package
loads no numba.
"""

from typing import Any

from meshwright import lazy

_PUBLIC = {
    "ChoiceProblem": "problem",
    "Progress": "solution",
    "Solution": "solution",
    "Status": "solution",
    "lower_bound": "bounds",
    "price": "check",
    "solve": "driver",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _PUBLIC, name)
