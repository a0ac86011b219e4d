"""The time that planning may take: one clock, which every phase reads.

Where the user says how many seconds, they hold for all of planning, tracing included. Where not, everything up to the
best choice without a memory limit takes the time it needs, and bringing that under the limit a few times as long: on
toys a few seconds, on models that take long to price more.
"""

from collections.abc import Callable

import numpy as np

from meshwright.jit import clock as jit_clock
from meshwright.planner.solving.tuning import VIEW_TUNING, ViewTuning
from meshwright.solver.deadline import Deadline


class Budget:
    """Seconds that are left.

    Args:
        seconds: What all of planning may take; None for a limit on what memory may take, once that is known to matter.
        clock: Tells the time in seconds.
        tuning: Options.
    """

    def __init__(
        self,
        seconds: float | None = None,
        clock: Callable[[], float] = jit_clock,
        tuning: ViewTuning = VIEW_TUNING,
    ):
        self.seconds, self.tuning = seconds, tuning
        self._end = Deadline(clock=clock) if seconds is None else Deadline.after(seconds, clock)

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._end.left

    @property
    def now(self) -> float:
        """What the clock says, in seconds."""
        return self._end.now

    @property
    def is_over(self) -> bool:
        return self.left <= 0.0

    @property
    def is_for_solving(self) -> bool:
        """Whether so much of the given seconds is spent that the rest is needed to solve what is priced."""
        return self.seconds is not None and self.left <= (1.0 - self.tuning.pricing_share) * self.seconds

    @property
    def deadline(self) -> Deadline:
        """The end, by the solver's clock."""
        return Deadline.after(self.left)

    def hold_memory(self, spent: float) -> None:
        """Limits what memory may take, unless seconds were given or that was done, by what was spent without it."""
        if self._end.at == np.inf:
            self._end = Deadline.after(max(self.tuning.memory_s, self.tuning.harder * spent), self._end.clock)

    def of_one_solve(self, seconds: float) -> float:
        """Seconds of a solve that would take so many."""
        return max(min(seconds, self.left), self.tuning.shortest_s)

    def part(self, share: float) -> "Budget":
        """A budget that ends with a share of the seconds that are left."""
        return Budget(share * self.left if np.isfinite(self.left) else None, self._end.clock, self.tuning)
