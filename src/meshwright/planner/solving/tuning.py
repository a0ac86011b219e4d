"""Every number by which the search over mesh views is tuned: when a view is solved well enough, and for how long."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ViewTuning:
    """Options of a search over views.

    Problems in tight memory may take long to close the last percent, far below what the costs themselves are worth. A
    solve whose seconds are over is accepted where it is proven, or where its gap is at most that of its allowance; else
    it gets the next allowance.
    """

    allowances: tuple[tuple[float, float], ...] = (
        (1.0, 1e-2),
        (3.0, 5e-2),
        (20.0, 5e-2),
        (20.0, 5e-2),
    )  # each in seconds, with its gap; those as long as the last also serve problems without a limit
    harder: float = 4.0  # multiple of the time without memory that may be spent with it, where that is longer
    near_gap: float = 2e-2  # gap that suffices on the way to a choice that fits; that of the last allowance, after each
    good_gap: float = 7.5e-3  # gap that suffices at the end: further solving mostly gains less than a thousandth
    still_found: float = 0.25  # part of such a gap that choices mostly gain when they are solved to the end
    max_rounds: int = 24  # solves of one view, and of the problem of least memory
    small: int = 200_000  # strategies times operations up to which memory is held at all moments at once
    memory_s: float = 6.0  # least seconds for memory where the user gave none
    shortest_s: float = 0.5  # least seconds of one solve, in which it finds a choice
    # Pricing is followed by solving, small problems with layers tied by the same without ties, and the first solve of a
    # view that is nearly solved by a last one.
    phase_share: float = 0.5  # share of the time (for a last solve, of its allowance) that the first of two phases gets


VIEW_TUNING = ViewTuning()
