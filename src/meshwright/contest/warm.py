"""A small search that reaches every kernel of the search for giant problems."""

from meshwright.contest.anytime import Search
from meshwright.contest.tuning import SearchTuning
from meshwright.solver.deadline import NEVER
from meshwright.solver.model.model import from_problem
from meshwright.solver.warm import BRIEF, example


def reach_kernels() -> None:
    """Calls every kernel."""
    model = from_problem(example(True, num_nodes=8, num_states=3))
    Search(model, 0.5, NEVER, steps=2, tuning=SearchTuning(BRIEF)).run()
