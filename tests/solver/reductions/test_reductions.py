"""Every reduction keeps the optimum: reduced and full problems agree by brute force, rule by rule and all together."""

import itertools

import numpy as np
import pytest

from meshwright.solver import ChoiceProblem, price
from meshwright.solver.deadline import Deadline
from meshwright.solver.model.model import from_problem, maximal_times
from meshwright.solver.reductions import memory, rules
from meshwright.solver.reductions.mutable_graph import INFEASIBLE, STATUS, build
from meshwright.solver.reductions.reduce import _extract, reduce_model
from meshwright.solver.reductions.simplify import Simplified, simplify
from meshwright.solver.reductions.times import tighten_times
from tests.solver.problems import all_states, brute_force, brute_model, random_problem

pytestmark = pytest.mark.slow

SEEDS = range(40)


def _settled(work):
    for e in range(work.used[0]):
        if work.eu[e] >= 0 and work.used[STATUS] != INFEASIBLE:
            rules.settle_edge(work, e)


def _nodes(work):
    return [u for u in range(len(work.k)) if work.alive[u]]


def _apply(name, work):
    """Applies one rule wherever it fits, once per node."""
    if name == "settle_edge":
        _settled(work)
        return work
    if name == "settle_memory":
        return memory.settle_memory(work)
    _settled(work)
    for u in _nodes(work):
        if work.used[STATUS] == INFEASIBLE or any(work.fresh[e] and work.eu[e] >= 0 for e in range(work.used[0])):
            break
        if not work.alive[u]:
            continue
        degree, rows = work.deg[u], work.rhead[u] >= 0
        if name == "drop_dominated":
            rules.drop_dominated(work, u, 10**9)
        elif name == "fix_alone" and degree == 0 and not rows:
            rules.fix_alone(work, u)
        elif name == "fold_leaf" and degree == 1:
            rules.fold_leaf(work, u)
        elif name == "bridge" and degree == 2 and not rows:
            rules.bridge(work, u, 100.0, 10**9)
        elif name == "contract" and degree > 0:
            rules.contract(work, u, 100.0)
    return work


RULES = ["settle_edge", "settle_memory", "drop_dominated", "fix_alone", "fold_leaf", "bridge", "contract"]


@pytest.mark.sweep(7)
@pytest.mark.parametrize("name", RULES)
def test_one_rule_keeps_the_optimum_and_can_be_undone(name):
    used = 0
    for seed in SEEDS:
        problem = random_problem(seed, max_nodes=5, memory=seed % 3 != 0, whole=seed % 2 == 0)
        model = from_problem(problem)
        work = build(model)
        reduced = _extract(_apply(name, work), model.num_nodes)
        used += len(reduced.model.cost) < len(model.cost) or len(reduced.model.cap) < len(model.cap)
        _agrees(problem, reduced)
    assert used > 5 or name == "settle_edge"  # the problems do give the rule something to do


def _never_worse(work, u, b, a):
    """Whether state b of u can replace state a in any choice, by the words of the rule."""
    r = work.rhead[u]
    while r >= 0:
        if work.usage[work.roff[r] + b] > work.usage[work.roff[r] + a]:
            return False
        r = work.rnext[r]
    slack = work.cost[work.off[u] + a] - work.cost[work.off[u] + b]
    for e in range(work.used[0]):
        if work.eu[e] >= 0 and u in (work.eu[e], work.ev[e]):  # else it was cut
            ku, kv = work.k[work.eu[e]], work.k[work.ev[e]]
            matrix = work.mat[work.eoff[e] : work.eoff[e] + ku * kv].reshape(ku, kv)
            mine, theirs = (matrix[b], matrix[a]) if u == work.eu[e] else (matrix[:, b], matrix[:, a])
            known = np.isfinite(theirs)
            slack -= max(0.0, *(mine[known] - theirs[known]))
    return slack >= 0


