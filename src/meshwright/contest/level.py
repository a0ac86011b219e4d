"""A level of the search: a model, its dual, and the way up to the model that the search began with."""

from dataclasses import dataclass

import numpy as np

from meshwright.solver.bounds.dual import Dual, PriceAscent, carried
from meshwright.solver.deadline import Deadline
from meshwright.solver.model.model import Model
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
