"""Memory over time under a plan's choice, by the role of the values."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats
from meshwright.plans.records.record import MEMORY_ROLES, Problem

_COPIES = MEMORY_ROLES.index("copies")


@dataclass(frozen=True)
class MemoryOverTime:
    """Bytes on one device.

    Attributes:
        at: Operation indices.
        by_role: Bytes at each of them, ``[role, moment]``, roles as in `MEMORY_ROLES`.
    """

    at: NDArray[np.int64]
    by_role: Floats

    @property
    def total(self) -> Floats:
        return self.by_role.sum(axis=0)

    def thinned(self, most: int) -> "MemoryOverTime":
        """At most ``most`` moments: the peak of each interval of time, so that no peak is lost."""
        count = len(self.at)
        if count <= most:
            return self
        edges = np.linspace(0, count, most + 1).astype(np.int64)
        total = self.total
        kept = np.array([a + int(np.argmax(total[a:b])) for a, b in pairwise(edges.tolist())])
        return MemoryOverTime(self.at[kept], self.by_role[:, kept])


def memory_over_time(problem: Problem) -> MemoryOverTime:
    """Bytes at every operation of the program."""
    usage, choice = problem.memory, problem.choice
    change = np.zeros((len(MEMORY_ROLES), problem.num_steps + 1))
    chosen = [size[choice[c]] for c, size in zip(usage.column_class, usage.column_bytes, strict=True)]
    if chosen:
        size = usage.share * np.array(chosen)[usage.column]
        role = np.array(problem.role, np.int64)[usage.column]
        np.add.at(change, (role, usage.start), size)
        np.add.at(change, (role, usage.stop), -size)
    change[_COPIES] += problem.copies_made(choice).change(problem.num_steps)
    return MemoryOverTime(np.arange(problem.num_steps), np.cumsum(change, axis=1)[:, :-1])