@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_states_of_which_one_is_never_worse_one_is_dropped(seed):
    problem = random_problem(seed, max_nodes=5, memory=seed % 3 != 0, whole=True)
    work = build(from_problem(problem))
    _settled(work)
    if work.used[STATUS] == INFEASIBLE or any(work.fresh[e] and work.eu[e] >= 0 for e in range(work.used[0])):
        return
    for u in _nodes(work):
        before = work.k[u]
        left = [a for a in range(before) if not any(_never_worse(work, u, b, a) for b in range(before) if b != a)]
        assert rules.drop_dominated(work, u, 10**9) == (work.k[u] < before)
        assert work.k[u] >= max(len(left), 1)
        pairs = itertools.permutations(range(work.k[u]), 2)
        assert not any(_never_worse(work, u, b, a) for b, a in pairs)


@pytest.mark.parametrize("seed", range(120))
def test_all_rules_together_keep_the_optimum(seed):
    problem = random_problem(1000 + seed, memory=seed % 3 != 0, whole=seed % 2 == 0)
    _agrees(problem, reduce_model(from_problem(problem)))


@pytest.mark.parametrize("seed", range(40))
def test_simplify_keeps_the_optimum(seed):
    problem = random_problem(5000 + seed, memory=True)
    _agrees(problem, simplify(from_problem(problem)))


@pytest.mark.parametrize("seed", range(60))
def test_past_the_deadline_every_state_still_has_a_partner(seed):
    problem = random_problem(seed, memory=seed % 3 != 0)
    reduced = reduce_model(from_problem(problem), deadline=Deadline(0.0))
    _agrees(problem, reduced)
    model, sizes = reduced.model, np.diff(reduced.model.off)
    for u, v, begin in zip(model.eu, model.ev, model.eoff, strict=True):
        matrix = model.mat[begin : begin + sizes[u] * sizes[v]].reshape(sizes[u], sizes[v])
        assert np.isfinite(matrix).any(axis=0).all() and np.isfinite(matrix).any(axis=1).all()


def test_full_pools_are_given_room(monkeypatch):
    from meshwright.solver.reductions import mutable_graph as module

    def tight(model, alive_state=None):
        made = build(model, alive_state)
        return made._replace(undo=made.undo[:64].copy(), mat=made.mat[: made.used[1]].copy())

    from meshwright.solver.reductions import reduce as driver

    assert module.build is build
    monkeypatch.setattr(driver, "build", tight)
    for seed in range(20):
        problem = random_problem(seed, max_nodes=6)
        _agrees(problem, reduce_model(from_problem(problem)))


def _agrees(problem, reduced):
    best = brute_force(problem)
    if reduced.infeasible:
        assert best == np.inf
        return
    cost, choice = brute_model(reduced.model)
    assert cost + reduced.offset == pytest.approx(best, rel=1e-12)
    if choice is not None:
        back = reduced if isinstance(reduced, Simplified) else reduced.way_back
        found = price(problem, back.expand(choice))
        assert found.legal
        assert found.cost == pytest.approx(best, rel=1e-12)


def test_implied_times_are_dropped_and_fitting_choices_stay_the_same():
    dropped = 0
    for seed in range(60):
        model = from_problem(random_problem(seed, max_nodes=4, max_states=3))
        if len(model.cap) == 0:
            continue
        smaller = tighten_times(model)
        dropped += len(smaller.cap) < len(model.cap)
        fits, still_fits = ((all_states(one)[2] >= 0).all(axis=1) for one in (model, smaller))
        assert (fits == still_fits).all()
    assert dropped > 5


def test_maximal_times_hold_every_live_set():
    rng = np.random.default_rng(0)
    for _ in range(50):
        start = rng.integers(0, 10, 6)
        end = start + rng.integers(1, 6, 6)
        kept, _, _ = maximal_times(start, end)
        sets = [{i for i in range(6) if start[i] <= t < end[i]} for t in range(16)]
        tops = [{i for i in range(6) if start[i] <= t < end[i]} for t in kept]
        assert all(any(live <= top for top in tops) for live in sets)


def test_infeasible_by_memory_says_by_how_much():
    problem = ChoiceProblem(costs=[[1, 1]], usages=[[5, 7]], intervals=[(0, 1)], limit=2)
    reduced = reduce_model(from_problem(problem))
    assert reduced.infeasible
    assert reduced.excess == 3
