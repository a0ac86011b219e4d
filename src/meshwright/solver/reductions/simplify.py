"""All exact reductions in turn, until none helps, with one way back through all of them."""

from dataclasses import dataclass

import numpy as np

from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.model.model import Model
from meshwright.solver.reductions.reduce import WayBack, reduce_model, restrict
from meshwright.solver.reductions.times import tighten_times
from meshwright.solver.tuning import TUNING, Tuning


@dataclass(frozen=True, eq=False)
class Simplified:
    """A small model with the optimum of a large one: full cost = offset + cost in the model."""

    model: Model
    offset: float
    infeasible: bool
    excess: float
    chain: tuple[WayBack, ...]

    def expand(self, choice: np.ndarray) -> np.ndarray:
        """The full choice that a choice of the model stands for."""
        for way_back in reversed(self.chain):
            choice = way_back.expand(choice)
        return choice

    def restrict(self, choice: np.ndarray) -> np.ndarray | None:
        """The choice of the model behind a full choice; None where a state is no longer there."""
        return restrict(self.chain, choice)


def simplify(model: Model, deadline: Deadline = NEVER, tuning: Tuning = TUNING) -> Simplified:
    """Reduces, drops implied times, and reduces again while that removes a good part of the nodes."""
    chain: list[WayBack] = []
    offset = 0.0
    while True:
        # In a small model every sweep that is saved later is worth comparing the states of large nodes.
        is_small = len(model.cost) <= tuning.giant_states or model.num_nodes <= tuning.few_nodes
        work = tuning.most_work if is_small else tuning.most_work // 10
        reduced = reduce_model(model, growth=tuning.growth, most_work=work, deadline=deadline)
        chain.append(reduced.way_back)
        offset += reduced.offset
        if reduced.infeasible:
            return Simplified(reduced.model, offset, True, reduced.excess, tuple(chain))
        before, model = model.num_nodes, reduced.model
        if deadline.is_over or (len(chain) > 1 and model.num_nodes > tuning.shrunk * before):
            break
        tight = tighten_times(model, tuning)
        if len(tight.cap) == len(model.cap):
            break
        model = tight
    return Simplified(model, offset, False, 0.0, tuple(chain))
