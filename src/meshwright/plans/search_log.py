"""The mesh views that were solved in the search for a plan, with the progress of each solve."""

from dataclasses import dataclass, field

from meshwright.schema import Amount, Count, Size


@dataclass(frozen=True, slots=True)
class Improvement:
    """One moment of a solve: the best cost and bound so far, None before there is any; its time is not saved."""

    cost: Amount | None
    lower_bound: Amount | None
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Round:
    """One solve of a mesh view.

    Attributes:
        num_held: The number of times with a memory constraint.
        status: As of `mw.solve`.
        progress: Its improvements.
        seconds: Its time; not saved, so that equal plans make equal files.
    """

    num_held: Size
    status: str
    progress: tuple[Improvement, ...]
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Considered:
    """One mesh view of the search: its cost and memory, or why it was abandoned, and the rounds of its solve."""

    shape: tuple[Count, ...]
    cost: Amount | None
    peak_bytes: Size | None
    remark: str
    rounds: tuple[Round, ...] = ()
