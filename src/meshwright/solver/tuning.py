"""Every number by which the solver is tuned: none of them can make an answer wrong, only late or less cheap.

Each entry says what it is and its unit, and in brackets what was measured where changing it made a difference.
`benchmarks/ablation.py` halves and doubles each; its figures are in `benchmarks/results/ablation.md`.
Numerical tolerances are not tuning and stay where they are used.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Options of a solve, passed from `Run` down; `TUNING` is the default."""

    # How large a model is treated how, and how much of the time each stage gets.
    giant_states: int = 20_000  # states above which a model is giant, where not all times and states are compared
    few_nodes: int = 4_000  # nodes up to which an elimination order is sought
    bisection_share: float = 0.3  # share of the time in which the least limit of an infeasible problem is sought
    extra_time: float = 1.0  # multiple of the time so far for which the search goes on once the gap suffices

    # Reductions.
    growth: float = 8.0  # how many times as large as those it replaces a new matrix may be
    most_work: int = 20_000_000  # elementary steps of one reduction or repair; a tenth of it for large models
    times_compared: int = 16  # memory times that each is compared with, and random choices that tell them apart

    # Dual ascent: message passing at prices of memory that a bundle method moves.
    price_sweeps: int = 60  # sweeps at changing prices on a whole model [halved: time × 2.3, 2 proofs lost]
    part_price_sweeps: int = 12  # the same in a subproblem, which starts from good prices
    sweeps_per_price: int = 2  # sweeps at each vector of prices [doubled: time × 1.25]
    price_reach: float = 0.03  # part of the bound by which the first change of prices is to raise it
    price_gain: float = 1e-5  # part of the bound that minima must gain; sweeps, 10 × it at first [× 10: a proof lost]
    bundle_cuts: int = 12  # latest linear pieces that the model of the bound keeps, and most exact minima
    ascent_patience: int = 5  # subgradient steps without a gain before they are shortened [1: graph S, cost × 1.013]
    minima_reach: float = 0.1  # part of the bound above it within which states take part in minima and mixes of them
    price_scales: tuple[float, ...] = (0.5, 0.8, 1.3, 2.0)  # multiples of the best prices that are tried beside them
    fan: int = 4  # most expensive memory times among which worth is moved, and most prices of other subproblems tried

    # Branch and bound.
    first_goal: float = 5e-4  # part of the bound that ten sweeps must gain, and first goals add [halved: cost × 1.0001]
    goal_growth: float = 4.0  # from the rise to one goal to the rise to the next, unless that is the incumbent's cost
    shrunk: float = 0.8  # part of the states left below which a model is reduced, ordered or eliminated again
    small_memory: float = 6e-3  # part of each cap that rows left out at first take [0: time × 1.4, a proof lost]
    split_candidates: int = 3  # nodes in a row that are tried without ruling out either half
    patience: float = 5.0  # splits that should close the gap, or as many times the rows are made [halved: time × 1.06]

    # Bucket elimination.
    rows: float = 1e6  # rows of an elimination that is likely to end, and combinations up to which one is tried
    rows_per_second: float = 3e5  # about how many are made, to stop in time
    narrow_rows: int = 64  # rows that each table keeps once all are made
    compare_cost: float = 0.003  # what comparing two rows takes of what making one does

    @property
    def trial_rows(self) -> float:
        """Rows of an elimination that is only tried, and combinations up to which one mostly ends within `rows`."""
        return self.rows / self.patience


TUNING = Tuning()
