"""Messages that are moved into the costs change no total."""

import numpy as np
import pytest

from meshwright.solver.bounds.dual import Dual, reparametrised
from meshwright.solver.model.model import cost_of, from_problem
from meshwright.solver.warm import example


def test_moved_costs_keep_every_total_and_the_bound():
    model = from_problem(example(True, seed=2))
    dual = Dual(model)
    dual.converge(10)
    dual.restore()
    moved = reparametrised(dual)
    random = np.random.default_rng(0)
    for _ in range(20):
        choice = (random.random(model.num_nodes) * np.diff(model.off)).astype(np.int64)
        assert cost_of(moved, choice) == pytest.approx(cost_of(model, choice))
    assert Dual(moved).sweep() >= dual.bound - 1e-9 * abs(dual.bound)
