"""The time that planning may take: one clock, which every phase reads.

If the user gives a number of seconds, it limits all of planning, tracing included. Otherwise everything up to the best
choice without a memory limit takes the time it needs, and the search for a choice under the limit may take a few times
as long: a few seconds on toys, more on models that take long to price.
"""

from collections.abc import Callable

import numpy as np

from meshwright.jit import clock as jit_clock
from meshwright.planner.solving.tuning import VIEW_TUNING, ViewTuning
from meshwright.solver.deadline import Deadline


class Budget:
    """Seconds that are left.

    Args:
        seconds: The limit on all of planning; None limits only the search under the memory limit, if there is one.
        clock: Returns the time in seconds.
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
        """The time of the clock, in seconds."""
        return self._end.now

    @property
    def is_over(self) -> bool:
        return self.left <= 0.0

    @property
    def is_for_solving(self) -> bool:
        """Whether so much of the given seconds is spent that the rest is needed to solve the views priced so far."""
        return self.seconds is not None and self.left <= (1.0 - self.tuning.phase_share) * self.seconds

    @property
    def deadline(self) -> Deadline:
        """The end, by the solver's clock."""
        return Deadline.after(self.left)

    def hold_memory(self, spent: float) -> None:
        """Limits the search under the memory limit by the time spent without it, unless a limit is set already."""
        if self._end.at == np.inf:
            self._end = Deadline.after(max(self.tuning.memory_s, self.tuning.harder * spent), self._end.clock)

    def of_another_program(self) -> "Budget":
        """The budget of one more program, such as one of more microbatches: only seconds that are given are shared."""
        return Budget(None, self._end.clock, self.tuning) if self.seconds is None else self

    def of_one_solve(self, seconds: float) -> float:
        """The seconds that a solve may take, given how many it would take."""
        return max(min(seconds, self.left), self.tuning.shortest_s)

    def part(self, share: float) -> "Budget":
        """A budget that ends with a share of the seconds that are left."""
        return Budget(share * self.left if np.isfinite(self.left) else None, self._end.clock, self.tuning)
