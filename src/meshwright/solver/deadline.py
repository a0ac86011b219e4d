"""The clock of a solve: the moment at which it stops, read here and nowhere else in the solver."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from meshwright.jit import clock as jit_clock


@dataclass(frozen=True)
class Deadline:
    """A moment at which to stop, and the clock that tells whether it has come.

    Attributes:
        at: The moment, in seconds of the clock; infinite for no limit.
        clock: Tells the time in seconds; the default stands still while kernels are compiled.
    """

    at: float = np.inf
    clock: Callable[[], float] = jit_clock

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = jit_clock) -> "Deadline":
        """The moment that comes after so many seconds."""
        return cls(clock() + seconds, clock)

    @property
    def now(self) -> float:
        return self.clock()

    @property
    def left(self) -> float:
        """Seconds until the end, at least 0."""
        return max(0.0, self.at - self.clock())

    @property
    def is_over(self) -> bool:
        return self.clock() > self.at

    def within(self, seconds: float) -> "Deadline":
        """This moment, or the one after so many seconds where that comes first."""
        return replace(self, at=min(self.at, self.clock() + seconds))

    def part(self, share: float, least: float = 0.0) -> "Deadline":
        """The moment at which a share of the time that is left, or at least so many seconds of it, is spent."""
        now = self.clock()
        return replace(self, at=min(self.at, now + max(least, share * (self.at - now)))) if self.at > now else self


NEVER = Deadline()
