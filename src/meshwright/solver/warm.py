"""Small problems that between them reach every kernel of the solver."""

import numpy as np

from meshwright.solver import ChoiceProblem, lower_bound, solve
from meshwright.solver.tuning import Tuning

BRIEF = Tuning(rows=100)  # kernels are interpreted meanwhile


def reach_kernels() -> None:
    """Calls every kernel."""
    for memory in (False, True):
        problem = example(memory, num_nodes=10)
        solve(problem, seconds=600, tuning=BRIEF)
        lower_bound(problem)
    search_kernels()


def example(memory: bool, num_nodes: int = 14, num_states: int = 4, seed: int = 0) -> ChoiceProblem:
    """A random problem, dense enough to survive the reductions."""
    rng = np.random.default_rng(seed)
    costs = [rng.integers(0, 100, num_states).astype(float) for _ in range(num_nodes)]
    edges = []
    for u in range(num_nodes):
        for v in range(u + 1, min(u + 4, num_nodes)):
            matrix = rng.integers(0, 100, (num_states, num_states)).astype(float)
            matrix[rng.random(matrix.shape) < 0.1] = np.inf
            matrix[np.arange(num_states), np.arange(num_states)] = 50.0
            edges.append((u, v, matrix))
    usages = [rng.integers(0, 10, num_states) for _ in range(num_nodes)]
    intervals = [(int(start), int(start) + 5) for start in rng.integers(0, num_nodes, num_nodes)]
    limit = float(0.6 * sum(max(usage) for usage in usages) / num_nodes * 5) if memory else None
    return ChoiceProblem(costs=costs, usages=usages, intervals=intervals, edges=edges, limit=limit)


def search_kernels() -> None:
    """The kernels that only giant problems, or those that leave a gap, are sure to use."""
    from meshwright.solver.bounds.dual import Dual
    from meshwright.solver.bounds.memory_prices import highest
    from meshwright.solver.bounds.unlimited_minimum import arrange, cheapest
    from meshwright.solver.deadline import Deadline
    from meshwright.solver.exact.bucket_elimination import eliminate
    from meshwright.solver.exact.repair import repaired
    from meshwright.solver.exact.subproblem import coarsened
    from meshwright.solver.model.model import from_problem
    from meshwright.solver.reductions.reduce import reduce_model
    from meshwright.solver.reductions.simplify import simplify

    model = from_problem(example(True, num_nodes=30))
    reduce_model(model, deadline=Deadline(0.0))
    simple = simplify(model)
    if not simple.infeasible:
        dual = Dual(simple.model)
        eliminate([dual], 1e9, 100)
        buckets = arrange(dual.links, dual.model.off, np.ones(len(dual.model.cost), bool), 1e6)
        cheapest(dual.links, dual.model.off, dual.theta, buckets)
        highest(np.ones((2, 1)), np.zeros(2), np.ones(1), 1.0, 1)
        coarsened(dual.model, 1e-3)
        repaired(simple.model, dual.links, dual.decode())
