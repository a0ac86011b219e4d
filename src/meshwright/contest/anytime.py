"""The anytime search of one process: bound, decimate, anneal, mix, improve, fix by the bound, close, start again."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from meshwright.contest.decimation import decimate
from meshwright.contest.moves import Neighbourhood
from meshwright.contest.tuning import SEARCH, SearchTuning
from meshwright.solver.bounds.dual import Dual, PriceAscent, carried, reparametrised
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.exact.branch_and_bound import Options
from meshwright.solver.exact.resumable import close
from meshwright.solver.model.model import Model, State
from meshwright.solver.reductions.reduce import WayBack, reduce_model, restrict
from meshwright.solver.reductions.times import tighten_times
from meshwright.solver.tuning import TUNING, Tuning


@dataclass(eq=False)
class Level:
    """Costs in the model are `offset` less than in the top model; `chain` leads from the top down to it."""

    model: Model
    dual: Dual
    offset: float = 0.0
    chain: tuple[WayBack, ...] = ()
    tuning: Tuning = TUNING

    def __post_init__(self) -> None:
        self.ascent = PriceAscent(self.dual, tuning=self.tuning)

    @classmethod
    def top(cls, model: Model, tuning: Tuning = TUNING) -> "Level":
        return cls(model, Dual(model), tuning=tuning)

    def below(self, alive: np.ndarray, deadline: Deadline) -> "Level | None":
        """The level that is left when only the marked states may be chosen; None where nothing fits any more."""
        reduced = reduce_model(self.model, alive, growth=self.tuning.growth, deadline=deadline)
        if reduced.infeasible:
            return None
        model = tighten_times(reduced.model, self.tuning)
        dual = Dual(model, prices=carried(self.dual.prices, self.model.when, model.when))
        return Level(model, dual, self.offset + reduced.offset, (*self.chain, reduced.way_back), self.tuning)

    def expand(self, choice: np.ndarray) -> np.ndarray:
        """The choice of the top model that a choice of this level stands for."""
        for way_back in reversed(self.chain):
            choice = way_back.expand(choice)
        return np.asarray(choice, dtype=np.int64)

    def restrict(self, choice: np.ndarray) -> np.ndarray | None:
        """The choice of this level behind a choice of the top model; None where a state is no longer there."""
        return restrict(self.chain, choice)


@dataclass(eq=False)
class Search:
    """Searches one model.

    Attributes:
        model: The top model; costs and choices that are told or polled refer to it.
        tolerance: Improvements smaller than this do not matter.
        deadline: When to stop.
        seed: Seed of all random choices; processes with different seeds begin with different starts.
        steps: Most windows to try; None for no limit.
        tell: Called with (cost, choice) on every improvement of the best.
        tell_bound: Called with every better lower bound.
        poll: Returns (cost, choice) of the best that other processes found, or None.
        enough: Tells from a cost and a bound whether to stop.
        tuning: Options.
    """

    model: Model
    tolerance: float
    deadline: Deadline
    seed: int = 0
    steps: int | None = None
    tell: Callable[[float, np.ndarray], None] = lambda cost, choice: None
    tell_bound: Callable[[float], None] = lambda bound: None
    poll: Callable[[], tuple[float, np.ndarray] | None] = lambda: None
    enough: Callable[[float, float], bool] = lambda cost, bound: False
    tuning: SearchTuning = SEARCH
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
        level = Level.top(self.model, self.tuning.solver)
        self._first_bound(level)
        number, until = self.seed, self.deadline.part(self.tuning.turn_share)
        self._start(level, number)
        level.ascent.run(self.cost - level.offset, 200, self.deadline.part(0.05))
        while self.steps is None and not self.done() and not until.is_over:
            number += 1
            self._start(level, number)
        while not self.done():
            number += 1
            state = self._start(level, number) or self._best(level)
            if state is None:
                continue
            self._improve(level, state)
            if self.done():
                break
            level = self._deepen(level)

    def done(self) -> bool:
        """Whether the time or the steps are up or nothing is left to gain."""
        out_of_steps = self.steps is not None and self.windows >= self.steps
        proven = self.bound >= self.cost - self.tolerance
        enough = proven or self.enough(self.cost, self.bound)
        return out_of_steps or enough or self.deadline.is_over

    def _first_bound(self, level: Level) -> None:
        """Few sweeps with zero prices, then price steps while they pay: enough to guide the first start."""
        dual, part = level.dual, self.deadline.part(0.12)
        dual.converge(11 if len(level.model.cap) else 60, 1e-5, part)
        while len(level.model.cap) and not part.is_over:
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
        """A new choice, or the best one with the better parts of it."""
        best, new = self._best(level), self._decimated(level, number)
        if best is None or new is None:
            return new
        if self._around(level).mix(best, new.choice, self.deadline):
            self._offer(level, best)
        return best

    def _decimated(self, level: Level, number: int) -> State | None:
        """A new choice by decimation and annealing; every number gives another one."""
        if self.done():
            return None
        part = self._pace(level)
        # High prices leave spare memory, so that no round has to be undone: a more expensive choice, found quickly.
        is_hasty = part > 0.5 * self.tuning.decimation_pace[1]
        scale = self.tuning.decimation_scale * (2.0 if is_hasty else 1.0) * 1.5**self.failed
        if number != self.seed:  # the first start of every process goes by the prices as they are
            scale *= np.exp(0.15 * self.rng.standard_normal())
        until = self.deadline.part(0.9 if self.choice is None else 0.3)
        # The messages that the bound has cost go into the costs, so that decimation need not find them again.
        level.dual.restore()
        model, prices, seed = reparametrised(level.dual), level.dual.prices * scale, self.seed + number
        choice = decimate(model, prices, until, part, seed=seed, tuning=self.tuning.solver)
        if choice is None:
            self.failed += 1
            self.windows += 1  # a failed start counts as a step, so that a step budget always ends
            level.ascent.run(self.cost - level.offset, 25, self.deadline.part(0.1))
            return None
        state = State.of(level.model, choice)
        if not state.fits(level.model):
            return None
        self._offer(level, state)
        around = self._around(level)
        around.mix(state, around.anneal(state.choice), self.deadline.part(0.1))
        self._offer(level, state)
        return state

    def _around(self, level: Level) -> Neighbourhood:
        """The moves on a level, at the present prices."""
        if self.moves is None or self.moves.model is not level.model:
            seed = int(self.rng.integers(1 << 30))
            timed = self.steps is None
            self.moves = Neighbourhood(level.model, self.tolerance, seed, level.dual.links, timed, self.tuning)
        self.moves.charge(level.dual.prices)
        return self.moves

    def _pace(self, level: Level) -> float:
        """The part of the nodes to fix in each round of decimation so that all take a few percent of the time."""
        least, most = self.tuning.decimation_pace
        if self.steps is not None:
            return least  # what is to be repeatable must not look at the clock
        begin = self.deadline.now
        level.dual.sweep()
        return float(np.clip(100.0 * (self.deadline.now - begin) / max(self.deadline.left, 1e-9), least, most))

    def _improve(self, level: Level, state: State) -> None:
        """Windows around one choice, each stage until a good number of them brought nothing.

        At first memory has its full price, so that windows free memory which others can use better; then only the caps
        count.
        """
        around = self._around(level)
        level.dual.restore()
        level.dual.sweep()
        around.aim(level.dual.reduced, state.choice)
        shares = (1.0, 0.0) if level.dual.prices.any() else (0.0,)
        for stage, share in enumerate(shares):
            around.share, stale = share, 0
            until = (
                NEVER if self.steps is not None else self.deadline.part(self.tuning.turn_share / (len(shares) - stage))
            )
            patience = 15 + 2 * level.model.num_nodes / around.size
            while not self.done() and stale <= patience and not until.is_over:
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
        part = self.deadline.part(0.15)
        if len(level.model.cap) and np.isfinite(goal):
            level.ascent.run(goal, 100, part)
        dual.converge(30, 1e-6, part)
        self._raise(dual.bound + level.offset)
        if not np.isfinite(goal) or self.done():
            return level
        alive = dual.floor <= goal + 1e-12 * abs(goal)
        if alive.mean() < self.tuning.solver.shrunk:
            smaller = level.below(alive, self.deadline.part(0.3))
            if smaller is None:
                self._raise(self.cost)
                return level
            level = smaller
            level.dual.converge(40, 1e-6, self.deadline.part(0.1))
        if len(level.model.cost) <= self.tuning.solver.giant_states:
            self._close(level)
        return level

    def _close(self, level: Level) -> None:
        """Branch and bound on the whole level, as far as it gets in a tenth of the time that is left."""
        options, cutoff = Options(self.tolerance, self.tuning.solver), self.cost - level.offset
        found = close(options, level.model, cutoff, level.dual.prices, deadline=self.deadline.part(0.1))
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
