"""Choice problems from costs, edges and memory, held against sums by hand."""

import itertools

import numpy as np
import pytest

from meshwright.solver import solve
from meshwright.solver.problem.copies import Spans
from meshwright.solver.problem.priced import Usage, choice_problem


@pytest.mark.parametrize("seed", range(20))
def test_dear_memory_is_weighed_against_time(seed):
    """The best choice is that of costs plus the price of all bytes at that moment."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, 5)
    copies = rng.integers(1, 4, 5).tolist()
    costs = [rng.uniform(0, 1, n) for n in sizes]
    edges = {(i, 0, i + 1, 0): (2, rng.uniform(0, 1, (sizes[i], sizes[i + 1]))) for i in range(4)}
    memory, columns = Usage(3), []
    for node, size in enumerate(sizes):
        columns.append(memory.add(node, rng.uniform(5, 6, size)))
    start = rng.integers(0, 2, 5)
    memory.take(np.array(columns), start, start + 2, np.ones(5))
    price = 10.0

    def whole(choice):
        time = sum(n * c[s] for n, c, s in zip(copies, costs, choice, strict=True))
        time += sum(n * matrix[choice[u], choice[v]] for (u, _, v, _), (n, matrix) in edges.items())
        return time + price * memory.profile(np.array(choice), Spans.joined([])).bytes_at[1]

    best = min(itertools.product(*map(range, sizes)), key=whole)
    problem = choice_problem(copies, costs, edges, memory, {}, None, byte_prices={1: price})
    found = solve(problem).choice
    assert whole(found) == pytest.approx(whole(best), rel=1e-12)
    assert problem.cost.max() < price * 5  # without the bytes that every strategy takes
