"""What is said to cost at least so much does: held against every choice of small problems that memory all but fills."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.explain.alternatives.forced import Pricing
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.plans.records.record import Edge, Node, Problem

NUM_NODES, NUM_STEPS = 4, 5
CODES = 3  # of a value with two dims on a mesh of one axis: whole, or either dim split
ROUNDING = 1 + 1e-9
SECONDS = 5.0


def problem_of(seed):
    """A chain in which values that are read in other shardings are copied, with the best choice under a limit."""
    rng = np.random.default_rng(seed)
    codes = np.arange(CODES)
    allowed = rng.random((NUM_NODES, CODES)) < 0.8
    allowed[:, rng.integers(CODES)] = True
    nodes = [
        Node(f"n{i}", -1, 1.0, (), 0, codes, rng.uniform(0, 20, CODES), (), some) for i, some in enumerate(allowed)
    ]
    edges = []
    for reader in range(1, NUM_NODES):
        paid = rng.random(CODES) < 0.2
        table = rng.uniform(1, 6, (CODES, CODES)) * (1.0 - np.eye(CODES)) * ~paid
        start = rng.integers(0, NUM_STEPS - 1, 2)
        lives = (start, start + 1, np.maximum(start - rng.integers(0, 2, 2), 0), rng.random(2) < 0.5)
        lives = lives[: 4 if rng.random() < 0.7 else 2]
        size = int(rng.integers(1, 9))
        edges.append(Edge(reader - 1, 0, reader, 0, 1.0, "v", 0, size, codes, codes, paid, table, *lives))
    start = rng.integers(0, 2, NUM_NODES)
    problem = Problem(
        sizes=(2,),
        nodes=nodes,
        edges=edges,
        extra=(),
        num_steps=NUM_STEPS,
        column_class=list(range(NUM_NODES)),
        column_bytes=[rng.integers(1, 9, CODES).astype(float) for _ in range(NUM_NODES)],
        role=[0] * NUM_NODES,
        column=np.arange(NUM_NODES),
        start=start,
        stop=start + rng.integers(1, NUM_STEPS - 1, NUM_NODES),
        share=np.ones(NUM_NODES),
        choice=np.zeros(NUM_NODES, np.int64),
        limit=None,
    )
    known = [(c, problem.cost_of(c), peak_bytes(problem, c)) for c in every_choice(problem)]
    limit = float(rng.choice(sorted(peak for *_, peak in known)[: len(known) // 3 + 1]))
    choice, cost, _ = min((row for row in known if row[2] <= limit), key=lambda row: row[1])
    return replace(problem, choice=choice, limit=limit), cost


def every_choice(problem):
    return [np.array(choice) for choice in product(*(np.flatnonzero(node.allowed) for node in problem.nodes))]


def peak_bytes(problem, choice):
    return problem.memory.profile(choice, problem.copies_made(choice)).peak_bytes


def least(problem, node, code):
    """The least cost of a choice that fits, with one strategy fixed."""
    forced = problem.forced(node, problem.nodes[node].codes == code)
    some = (c for c in every_choice(forced) if peak_bytes(problem, c) <= problem.limit)
    return min(map(problem.cost_of, some), default=np.inf)


@pytest.mark.slow
@given(st.integers(0, 10_000), st.integers(0, NUM_NODES - 1))
@settings(max_examples=60, deadline=None)
def test_no_choice_costs_less_than_its_bound_whatever_copies_it_makes(seed, node):
    problem, _ = problem_of(seed)
    pricing = Pricing(SimpleNamespace(problem=problem, program=None), None)
    codes = list(range(CODES))
    found, left = pricing.forced(node, codes, SECONDS)
    assert not left
    for priced in (*pricing.bounded(node, codes), *found):
        best = least(problem, node, priced.code)
        assert priced.at_least <= best * ROUNDING
        assert priced.cost * ROUNDING >= best
        assert not priced.is_exact or priced.cost == pytest.approx(best)
    for priced in found:  # nothing but memory rules anything out here, and it must be seen to be memory
        assert priced.at_least < np.inf or priced.peak_bytes > problem.limit


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_a_view_comes_to_the_best_choice_that_fits(seed):
    problem, best = problem_of(seed)
    state = ViewState(View(problem, problem.limit))
    while not state.is_done:
        state = state.advance()
        assert not state.has_failed
    assert state.proven <= best * ROUNDING
    assert peak_bytes(problem, state.latest.choice) <= problem.limit
    assert problem.cost_of(state.latest.choice) == pytest.approx(best)  # whatever copies earlier answers made
