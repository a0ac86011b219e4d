"""The time that planning may take: one clock, which every phase reads.

Where the user says how many seconds, they hold for all of planning, tracing included. Where not, everything up to the
best choice without a memory limit takes the time it needs, and bringing that under the limit a few times as long: on
toys a few seconds, on models that take long to price more.
"""

from collections.abc import Callable

import numpy as np

from meshwright.jit import clock as jit_clock

_LEAST_S = 6.0  # to bring a problem under its limit: toys are mostly solved to the end in a tenth of it
_HARDER = 4.0  # how many times as long as pricing and solving without memory that may take where it is longer
_SHORTEST_S = 0.5  # of one solve, in which it finds a choice even where all the time is spent
_PRICING = 0.5  # the part of given seconds after which no further mesh view is priced


class Budget:
    """Seconds that are left.

    Args:
        seconds: What all of planning may take; None for a limit on what memory may take, once that is known to matter.
        clock: Tells the time in seconds.
    """

    def __init__(self, seconds: float | None = None, clock: Callable[[], float] = jit_clock):
        self.seconds = seconds
        self._clock, self._begun = clock, clock()
        self._deadline = np.inf if seconds is None else self._begun + seconds

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return max(0.0, self._deadline - self._clock())

    @property
    def is_over(self) -> bool:
        return self.left <= 0.0

    @property
    def is_for_solving(self) -> bool:
        """Whether so much of the given seconds is spent that the rest is needed to solve what is priced."""
        return self.seconds is not None and self.left <= (1.0 - _PRICING) * self.seconds

    @property
    def deadline(self) -> float:
        """`jit.clock()` at the end."""
        return jit_clock() + self.left

    def hold_memory(self, spent: float) -> None:
        """Limits what memory may take, unless seconds were given or that was done, by what was spent without it."""
        if self._deadline == np.inf:
            self._deadline = self._clock() + max(_LEAST_S, _HARDER * spent)

    def of_one_solve(self, seconds: float) -> float:
        """Seconds of a solve that would take so many."""
        return max(min(seconds, self.left), _SHORTEST_S)

    def part(self, share: float) -> "Budget":
        """A budget that ends with a share of the seconds that are left."""
        return Budget(share * self.left if np.isfinite(self.left) else None, self._clock)
