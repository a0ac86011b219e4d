"""How often a plan's `while` loops are assumed to run, and what that says of the step."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from meshwright.rules.base import AT_MOST, EXACT, GIVEN, UNKNOWN

if TYPE_CHECKING:
    from meshwright.graph import Graph
    from meshwright.plans.plan import PlanData

_NO_MATTER = 1e-3  # part of a step, of one trip of a loop of unknown length: a hundred trips are then a tenth of it


@dataclass(frozen=True)
class PlannedLoop:
    """A `while` loop of a planned program.

    Attributes:
        first, last: The range of its operations' places in the traced program, both included.
        trips: How often it is assumed to run.
        known: How that is known: exact, given, at most, or unknown.
        source: Where the user wrote it.
    """

    first: int
    last: int
    trips: float
    known: str
    source: str

    def __contains__(self, serial: int) -> bool:
        return self.first <= serial <= self.last


def loops_in(graph: "Graph") -> list[dict[str, Any]]:
    """The loops of a graph as plain data, for the provenance of its plan."""
    serial = graph.columns.serial
    ranges = ((serial[loop.start : loop.stop], loop) for loop in graph.whiles)
    found = (
        PlannedLoop(int(some.min()), int(some.max()), loop.trips, loop.known, loop.source) for some, loop in ranges
    )
    return [asdict(loop) for loop in found]


def loops_of(plan: "PlanData") -> tuple[PlannedLoop, ...]:
    """The loops of a plan; plans of earlier versions say only that there are some."""
    kept = plan.provenance.get("loops", ())
    return (
        (PlannedLoop(0, -1, 1.0, UNKNOWN, ""),) if isinstance(kept, str) else tuple(PlannedLoop(**one) for one in kept)
    )


def trips_not_stated(loops: Iterable[PlannedLoop], serial: int) -> float:
    """How many trips of an operation are counted in loops of which XLA does not state how often they run."""
    return prod(loop.trips for loop in loops if serial in loop and loop.known != EXACT)


def extremes(loops: Iterable[PlannedLoop], seconds: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """The least and the most that a step may take, relative to the planned one, if loops run less or more often.

    Args:
        loops: The loops.
        seconds: The place and the time of each operation.
    """
    times = list(seconds)
    total, least, most = sum(time for _, time in times), 1.0, 1.0
    for loop in loops if total else ():
        share = sum(time for serial, time in times if serial in loop) / total
        if loop.known == AT_MOST:
            least -= share * (1 - 1 / loop.trips)
        if loop.known == UNKNOWN and share > _NO_MATTER:
            most = float("inf")
    return max(least, 0.0), most


_SAID = {
    AT_MOST: "{trips:g} trips, the most that it takes: where it ends earlier, a step is shorter.",
    GIVEN: "{trips:g} trips, as many as it takes with the arguments that were given.",
    UNKNOWN: "one trip, since nothing tells how often it runs: a step takes as many times that as it has trips. "
    "plan.rehearse(…) with your own arrays measures it.",
}


def loop_remarks(loops: Iterable[PlannedLoop]) -> list[str]:
    """Says how often loops were assumed to run, where that is not certain; each line of the user's program once."""
    found: dict[str, None] = {}
    for loop in loops:
        where = f"The while loop at {loop.source}" if loop.source else "A while loop"
        if loop.known in _SAID:
            found[f"{where} is priced as {_SAID[loop.known].format(trips=loop.trips)}"] = None
    return list(found)
