"""Large-neighbourhood search: frees a window of a choice, solves it exactly under the memory that is left, repeats."""

import numpy as np

from meshwright.solver import sweeps
from meshwright.solver.dual import Dual, carried
from meshwright.solver.exact import Closer
from meshwright.solver.links import Links, link
from meshwright.solver.model import Model
from meshwright.solver.order import decision_order, permuted
from meshwright.solver.reductions.reduce import reduce_model
from meshwright.solver.reductions.times import tighten_times
from meshwright.solver.state import State, cost_of, load_of
from meshwright.solver.window import cut_window, grow_window, index_rows

_LEAST, _MOST = 4, 1500  # nodes of a window
_LAZY_ROUNDS = 4


class Neighbourhood:
    """Improves choices of one model window by window.

    Attributes:
        size: Nodes of the next window; grows while windows are solved completely, shrinks otherwise.
        prices: Prices of memory that guide the search inside windows.
        share: Part of the memory's price that counts as cost: windows then free memory that others can use.
        active: Times at which windows hold to the caps; others are checked afterwards.
    """

    def __init__(self, model: Model, prices: np.ndarray, tolerance: float, seed: int, links: Links | None = None):
        self.model = model
        self.links = link(model) if links is None else links
        self.rows = index_rows(model)
        self.prices = prices
        self.tolerance = tolerance
        self.rng = np.random.default_rng(seed)
        self.size = 12.0
        self.weights: np.ndarray | None = None
        self.tried = 0
        self.share = 0.0
        self.active = prices > 0

    def step(self, state: State, deadline: float) -> bool:
        """Frees one window; puts the better choice into the state and returns True if there is one.

        Memory is held to at the active times only; a choice that breaks another time makes it active, and the window is
        solved again.
        """
        nodes = self._window()
        self.tried += 1
        for _ in range(_LAZY_ROUNDS):
            window = cut_window(self.model, self.links, self.rows, nodes, state.choice, state.load, self.active)
            window = self._charged(window)
            found, complete = self._solve(window, cost_of(window, state.choice[nodes]), deadline)
            if found is None:
                break
            choice = state.choice.copy()
            choice[nodes] = found
            load = load_of(self.model, choice)
            broken = load > self.model.cap * (1 + 1e-12)
            if not broken.any():
                break
            self.active |= broken
            found = None
        self.size = min(max(self.size * (1.02 if complete else 0.93), _LEAST), _MOST)
        if found is None:
            return False
        cost = cost_of(self.model, choice)
        gain = state.cost - cost + self.share * float(self.prices @ (state.load - load))
        if not gain > 0.1 * self.tolerance:
            return False
        state.choice, state.cost, state.load = choice, cost, load
        return True

    def _charged(self, window: Model) -> Model:
        """The window with `share` of the memory's price added to the costs."""
        if self.share == 0.0:
            return window
        cost = np.empty(len(window.cost))
        rates = self.share * self.prices[self.active]
        sweeps.priced(
            window.off, window.cost, window.rnode, window.rstart, window.rend, window.roff, window.usage, rates, cost
        )
        return window._replace(cost=cost)

    def _window(self) -> np.ndarray:
        """One random connected part, or several: parts that share memory can only improve together."""
        parts = int(self.rng.choice([1, 1, 2, 3]))
        most = max(_LEAST, int(self.size * self.rng.uniform(0.5, 1.3)) // parts)
        chosen = np.zeros(0, dtype=np.int64)
        root = self._root()
        for _ in range(parts):
            seed = int(self.rng.integers(1 << 30))
            grown = grow_window(self.links.hoff, self.links.far, root, most, 40 * most, self.model.off, seed)
            chosen = np.union1d(chosen, grown)
            far = int(self.rng.normal(0, 300)) if self.model.num_nodes > 1000 else int(self.rng.integers(1 << 30))
            root = (root + far) % self.model.num_nodes
        return chosen

    def _root(self) -> int:
        if self.weights is not None and self.rng.random() < 0.5:
            return int(np.searchsorted(self.weights, self.rng.random() * self.weights[-1]))
        return int(self.rng.integers(self.model.num_nodes))

    def _solve(self, window: Model, now: float, deadline: float) -> tuple[np.ndarray | None, bool]:
        """The best states of a window below its present cost, or None; and whether the search was complete."""
        reduced = reduce_model(window, deadline=deadline)
        if reduced.infeasible:  # only by rounding: the present states fit
            return None, True
        if reduced.model.num_nodes == 0:
            if reduced.offset < now - self.tolerance:
                return reduced.way_back.expand(np.zeros(0, dtype=np.int64)), True
            return None, True
        model = tighten_times(reduced.model)
        order = decision_order(model)
        dual = Dual(permuted(model, order), prices=(1.0 - self.share) * carried(self.prices, self.model, model))
        target = now - reduced.offset
        dual.converge(11, 1e-4, deadline)
        if dual.bound >= target - self.tolerance:
            return None, True
        width = max(60, min(500, 50_000 // (len(model.cap) + 1)))
        closer = Closer(self.tolerance, deadline, effort=np.inf, width=width, splits=False)
        found = closer.attempt(dual, target)
        complete = found.bound >= min(target, found.cost) - self.tolerance
        if found.choice is None or found.cost >= target - 0.1 * self.tolerance:
            return None, complete
        choice = np.empty(len(order), dtype=np.int64)
        choice[order] = found.choice
        return reduced.way_back.expand(choice), complete

    def aim(self, reduced_costs: np.ndarray, choice: np.ndarray) -> None:
        """Begins half of the windows where the present states look dear to the dual."""
        regret = reduced_costs[self.model.off[:-1] + choice]
        self.weights = np.cumsum(regret + 1e-3 * max(float(regret.max(initial=0.0)), 1e-300))
