"""Moves of the local search: each frees some nodes of a choice and finds them better states while the others stay."""

import numpy as np

from meshwright.contest.tree_moves import Trees
from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.contest.windows import cut_window, grow_window, index_rows
from meshwright.solver.bounds import message_passing
from meshwright.solver.bounds.dual import Dual, ascend_prices, carried
from meshwright.solver.deadline import Deadline
from meshwright.solver.exact.branch_and_bound import BranchAndBound, Options
from meshwright.solver.model.decision_order import decision_order, permuted
from meshwright.solver.model.half_edges import Links, link
from meshwright.solver.model.model import Model, State, cost_of, load_of
from meshwright.solver.reductions.reduce import reduce_model
from meshwright.solver.reductions.times import tighten_times, with_times


class Neighbourhood:
    """Improves choices of one model move by move.

    Annealing makes tree moves, which are fast and local, into another choice that is about as good; a mix keeps the
    parts of it that are better. Windows are freed and solved by bucket elimination, exactly where they are small
    enough: memory that one of their parts frees can serve another.

    Attributes:
        prices: Prices of memory that guide the search.
        share: Part of the memory's price that counts as cost in windows: they then free memory that others can use.
        active: Times at which moves hold to the caps; others are checked afterwards.
        timed: Whether single moves are held to the clock; what is to be repeatable must not be.
        size: Nodes of the next window.
    """

    def __init__(
        self,
        model: Model,
        tolerance: float,
        seed: int,
        links: Links | None = None,
        timed: bool = True,
        tuning: SearchTuning = SEARCH,
    ):
        self.model, self.tuning = model, tuning
        self.links = link(model) if links is None else links
        self.rows = index_rows(model)
        self.tolerance = tolerance
        self.rng = np.random.default_rng(seed)
        self.timed = timed
        self.weights: np.ndarray | None = None
        self.share = 0.0
        self.size = 12.0
        self.active = np.zeros(len(model.cap), dtype=bool)
        self.charge(np.zeros(len(model.cap)))

    def charge(self, prices: np.ndarray) -> None:
        """Sets the prices of memory."""
        self.prices = prices.copy()
        self.share = 0.0
        self.active |= prices > 0
        self.focus, self.trees = self._focused()

    def step(self, state: State, deadline: Deadline) -> bool:
        """Solves one window; puts the better choice into the state and returns True if there is one."""
        before = self._value(state)
        found, fit = self._solved_window(state, self._window(), None, deadline)
        # About one window in five may be too large to be solved exactly.
        (up, down), (least, most) = self.tuning.window_steps, self.tuning.window_nodes
        self.size = min(max(self.size * (up if fit else down), least), most)
        if found is not None:
            self._take(state, found)
        gain = before - self._value(state)
        return gain > 0.1 * self.tolerance

    def anneal(self, choice: np.ndarray) -> np.ndarray:
        """Tree moves around nodes drawn at random, with memory expensive at first, then cheaper and cheaper.

        So memory is freed and then goes first to where it saves most. The result may cost more than the original
        choice, and may break the caps at times that were not active; they are from then on.
        """
        focus, choice, tuning = self.focus, choice.copy(), self.tuning
        spent = _priced(focus, self.prices[self.active]) - focus.cost
        for share in np.linspace(tuning.anneal_peak, 0.0, tuning.anneal_stages) if spent.any() else (0.0,):
            num_roots = max(tuning.least_roots, int(tuning.root_share * self.model.num_nodes))
            roots = self.rng.choice(self.model.num_nodes, num_roots)
            self.trees.move(
                choice, load_of(focus, choice), focus.cost + share * spent, roots, int(self.rng.integers(1 << 30))
            )
        self._broken(load_of(self.model, choice))
        return choice

    def mix(self, state: State, other: np.ndarray, deadline: Deadline) -> bool:
        """Takes each node's state from either choice so that all is cheapest; returns whether that improved the state.

        The parts in which two choices differ meet only in memory: what is left after reductions is small.
        """
        before, second = state.cost, State.of(self.model, other)
        if second.cost < before and second.fits(self.model):
            other, state.choice, state.cost, state.load = state.choice, other, second.cost, second.load
        nodes = np.flatnonzero(state.choice != other)
        if len(nodes):
            alive = np.zeros(len(self.model.cost), dtype=np.uint8)
            for choice in (state.choice, other):
                alive[self.model.off[nodes] + choice[nodes]] = 1
            alive = alive[np.repeat(state.choice != other, np.diff(self.model.off))]
            self.share = 0.0
            found, _ = self._solved_window(state, nodes, alive, deadline)
            if found is not None:
                self._take(state, found)
        return before - state.cost > 0.1 * self.tolerance

    def _focused(self) -> tuple[Model, Trees]:
        """The model at the active times alone, and the tree moves on it."""
        focus = with_times(self.model, self.active)
        return focus, Trees(focus, self.links, self.tuning)

    def _broken(self, load: np.ndarray) -> bool:
        """Whether a load breaks caps; where it does, the worst of every stretch of such times becomes active."""
        excess = load - self.model.cap * (1 + 1e-12)
        ends = np.flatnonzero(np.diff(np.concatenate([[False], excess > 0, [False]]).astype(np.int8)))
        for first, end in zip(ends[::2], ends[1::2], strict=True):
            self.active[first + int(np.argmax(excess[first:end]))] = True
        if len(ends):
            self.focus, self.trees = self._focused()
        return len(ends) > 0

    def _value(self, state: State) -> float:
        """Its cost and the share of its memory's price."""
        return state.cost + self.share * float(self.prices @ state.load)

    def _take(self, state: State, found: State) -> None:
        """Puts what was found into the state unless it is worse."""
        if found.fits(self.model) and self._value(found) <= self._value(state):
            state.choice, state.cost, state.load = found.choice, found.cost, found.load

    def _solved_window(
        self, state: State, nodes: np.ndarray, alive: np.ndarray | None, deadline: Deadline
    ) -> tuple[State | None, bool]:
        """Frees some nodes, or those of their states that are alive, and solves them under the memory that is left.

        Returns a better state, or None, and whether the search was complete. Memory is held to at the active times
        only; a choice that breaks another time makes it active, and the window is solved again.
        """
        complete = True
        if self.timed:  # no window may take all that is left of the time
            deadline = deadline.part(0.02, least=1.0)
        for _ in range(len(self.model.cap) + 1):  # another time becomes active in each but the last
            window = cut_window(self.model, self.links, self.rows, nodes, state.choice, state.load, self.active)
            if self.share > 0.0:
                window = window._replace(cost=_priced(window, self.share * self.prices[self.active]))
            found, complete = self._solve(window, alive, cost_of(window, state.choice[nodes]), deadline)
            if found is None:
                break
            choice = state.choice.copy()
            choice[nodes] = found
            load = load_of(self.model, choice)
            if not self._broken(load):
                return State(choice, cost_of(self.model, choice), load), complete
        return None, complete

    def _window(self) -> np.ndarray:
        """One random connected part, or several: parts that share memory can only improve together."""
        parts = int(self.rng.choice([1, 1, 2, 3]))
        return self._grown(int(self.size * self.rng.uniform(0.5, 1.3)) // parts, parts)

    def _grown(self, most: int, parts: int) -> np.ndarray:
        """Some random connected parts of up to so many nodes each, not too far from one another."""
        most, chosen = max(self.tuning.window_nodes[0], most), np.zeros(0, dtype=np.int64)
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

    def _solve(
        self, window: Model, alive: np.ndarray | None, now: float, deadline: Deadline
    ) -> tuple[np.ndarray | None, bool]:
        """States of a window below its present cost, or None; and whether the search was complete."""
        reduced = reduce_model(window, alive, deadline=deadline)
        if reduced.infeasible:  # only by rounding: the present states fit
            return None, True
        if reduced.model.num_nodes == 0:
            if reduced.offset < now - self.tolerance:
                return reduced.way_back.expand(np.zeros(0, dtype=np.int64)), True
            return None, True
        model = tighten_times(reduced.model, self.tuning.solver)
        prices = (1.0 - self.share) * carried(self.prices, self.model.when, model.when)
        target = now - reduced.offset
        choice, complete = self._search(model, prices, target, alive is not None, deadline)
        if choice is None or not cost_of(model, choice) < target - 0.1 * self.tolerance:
            return None, complete
        return reduced.way_back.expand(choice), complete

    def _search(self, model: Model, prices: np.ndarray, target: float, thorough: bool, deadline: Deadline):
        """Bucket elimination; with splits where every node has few states, so that it has a chance to be complete."""
        order = decision_order(model)
        dual = Dual(permuted(model, order), prices=prices)
        dual.converge(11, 1e-4, deadline)
        if dual.bound >= target - self.tolerance:
            return None, True
        if thorough:
            ascend_prices(dual, target, 30, deadline, 0.2, self.tuning.solver)
        options = Options(self.tolerance, self.tuning.solver, splits=thorough and self.timed)
        found = BranchAndBound(options, deadline).best_first(dual, target)
        complete = found.bound >= min(target, found.cost) - self.tolerance
        if found.choice is None:
            return None, complete
        choice = np.empty(len(order), dtype=np.int64)
        choice[order] = found.choice
        return choice, complete

    def aim(self, reduced_costs: np.ndarray, choice: np.ndarray) -> None:
        """Begins half of the windows where the present states look expensive to the dual."""
        regret = reduced_costs[self.model.off[:-1] + choice]
        self.weights = np.cumsum(regret + 1e-3 * max(float(regret.max(initial=0.0)), 1e-300))


def _priced(model: Model, prices: np.ndarray) -> np.ndarray:
    """The model's costs with memory charged at the given prices."""
    cost = np.empty(len(model.cost))
    message_passing.priced(
        model.off, model.cost, model.rnode, model.rstart, model.rend, model.roff, model.usage, prices, cost
    )
    return cost
