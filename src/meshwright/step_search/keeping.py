"""What each kind of layer keeps, all kinds chosen at once: the least work that a number of bytes allows.

Each layer of a kind takes one of its choices (`layer_kinds.py`). How many layers take which is a small whole-number
programme: least seconds, under one limit on the bytes that all layers keep together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from meshwright.runtime.recomputation.policies import LEVELS, Part, worded
from meshwright.step_search.layer_kinds import Choice, LayerKind


@dataclass(frozen=True)
class Kept:
    """What all layers keep.

    Attributes:
        policy: The policy, in the words of `runtime.recomputation.policies`.
        num_bytes: Bytes that a device keeps for the backward pass of the whole batch.
        seconds: Time in which it computes the rest again.
    """

    policy: str
    num_bytes: float
    seconds: float


class Keeping:
    """The choices of all kinds of layers.

    Args:
        kinds: The kinds, in the order in which a policy names them.
    """

    def __init__(self, kinds: Sequence[LayerKind]):
        self.counts = [kind.count for kind in kinds]
        self.choices = [kind.choices() for kind in kinds]

    @property
    def uniform(self) -> list[Kept]:
        """The policies by which all layers are at one level that has a name."""
        return [
            self._kept([[count if one.level == level else 0 for one in row] for count, row in self._rows()])
            for level in LEVELS
            if all(any(one.level == level for one in row) for row in self.choices)
        ]

    @property
    def everything(self) -> Kept:
        """What is kept without recomputation."""
        return self.uniform[0]

    def within(self, num_bytes: float) -> Kept | None:
        """The least work that some bytes allow; None where they do not allow the least memory."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        flat = [one for row in self.choices for one in row]
        owner = np.repeat(np.arange(len(self.choices)), list(map(len, self.choices)))
        one_each = LinearConstraint(owner == np.arange(len(self.choices))[:, None], self.counts, self.counts)
        size, seconds = (np.array([getattr(one, what) for one in flat]) for what in ("num_bytes", "seconds"))
        room = LinearConstraint(
            size[None] / max(size.max(initial=0.0), 1.0), ub=num_bytes / max(size.max(initial=0.0), 1.0)
        )
        scale = seconds.max(initial=0.0) or 1.0
        found = milp(
            seconds / scale, constraints=[one_each, room], integrality=np.ones(len(flat)), bounds=Bounds(0, np.inf)
        )
        if found.x is None:
            return None
        return self._kept([np.round(found.x[owner == kind]).astype(int).tolist() for kind in range(len(self.choices))])

    def _rows(self) -> list[tuple[int, list[Choice]]]:
        return list(zip(self.counts, self.choices, strict=True))

    def _kept(self, taken: Sequence[Sequence[int]]) -> Kept:
        """What is kept where so many layers of each kind take each choice."""
        pairs = [
            (n, one)
            for numbers, row in zip(taken, self.choices, strict=True)
            for n, one in zip(numbers, row, strict=True)
        ]
        policy = [
            [Part(one.level, Fraction(n, count)) for n, one in zip(numbers, row, strict=True) if n]
            for numbers, (count, row) in zip(taken, self._rows(), strict=True)
        ]
        return Kept(
            worded(policy), sum(n * one.num_bytes for n, one in pairs), sum(n * one.seconds for n, one in pairs)
        )
