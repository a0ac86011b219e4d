"""The anytime search of one process: bound, decimate, anneal, mix, improve, fix by the bound, close, start again."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from meshwright.jit import clock
from meshwright.solver.exact.branch_and_bound import Closer
from meshwright.solver.exact.resumable import close
from meshwright.solver.local_search.decimation import decimate, settled
from meshwright.solver.local_search.level import Level
from meshwright.solver.local_search.moves import Neighbourhood
from meshwright.solver.model.choice import State
from meshwright.solver.model.model import Model

_SMALL_STATES = 4_000  # a level that small is worth closing by the frontier search
_SHARES = (1.0, 0.6, 0.3, 0.1, 0.0)  # of the memory's price that counts as cost, from stage to stage
_SCALE = 1.5  # of the prices in decimation: what is left of the memory is soon used by the moves that follow
_PARTS = (1.0, 0.5)  # of the usual pace of decimation, from start to start
_FIRST_STARTS = 0.15  # part of the time for first starts of each process, before the best of all is improved
_PEAKS = (2.0, 1.5, 1.0)  # of the memory's price, from which a new start is annealed
_TURN = 0.1  # of the time that is left, most for one turn of windows
_AGAIN = 0.5  # part of the turns that begin with a new start
_PATIENCE = 12  # kicks in a row that may bring nothing
_FEW_NODES = 1000  # on a level that small a new start soon comes near the best
_HASTY = 0.05  # a pace at which decimation leaves memory to spare


@dataclass(eq=False)
class Search:
    """Searches one model.

    Attributes:
        model: The top model; costs and choices that are told or polled refer to it.
        tolerance: Improvements smaller than this do not matter.
        deadline: `jit.clock()` at which to stop.
        seed: Seed of all random choices; processes with different seeds begin with different starts.
        steps: Most windows to try; None for no limit.
        tell: Called with (cost, choice) on every improvement of the best.
        tell_bound: Called with every better lower bound.
        poll: Returns (cost, choice) of the best that other processes found, or None.
        enough: Tells from a cost and a bound whether to stop.
    """

    model: Model
    tolerance: float
    deadline: float
    seed: int = 0
    steps: int | None = None
    tell: Callable[[float, np.ndarray], None] = lambda cost, choice: None
    tell_bound: Callable[[float], None] = lambda bound: None
    poll: Callable[[], tuple[float, np.ndarray] | None] = lambda: None
    enough: Callable[[float, float], bool] = lambda cost, bound: False
    cost: float = np.inf
    choice: np.ndarray | None = None
    bound: float = -np.inf
    windows: int = 0
    failed: int = 0
    moves: Neighbourhood | None = None
    rng: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def run(self) -> None:
        """Searches until the time or the steps are up, or the best is proven optimal."""
        level = Level.top(self.model)
        self._first_bound(level)
        number, until = self.seed, self._slice(_FIRST_STARTS)
        self._start(level, number)
        level.ascent.run(self.cost - level.offset, 200, self._slice(0.05))
        while self.steps is None and not self.done() and clock() < until:
            number += 1
            self._start(level, number)
        while not self.done():
            state = self._best(level)
            if state is None or self.rng.random() < _AGAIN:
                number += 1
                state = self._start(level, number)
            if state is None:
                continue
            self._kick(level, state)
            self._improve(level, state)
            if self.done():
                break
            level = self._deepen(level)

    def done(self) -> bool:
        """Whether the time or the steps are up or nothing is left to gain."""
        out_of_steps = self.steps is not None and self.windows >= self.steps
        proven = self.bound >= self.cost - self.tolerance
        enough = proven or self.enough(self.cost, self.bound)
        return out_of_steps or enough or clock() > self.deadline

    def _first_bound(self, level: Level) -> None:
        """Few sweeps with zero prices, then price steps while they pay: enough to guide the first start."""
        dual, part = level.dual, self._slice(0.12)
        dual.converge(11 if len(level.model.cap) else 60, 1e-5, part)
        while len(level.model.cap) and clock() < part:
            before = dual.bound
            if level.ascent.run(np.inf, 25, part) <= before + 0.003 * abs(before):
                break
        self._raise(dual.bound + level.offset)

    def _best(self, level: Level) -> State | None:
        """The best choice so far, of all processes, where the level still holds it."""
        self._adopt(level, None)
        known = None if self.choice is None else level.restrict(self.choice)
        return None if known is None else State.of(level.model, known)

    def _start(self, level: Level, number: int) -> State | None:
        """A new choice; on a large level, where it is far from the best, the best with the better parts of it."""
        best, new = self._best(level), self._decimated(level, number)
        if best is None or new is None:
            return new
        if self._around(level).mix(best, new.choice, self.deadline):
            self._offer(level, best)
        return new if level.model.num_nodes < _FEW_NODES else best

    def _decimated(self, level: Level, number: int) -> State | None:
        """A new choice by decimation and annealing; every number gives another one."""
        if self.done():
            return None
        part = _PARTS[number % len(_PARTS)] * self._pace(level)
        # High prices leave memory to spare, so that no round must be taken back: dearer, but soon there.
        scale = _SCALE * (2.0 if part > _HASTY else 1.0) * 1.5**self.failed
        if number != self.seed:  # the first start of every process goes by the prices as they are
            scale *= np.exp(0.15 * self.rng.standard_normal())
        until = self._slice(0.9 if self.choice is None else 0.3)
        # The messages that the bound has cost go into the costs, so that decimation need not find them again.
        level.dual.restore()
        choice = decimate(settled(level.dual), level.dual.prices * scale, until, part, seed=self.seed + number)
        if choice is None:
            self.failed += 1
            self.windows += 1  # a failed start counts as a step, so that a step budget always ends
            level.ascent.run(self.cost - level.offset, 25, self._slice(0.1))
            return None
        state = State.of(level.model, choice)
        if not state.fits(level.model):
            return None
        self._offer(level, state)
        around, nodes = self._around(level), np.arange(level.model.num_nodes)
        for peak in _PEAKS:
            around.mix(state, around.anneal(state.choice, nodes, peak, 0.0), self._slice(0.1))
            self._offer(level, state)
            if self.done():
                break
        return state

    def _around(self, level: Level) -> Neighbourhood:
        """The moves on a level, at the present prices."""
        if self.moves is None or self.moves.model is not level.model:
            seed = int(self.rng.integers(1 << 30))
            self.moves = Neighbourhood(level.model, self.tolerance, seed, level.dual.links, self.steps is None)
        self.moves.charge(level.dual.prices)
        return self.moves

    def _pace(self, level: Level) -> float:
        """The part of the nodes to fix in each round of decimation so that all take a few percent of the time."""
        if self.steps is not None:
            return 0.005  # what is to be repeatable must not look at the clock
        begin = clock()
        level.dual.sweep()
        now = clock()
        return float(np.clip(100.0 * (now - begin) / max(self.deadline - now, 1e-9), 0.005, 0.1))

    def _kick(self, level: Level, state: State) -> None:
        """Kicks until many in a row brought nothing."""
        around, stale = self._around(level), 0
        until = np.inf if self.steps is not None else self._slice(0.3)
        while not self.done() and stale <= _PATIENCE and clock() < until:
            self.windows += 1
            stale = 0 if around.kick(state, self.deadline) else stale + 1
            self._offer(level, state)
            if self.windows % 8 == 0:
                self._adopt(level, state)

    def _improve(self, level: Level, state: State) -> None:
        """Windows around one choice, each stage until a good number of them brought nothing.

        At first memory has its full price, so that windows free memory which others can use better; then less and less,
        until only the caps count.
        """
        around = self._around(level)
        level.dual.restore()
        level.dual.sweep()
        around.aim(level.dual.reduced, state.choice)
        shares = _SHARES if level.dual.prices.any() else (0.0,)
        for stage, share in enumerate(shares):
            around.share, stale = share, 0
            until = np.inf if self.steps is not None else self._slice(_TURN / (len(shares) - stage))
            patience = 15 + 2 * level.model.num_nodes / around.size
            while not self.done() and stale <= patience and clock() < until:
                self.windows += 1
                gained = around.step(state, self.deadline)
                stale = 0 if gained else stale + 1
                if gained and state.cost + level.offset < self.cost:
                    self._offer(level, state)
                if self.windows % 16 == 0:
                    self._adopt(level, state if share == 0.0 else None)
        best = self._best(level)
        if best is not None and not self.done() and around.mix(best, state.choice, self.deadline):
            self._offer(level, best)

    def _adopt(self, level: Level, state: State | None) -> None:
        """Takes over another process's choice if it is cheaper than the best here; a given state is mixed with it."""
        found = self.poll()
        if found is None or found[0] >= self.cost - 0.1 * self.tolerance:
            return
        self.cost, self.choice = found
        known = level.restrict(found[1]) if state is not None else None
        if known is not None and state is not None:
            self._around(level).mix(state, known, self.deadline)
            self._offer(level, state)

    def _deepen(self, level: Level) -> Level:
        """Raises the bound, fixes what it rules out, and closes what is left if it is small."""
        dual, goal = level.dual, self.cost - level.offset
        part = self._slice(0.15)
        if len(level.model.cap) and np.isfinite(goal):
            level.ascent.run(goal, 100, part)
        dual.converge(30, 1e-6, part)
        self._raise(dual.bound + level.offset)
        if not np.isfinite(goal) or self.done():
            return level
        alive = dual.floor <= goal + 1e-12 * abs(goal)
        if alive.mean() < 0.9:
            smaller = level.below(alive, self._slice(0.3))
            if smaller is None:
                self._raise(self.cost)
                return level
            level = smaller
            level.dual.converge(40, 1e-6, self._slice(0.1))
        if level.model.num_nodes == 0 or len(level.model.cost) < _SMALL_STATES:
            self._close(level)
        return level

    def _close(self, level: Level) -> None:
        """The frontier search over the whole level, as far as it gets in a tenth of the time that is left."""
        closer = Closer(self.tolerance, self._slice(0.1), effort=2e5, few=0)
        found = close(closer, level.model, self.cost - level.offset, level.dual.prices)
        if found.choice is not None:
            self._offer(level, State.of(level.model, found.choice))
        self._raise(min(found.bound + level.offset, self.cost))

    def _offer(self, level: Level, state: State) -> None:
        if state.cost + level.offset < self.cost - 1e-12 * abs(self.cost if np.isfinite(self.cost) else 0.0):
            self.choice = level.expand(state.choice)
            self.cost = State.of(self.model, self.choice).cost
            self.tell(self.cost, self.choice)

    def _raise(self, bound: float) -> None:
        if bound > self.bound:
            self.bound = bound
            self.tell_bound(bound)

    def _slice(self, part: float) -> float:
        """The moment at which a part of the remaining time is over."""
        now = clock()
        return now + part * max(self.deadline - now, 0.0)
