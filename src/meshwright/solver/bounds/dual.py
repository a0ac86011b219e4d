"""The dual of a model: messages between nodes and prices of memory, whose best value bounds the optimum from below."""

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.bounds import message_passing
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.model.half_edges import Links, link
from meshwright.solver.model.model import Model
from meshwright.solver.tuning import TUNING, Tuning


def carried(prices: np.ndarray, old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Prices at some times (`Model.when`) for others, those of another model of the same problem."""
    known = np.zeros(int(max(old.max(initial=-1), new.max(initial=-1))) + 1)
    known[old] = prices
    return known[new]


class Dual:
    """Messages and prices for one model, improved by sweeps and subgradient steps; every bound it reports is valid.

    Attributes:
        bound: Best lower bound found so far on the model's cost.
        prices: Prices of memory at every time that gave it.
        messages: The messages that gave it.
        reduced: Reduced costs: what each state adds to the current (not the best) bound at least.
        floor: Lower bound on the cost of any choice with each state, the best of all sweeps so far.
    """

    def __init__(self, model: Model, links: Links | None = None, prices: np.ndarray | None = None):
        self.model = model
        self.links = link(model) if links is None else links
        self.m = np.zeros(self.links.num_messages)
        self.price = np.zeros(len(model.cap)) if prices is None else prices.copy()
        self.theta = model.cost.copy()
        self.reduced = np.zeros(len(model.cost))
        self.floor = np.full(len(model.cost), -np.inf)
        self.now = -np.inf
        self.bound = -np.inf
        self.prices = self.price.copy()
        self.messages = self.m.copy()
        if prices is not None:
            self.set_prices(self.price)

    def set_prices(self, price: np.ndarray) -> None:
        """Replaces the prices; the messages stay, as they are valid for any costs."""
        model = self.model
        self.price = price
        message_passing.priced(
            model.off, model.cost, model.rnode, model.rstart, model.rend, model.roff, model.usage, price, self.theta
        )

    def sweep(self) -> float:
        """One backward and one forward sweep; returns the bound and remembers it if it is the best."""
        spare = float(self.price @ self.model.cap)
        value = message_passing.there_and_back(
            self.links, self.model.off, self.theta, self.m, self.reduced, self.floor, spare
        )
        self.now = value
        if value > self.bound:
            self.bound = value
            self.prices[:] = self.price
            self.messages[:] = self.m
        return value

    def restore(self) -> None:
        """Restores the messages and prices of the best bound."""
        self.m[:] = self.messages
        self.set_prices(self.prices.copy())
        self.now = self.bound

    def converge(
        self, iterations: int, tolerance: float = 1e-7, deadline: Deadline = NEVER, goal: float = np.inf
    ) -> float:
        """Sweeps with fixed prices until ten sweeps gain less than `tolerance` of the bound, or it reaches the goal."""
        marker = self.sweep()
        for i in range(1, iterations):
            value = self.sweep()
            if value >= goal or deadline.is_over:
                break
            if i % 10 == 0:
                if not value - marker > tolerance * abs(value):  # nor is there a gain where both are infinite
                    break
                marker = value
        return self.bound

    def load(self) -> np.ndarray:
        """Memory at every time when each node takes its state of least reduced cost."""
        model, load = self.model, np.zeros(len(self.model.cap))
        message_passing.expected_load(
            model.off, model.rnode, model.rstart, model.rend, model.roff, model.usage, self.reduced, load
        )
        return load

    def spent(self) -> np.ndarray:
        """What every state pays for memory at the current prices."""
        model, spent = self.model, np.zeros(len(self.model.cost))
        running = np.concatenate([[0.0], np.cumsum(self.price)])
        rate = running[model.rend] - running[model.rstart]
        message_passing.spend(model.off, model.rnode, rate, model.roff, model.usage, spent)
        return spent

    def decode(self) -> np.ndarray:
        """A choice read from the current messages; it may exceed the caps or hold impossible pairs."""
        choice = np.zeros(self.model.num_nodes, dtype=np.int64)
        message_passing.round_choice(self.links, self.model.off, self.theta, self.m, choice)
        return choice

    def sweep_back(self) -> float:
        """A backward sweep alone; returns its bound without subtracting what the caps are worth."""
        return message_passing.sweep(self.links, self.model.off, self.theta, self.m, self.reduced, False)


def at_prices(dual: Dual, prices: np.ndarray, deadline: Deadline = NEVER) -> Dual:
    """A dual of the same model at other prices, after a few sweeps."""
    other = Dual(dual.model, dual.links, prices)
    other.m[:] = dual.m
    other.converge(10, 1e-6, deadline)
    return other


class PriceAscent:
    """Raises a dual's bound over the prices by subgradient steps.

    The length is Polyak's (towards a target), the direction is scaled per time by the recent size of its slope (times
    that keep binding move on, times that flip calm down) with momentum. The step shrinks and the best state is restored
    whenever a few steps in a row bring no gain. Slopes come from the nodes' own minima, not from a decoded choice.
    """

    def __init__(self, dual: Dual, step: float = 0.5, tuning: Tuning = TUNING):
        self.dual, self.step, self.tuning = dual, step, tuning
        self.size = np.zeros(len(dual.price))
        self.motion = np.zeros(len(dual.price))

    def run(self, target: float, iterations: int, deadline: Deadline = NEVER) -> float:
        """Makes up to `iterations` steps; a target of inf means that no cost is known yet."""
        dual, stale = self.dual, 0
        for _ in range(iterations):
            if deadline.is_over or dual.bound >= target:
                break
            before = dual.bound
            if not self._move(target):
                break
            dual.sweep()
            stale = 0 if dual.bound > before + 1e-6 * abs(before) else stale + 1
            if stale >= self.tuning.ascent_patience:
                stale, self.step = 0, self.step * 0.7
                self.motion[:] = 0.0
                dual.restore()
                dual.sweep()
        dual.restore()
        return dual.bound

    def _move(self, target: float) -> bool:
        dual = self.dual
        if len(dual.model.cap) == 0:  # there is no memory to price
            return False
        slope = dual.load() - dual.model.cap
        slope[(slope < 0) & (dual.price <= 0)] = 0.0
        self.size = 0.9 * self.size + 0.1 * slope * slope
        direction = slope / np.sqrt(self.size + 1e-3 * self.size.max() + 1e-300)
        norm = float(slope @ direction)
        if norm <= 0.0:
            return False
        aim = target if np.isfinite(target) else dual.bound + max(abs(dual.bound), 1e-9)
        length = self.step * max(aim - dual.now, 1e-4 * abs(dual.now)) / norm
        self.motion = 0.5 * self.motion + length * direction
        dual.set_prices(np.maximum(dual.price + self.motion, 0.0))
        return True


def ascend_prices(
    dual: Dual,
    target: float,
    iterations: int,
    deadline: Deadline = NEVER,
    step: float = 0.5,
    tuning: Tuning = TUNING,
) -> float:
    """One ascent from scratch; see `PriceAscent`."""
    return PriceAscent(dual, step, tuning).run(target, iterations, deadline)


def reparametrised(dual: Dual) -> Model:
    """The dual's model with its messages moved into the costs: no total changes, and zero messages are as good."""
    model = dual.model
    sizes = np.diff(model.off)
    eoff = np.concatenate([[0], np.cumsum(sizes[model.eu] * sizes[model.ev])])
    cost, mat = model.cost.copy(), np.empty(eoff[-1])
    move_messages(model.off, model.eu, model.ev, model.eoff, model.mat, dual.links.of_edge, dual.m, cost, mat)
    return model._replace(cost=cost, mat=mat, eoff=eoff[:-1])


@kernel
def move_messages(off, eu, ev, eoff, mat, of_edge, m, new_cost, new_mat):
    """Moves the messages of every edge to its nodes' costs and out of its matrix."""
    place = 0
    for e in range(len(eu)):
        u, v = eu[e], ev[e]
        here, there = of_edge[0, e], of_edge[1, e]
        num_there = off[v + 1] - off[v]
        for s in range(off[u + 1] - off[u]):
            new_cost[off[u] + s] += m[here + s]
            for t in range(num_there):
                new_mat[place] = mat[eoff[e] + s * num_there + t] - m[here + s] - m[there + t]
                place += 1
        for t in range(num_there):
            new_cost[off[v] + t] += m[there + t]
