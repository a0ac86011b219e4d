"""The cheapest choice by buckets against every choice of small random problems, one by one."""

from itertools import product

import numpy as np
import pytest

from meshwright.solver.bounds.unlimited_minimum import arrange, cheapest
from meshwright.solver.model.half_edges import link
from meshwright.solver.model.model import cost_of, from_problem
from meshwright.solver.warm import example
from tests.solver.problems import random_problem


def _cheapest(model, alive):
    buckets = arrange(link(model), model.off, alive, np.inf)
    return buckets, *cheapest(link(model), model.off, model.cost, buckets)


@pytest.mark.parametrize("seed", range(60))
def test_of_the_states_that_are_alive_the_cheapest_choice_is_found(seed):
    model = from_problem(random_problem(seed, memory=False, whole=seed % 2 == 0))
    rng = np.random.default_rng(seed)
    alive = rng.random(len(model.cost)) < 0.7
    alive[model.off[:-1]] = True
    states = [np.flatnonzero(alive[a:b]) for a, b in zip(model.off[:-1], model.off[1:], strict=True)]
    costs = {choice: cost_of(model, np.array(choice)) for choice in product(*(s.tolist() for s in states))}
    buckets, cost, choice = _cheapest(model, alive)
    assert buckets.sizes.tolist() == [len(s) for s in states]
    assert sorted(buckets.order.tolist()) == list(range(model.num_nodes))
    best = min(costs.values())
    assert cost == best if np.isinf(best) else cost == pytest.approx(best)
    if np.isfinite(best):
        assert costs[tuple(choice.tolist())] == pytest.approx(best)


def test_too_many_combinations_are_counted_no_further():
    model = from_problem(example(False, num_nodes=30, num_states=4))
    everything = np.ones(len(model.cost), bool)
    whole = arrange(link(model), model.off, everything, np.inf).combinations
    part = arrange(link(model), model.off, everything, whole / 10).combinations
    assert whole / 10 < part < whole
