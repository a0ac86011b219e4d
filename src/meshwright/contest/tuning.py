"""Every number by which the search for giant problems is tuned, beside those of the solver that it uses."""

from dataclasses import dataclass

from meshwright.solver.tuning import TUNING, Tuning


@dataclass(frozen=True)
class SearchTuning:
    """Options of a solve of a giant problem; `SEARCH` is the default. Entries are as those of `Tuning`."""

    solver: Tuning = TUNING  # all that the search shares with the solver of plans

    # How large a model is treated how, and how much of the time each stage gets.
    fewest_times: int = 12  # memory times up to which even a giant problem is given the usual share [0: time × 3.4]
    exact_share: float = 0.7  # share of the time for branch and bound [halved: time × 1.5, a proof lost]
    giant_exact_share: float = 0.03  # share of the time for it on giant problems [0.1: contest graph S, cost × 1.013]

    # Large-neighbourhood search.
    turn_share: float = 0.1  # share of the time for first starts, and of what is left for one turn of windows
    decimation_scale: float = 1.5  # multiple of the prices in decimation, which leaves memory to the moves that follow
    decimation_pace: tuple[float, float] = (0.005, 0.1)  # least and most part of the nodes fixed in one round
    anneal_stages: int = 20  # stages of annealing
    anneal_peak: float = 2.0  # multiple of the prices at which it begins
    root_share: float = 1 / 3  # part of the nodes around which trees are moved in one stage
    least_roots: int = 50  # least number of them
    window_nodes: tuple[int, int] = (4, 1500)  # least and most nodes of a window
    window_steps: tuple[float, float] = (1.02, 0.93)  # how its size follows what was solved and what was not
    tree_nodes: tuple[int, int] = (10, 40)  # least and most nodes of a tree move


SEARCH = SearchTuning()
