"""What a solve returns: a status with its sentence, the choice, its cost, and the bound that certifies it."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from meshwright.solver.problem.gap import relative_gap

_SENTENCES = {
    "optimal": "No choice that fits the memory limit is cheaper.",
    "feasible": "The choice fits the memory limit; a cheaper one may exist, down to the lower bound.",
    "infeasible": "No choice fits the memory limit and the impossible pairs.",
    "no_solution_found": "The time ran out before a choice that fits the memory limit was found.",
}


class Status(StrEnum):
    """How a solve ended; `sentence` says it in words."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    NO_SOLUTION_FOUND = "no_solution_found"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self.value]


@dataclass(frozen=True)
class Progress:
    """One moment of a solve: the best cost (inf before the first), the bound, and the memory of the best choice."""

    seconds: float
    cost: float
    lower_bound: float
    peak_usage: float

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.lower_bound)


@dataclass(frozen=True, eq=False)
class Solution:
    """The end of a solve.

    Attributes:
        status: optimal, feasible, infeasible or no_solution_found.
        choice: The strategy of every node; None where none was found.
        cost: Total cost of the choice; inf where none was found.
        lower_bound: No feasible choice costs less than this.
        gap: (cost - lower_bound) / |lower_bound|; see `relative_gap`.
        peak_usage: The most memory in use at any time under the choice.
        least_limit: For infeasible problems, the least limit that suffices, or a lower bound on it; None otherwise,
            and also where impossible pairs alone rule out every choice.
        seconds: Wall-clock time the solve took.
        history: Progress of the search, one entry per improvement.

    Examples:
        >>> import meshwright as mw
        >>> found = mw.solve(mw.ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])]))
        >>> str(found.status), found.cost, found.lower_bound, found.gap
        ('optimal', 2.0, 2.0, 0.0)
    """

    status: Status
    choice: np.ndarray | None
    cost: float
    lower_bound: float
    peak_usage: float
    least_limit: float | None = None
    seconds: float = 0.0
    history: tuple[Progress, ...] = field(default=(), repr=False)

    @property
    def gap(self) -> float:
        return relative_gap(self.cost, self.lower_bound)
