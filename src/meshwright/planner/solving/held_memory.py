"""Where memory is held in a solve, and how a choice that does not fit shows where more of it must be."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.solver import ChoiceProblem
from meshwright.solver.problem.copies import Copied, EdgeKey, Route, Spans, find_routes
from meshwright.solver.problem.priced import Usage


class Priced(Protocol):
    """A problem with the memory that its choices take: a `Formulation`, or what a saved plan keeps of one."""

    @property
    def copies(self) -> Sequence[float]: ...

    @property
    def costs(self) -> Sequence[NDArray[np.float64]]: ...

    @property
    def memory(self) -> Usage: ...

    @property
    def copied(self) -> Mapping[EdgeKey, Copied]: ...

    def problem(
        self,
        times: Mapping[int, float],
        limit: float | None,
        routes: Mapping[EdgeKey, Route] = ...,
        byte_prices: Mapping[int, float] = ...,
    ) -> ChoiceProblem: ...

    def copies_made(self, choice: NDArray[np.int64]) -> Spans: ...


@dataclass(frozen=True)
class Moments:
    """The moments at which memory is held; there is no limit at any other.

    Attributes:
        reserved: Bytes kept free at each of them for what no edge copies, such as results.
        edges: Edges whose copies are held there.
    """

    reserved: Mapping[int, float] = field(default_factory=dict)
    edges: frozenset[EdgeKey] = frozenset()

    @staticmethod
    def throughout(priced: Priced) -> "Moments":
        """Every moment that may be the fullest, with all that edges copy."""
        from meshwright.solver.model.model import maximal_times

        live = [copied.live for copied in priced.copied.values()]
        begin = [priced.memory.start, *(some.start for some in live), *(some.ahead for some in live)]
        end = [priced.memory.stop, *(some.stop for some in live), *(some.stop for some in live)]
        start, stop = np.concatenate(begin), np.concatenate(end)
        moments, *_ = maximal_times(start[start < stop], stop[start < stop])
        return Moments(dict.fromkeys(moments.tolist(), 0.0), frozenset(priced.copied))

    def problem(self, priced: Priced, limit: float | None) -> tuple[ChoiceProblem, list[Route]]:
        """The problem with memory held at these moments, and the nodes that it has besides its own."""
        routes = find_routes(priced.copied, self.edges, self.reserved) if self.edges else {}
        return priced.problem(self.reserved, limit if self.reserved else None, routes), list(routes.values())

    def tightened(self, priced: Priced, choice: NDArray[np.int64], limit: float | None) -> tuple["Moments", int]:
        """These moments and those at which a choice exceeds the limit most; and the peak of that choice in bytes."""
        copies = priced.copies_made(choice)
        profile = priced.memory.profile(choice, copies)
        if limit is None or profile.peak_bytes <= limit:
            return self, profile.peak_bytes
        reserved, edges = dict(self.reserved), set(self.edges)
        for moment in peaks(profile.bytes_at, np.floor(limit)):
            made = _made_at(priced, choice, moment)
            edges |= made.keys()
            rest = copies.bytes_at(moment) - sum(made.values())
            reserved[moment] = max(reserved.get(moment, 0.0), rest if rest >= 1 else 0.0)
        if (reserved, edges) == (self.reserved, self.edges):  # all that is held fits, yet the peak does not
            reserved[profile.peak_at] += profile.peak_bytes - limit
        return Moments(reserved, frozenset(edges)), profile.peak_bytes


def _made_at(priced: Priced, choice: NDArray[np.int64], moment: int) -> dict[EdgeKey, float]:
    """The edges that copy something at a moment, and how many bytes."""
    found = {}
    for key, copied in priced.copied.items():
        made = copied.made_by(choice[key[0]], choice[key[2]])
        if made is not None and (size := made.bytes_at(moment)):
            found[key] = size
    return found


def peaks(bytes_at: NDArray[np.float64], limit: float) -> list[int]:
    """The highest moment of each stretch that is over the limit, the worst two: with more, problems are harder."""
    over = np.flatnonzero(bytes_at > limit)
    stretches = np.split(over, np.flatnonzero(np.diff(over) > 1) + 1)
    tops = sorted((int(s[np.argmax(bytes_at[s])]) for s in stretches if len(s)), key=lambda t: -bytes_at[t])
    return tops[:2]
