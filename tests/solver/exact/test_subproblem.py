"""Parts of models: what is left where states are gone, and what that proves."""

import numpy as np

from meshwright.solver import ChoiceProblem
from meshwright.solver.bounds.dual import Dual
from meshwright.solver.deadline import NEVER
from meshwright.solver.exact.subproblem import Closed, Part, reduced
from meshwright.solver.model.model import from_problem


def test_the_only_choice_that_is_left_proves_nothing_beyond_the_goal():
    problem = ChoiceProblem(costs=[[6, 10], [0, 0]], edges=[(0, 1, [[0, 0], [0, 0]])])
    dual = Dual(from_problem(problem))
    dual.converge(5)
    alive = np.array([False, True, True, True])  # the cheaper state costs more than the goal of 5
    found = reduced(Part(dual), alive, goal=5.0, tolerance=0.5, deadline=NEVER)
    assert isinstance(found, Closed)
    assert (found.cost, found.bound) == (10.0, 5.0)  # the optimum is 6
