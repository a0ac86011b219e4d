"""The prices of a group: shardings, seconds and bytes for each of its strategies."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats
from meshwright.cost.load import Load
from meshwright.solver.problem.priced import joined_s
from meshwright.strategy.candidates import Assignment, Candidates
from meshwright.strategy.sharding import Codes

SETTLING = ("activation", "gradient")  # purposes of the collectives that settle sums


@dataclass(frozen=True, slots=True)
class Event:
    """Communication of one member of a group under a chosen strategy."""

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    seconds: float  # of all trips together
    member: int
    purpose: str
    trips: float


@dataclass(slots=True)
class GroupTable:
    """All strategies of one group.

    Attributes:
        candidates: The leader's strategies; None if an argument leads.
        codes: Sharding of each of the group's values, by position.
        needs: Sharding in which each slot's value is needed.
        duplicate: Whether a slot's resharding is already priced at an earlier slot of the same value.
        offers: If the group's sum may join another one, a number for its shardings before and after it is settled, 0 if
            it needs no settling; None if it may not join.
        settling: The cost of settling that sum separately.
        takes: For slots at which another sum may join the group's own, the same number for this one.
        compute: Seconds of compute.
        communication: Seconds of collectives inside the group.
        gradients: Those of them that reduce gradients.
        sent: The same by kind and axes; resharding inside the group is listed without axes.
        transient: ``(member, bytes)`` of operands that are computed for one operation only.
        assignments: For each member, which loop each axis splits.
        events: The collectives, one by one; recorded only if the table has a single strategy.
        loads: Each member's work on one device; recorded under the same condition.
        items: ``(member, purpose, seconds)``: the parts of `compute` (purpose ``compute``) and of `communication`;
            recorded only if the pricer itemises.
    """

    candidates: Candidates | None
    codes: list[Codes]
    needs: list[Codes] = field(default_factory=list)
    duplicate: list[NDArray[np.bool_]] = field(default_factory=list)
    offers: Codes | None = None
    settling: Floats = field(default_factory=lambda: np.zeros(0))
    takes: dict[int, Codes] = field(default_factory=dict)
    compute: Floats = field(default_factory=lambda: np.zeros(0))
    communication: Floats = field(default_factory=lambda: np.zeros(0))
    gradients: Floats = field(default_factory=lambda: np.zeros(0))
    sent: dict[tuple[str, tuple[int, ...]], Floats] = field(default_factory=dict)
    transient: list[tuple[int, Floats]] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    items: list[tuple[int, str, Floats]] = field(default_factory=list)

    def select(self, keep: NDArray[np.bool_] | NDArray[np.int64]) -> None:
        """Keeps only some of the strategies."""
        if self.candidates is not None:
            self.candidates = Candidates(self.candidates.loops[keep], self.candidates.scatter[keep])
        self.codes = [c[keep] for c in self.codes]
        self.needs = [c[keep] for c in self.needs]
        self.duplicate = [d[keep] for d in self.duplicate]
        if self.offers is not None:
            self.offers, self.settling = self.offers[keep], self.settling[keep]
        self.takes = {slot: held[keep] for slot, held in self.takes.items()}
        self.compute, self.communication = self.compute[keep], self.communication[keep]
        self.gradients = self.gradients[keep]
        self.sent = {key: seconds[keep] for key, seconds in self.sent.items()}
        self.transient = [(i, b[keep]) for i, b in self.transient]
        self.assignments = [a[keep] for a in self.assignments]
        self.items = [(i, purpose, seconds[keep]) for i, purpose, seconds in self.items]

    def joined_s(self, reader: "GroupTable", slot: int) -> Floats | None:
        """Seconds saved if this group's sum joins a reader's at a slot, by strategies of both groups."""
        takes = reader.takes.get(slot)
        return None if takes is None or self.offers is None else joined_s(self.offers, self.settling, takes)
