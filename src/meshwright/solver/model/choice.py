"""A choice of a model with its cost and load, kept together."""

from dataclasses import dataclass

import numpy as np

from meshwright.jit import kernel
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
    return float(model_cost(model.off, model.cost, model.eu, model.ev, model.eoff, model.mat, choice))


def load_of(model: Model, choice: np.ndarray) -> np.ndarray:
    """Memory at every time."""
    load = np.zeros(len(model.cap))
    choice_load(model.rnode, model.rstart, model.rend, model.roff, model.usage, choice, load)
    return load


@kernel
def model_cost(off, cost, eu, ev, eoff, mat, choice):
    """Node plus edge costs of a choice."""
    total = 0.0
    for u in range(len(off) - 1):
        total += cost[off[u] + choice[u]]
    for e in range(len(eu)):
        v = ev[e]
        total += mat[eoff[e] + choice[eu[e]] * (off[v + 1] - off[v]) + choice[v]]
    return total


@kernel
def choice_load(rnode, rstart, rend, roff, usage, choice, load):
    """Load at every time under a choice."""
    change = np.zeros(len(load) + 1)
    for r in range(len(rnode)):
        used = usage[roff[r] + choice[rnode[r]]]
        change[rstart[r]] += used
        change[rend[r]] -= used
    running = 0.0
    for t in range(len(load)):
        running += change[t]
        load[t] = running
