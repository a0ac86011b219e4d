"""The mesh views that were solved on the way to a plan, and how each solve went."""

from dataclasses import dataclass, field

from meshwright.schema import Count, Size


@dataclass(frozen=True, slots=True)
class Improvement:
    """One moment of a solve: the best cost and bound so far, None before there is any; its time is not saved."""

    cost: float | None
    lower_bound: float | None
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Round:
    """One solve of a mesh view.

    Attributes:
        num_held: At how many moments memory was held.
        status: As of `mw.solve`.
        progress: Its improvements.
        seconds: What it took; not saved, so that equal plans make equal files.
    """

    num_held: Size
    status: str
    progress: tuple[Improvement, ...]
    seconds: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Considered:
    """One mesh view that was solved on the way: its cost and memory, or why it was left; and how it was solved."""

    shape: tuple[Count, ...]
    cost: float | None
    peak_bytes: Size | None
    remark: str
    rounds: tuple[Round, ...] = ()
