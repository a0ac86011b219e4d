"""What the search for a plan looked at: mesh views with the progress of each solve, and other plans of the step."""

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


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan of the same step that the search did not take: what it had decided, and what came of that.

    Attributes:
        method: The method by which it was made.
        mesh: The shape of its mesh.
        microbatches, recompute: As of a plan; with stages, those of its pipeline.
        num_stages: The number of its stages; 0 without any.
        step_s: Its step, as simulated; None where no such plan fits.
        peak_bytes: Memory of a device; where no such plan fits, what one would need at least.
    """

    method: str
    mesh: tuple[Count, ...]
    microbatches: Count
    recompute: str
    num_stages: Size
    step_s: Amount | None
    peak_bytes: Size
