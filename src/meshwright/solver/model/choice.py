"""A choice of a model with its cost and load, kept together."""

from dataclasses import dataclass

import numpy as np

from meshwright.solver.bounds import message_passing
from meshwright.solver.model.model import Model


@dataclass(eq=False)
class State:
    """A choice of a model, what it costs, and the memory at every time."""

    choice: np.ndarray
    cost: float
    load: np.ndarray

    @classmethod
    def of(cls, model: Model, choice: np.ndarray) -> "State":
        choice = np.asarray(choice, dtype=np.int64)
        return cls(choice, cost_of(model, choice), load_of(model, choice))

    def fits(self, model: Model) -> bool:
        return bool((self.load <= model.cap * (1 + 1e-12)).all()) and np.isfinite(self.cost)


def cost_of(model: Model, choice: np.ndarray) -> float:
    """Node plus edge costs."""
    return float(message_passing.model_cost(model.off, model.cost, model.eu, model.ev, model.eoff, model.mat, choice))


def load_of(model: Model, choice: np.ndarray) -> np.ndarray:
    """Memory at every time."""
    load = np.zeros(len(model.cap))
    message_passing.choice_load(model.rnode, model.rstart, model.rend, model.roff, model.usage, choice, load)
    return load
