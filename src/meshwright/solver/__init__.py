"""Solves choice problems: one strategy per node, least total cost, memory under the limit at every time.

The problem, in the contest's form, with `x[i]` the strategy of node `i`:

    minimise    Σ_i cost_i[x_i]  +  Σ_(i,j) matrix_ij[x_i, x_j]           (problem/check.py)
    such that   Σ_(rows r alive at t) usage_r[x_node(r)]  ≤  limit   for all t

The flow: `problem/` holds the arrays, `model/` compresses time, `reductions/` shrink it exactly, `bounds/` raises a
lower bound, `exact/` closes the problem by bucket elimination and branch and bound, `run.py` ties them together, and
`problem/check.py` prices every answer again without sharing code with any of them. The search for giant problems stands
above, in `meshwright.contest`. Importing this package loads no numba.
"""

from typing import Any

from meshwright import lazy

_PUBLIC = {
    "ChoiceProblem": "problem.problem",
    "Progress": "problem.solution",
    "Solution": "problem.solution",
    "Status": "problem.solution",
    "lower_bound": "bounds.lower_bound",
    "price": "problem.check",
    "solve": "driver",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _PUBLIC, name)
