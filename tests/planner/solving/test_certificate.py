"""The certificate: below every choice of the problem with nothing tied, and close to its optimum."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.methods import NAMED
from meshwright.planner.planner import Task
from meshwright.planner.solving import certificate
from meshwright.planner.solving.certificate import Held, unfolded_bound
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.planner.solving.solves import least_memory
from meshwright.plans.plan import PROVEN_GAP
from meshwright.solver import Status, price, solve
from meshwright.solver.problem.gap import relative_gap
from tests.planner.examples import mesh, mlp_step, traced_zoo

pytestmark = pytest.mark.slow

ACTIVATIONS = [jnp.tanh, jax.nn.relu, jax.nn.gelu, lambda x: x]
SHAPES = [(2,), (4,), (2, 2), (3,)]


def random_program(seed):
    """A forward pass or a step of gradient descent through random layers, some of them alike."""
    rng = np.random.default_rng(seed)
    hidden, batch = (int(rng.choice([6, 12, 24, 48])) for _ in range(2))
    kinds = [(ACTIVATIONS[rng.integers(4)], bool(rng.integers(2)), int(rng.choice([1, 2]))) for _ in range(2)]
    layers = [kinds[i % 2] if rng.random() < 0.9 else kinds[0] for i in range(int(rng.integers(4, 12)))]

    def loss(params, x):
        for (activation, residual, _), (up, down) in zip(layers, params, strict=True):
            y = activation(x @ up) @ down
            x = x + y if residual else y
        return jnp.mean(x**2)

    def step(params, x):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, x))

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = [(array(hidden, wide * hidden), array(wide * hidden, hidden)) for _, _, wide in layers]
    alpha, beta = float(rng.choice([0, 1, 1000])), float(rng.choice([0.1, 1]))
    machine = mesh(SHAPES[rng.integers(len(SHAPES))], alpha, beta)
    return trace(step if rng.random() < 0.7 else loss, params, array(batch, hidden)), machine


def untied(traced, machine):
    return Task(traced, mw.Auto(), folding=False).formulate(machine).problem({}, None)


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_the_untied_problem_costs_less(seed):
    traced, machine = random_program(seed)
    bound = unfolded_bound(Task(traced, mw.Auto()).formulate(machine), target=np.inf)
    problem = untied(traced, machine)
    best = solve(problem)
    assert best.status is Status.OPTIMAL
    assert bound <= best.cost
    rng = np.random.default_rng(seed)
    sizes = np.diff(problem.first)
    for _ in range(20):  # near the optimum, where a bound that is too high would show
        choice = np.where(rng.random(len(sizes)) < 0.1, rng.integers(0, sizes), best.choice)
        assert bound <= price(problem, choice).cost


@pytest.mark.parametrize("layers", [2, 5, 16])
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_on_a_chain_of_layers_the_bound_is_all_but_the_optimum(layers, shape):
    step, args = mlp_step(32, 64, layers)
    traced, machine = trace(step, *args), mesh(shape, alpha=1, beta=1)
    best = solve(untied(traced, machine))
    assert best.status is Status.OPTIMAL
    bound = unfolded_bound(Task(traced, mw.Auto()).formulate(machine), best.cost)
    assert 0.999 * best.cost <= bound <= best.cost


def test_any_target_gives_a_valid_bound():
    step, args = mlp_step(32, 64, 4)
    traced, machine = trace(step, *args), mesh((4,))
    formulation, optimum = Task(traced, mw.Auto()).formulate(machine), solve(untied(traced, machine)).cost
    bounds = [unfolded_bound(formulation, target) for target in (0.0, optimum / 2, optimum, 1e30)]
    assert all(bound <= optimum for bound in bounds)
    assert bounds[-1] >= 0.99 * optimum


def test_without_communication_there_is_nothing_to_certify():
    step, args = mlp_step(32, 64, 3)
    assert unfolded_bound(Task(trace(step, *args), mw.Auto()).formulate(mesh((1,))), 0.0) == 0.0


def tight(traced, machine):
    """Where memory is short half-way between the least that is needed and what is best without a limit."""
    formulation = Task(traced, mw.Auto()).formulate(machine)
    free = ViewState(View(formulation, None)).step()
    limit = (formulation.memory.least().peak_bytes + free.peak_bytes) / 2
    state, budget = ViewState(View(formulation, limit)), Budget(10.0)
    while not state.is_done:
        state = state.advance(budget=budget)
        assert not state.has_failed
    return state, Held(sorted(state.moments.reserved), limit)


@pytest.mark.parametrize("seed", [0, 2, 3, 4, 6, 8])  # the others take up to ten seconds
def test_no_choice_that_fits_the_untied_problem_costs_less(seed):
    traced, machine = random_program(seed)
    view, held = tight(traced, machine)
    told = held._replace(worth=view.worth)
    wrong = held._replace(worth=dict.fromkeys(held.times, 3 * view.cost / held.limit))
    bounds = [unfolded_bound(view.formulation, view.cost, known) for known in (held, told, wrong)]
    apart = Task(traced, mw.Auto(), folding=False).formulate(machine)
    best = solve(apart.problem(dict.fromkeys(held.times, 0.0), held.limit))
    assert best.status is Status.OPTIMAL
    assert max(bounds) <= best.cost  # whatever a byte is said to be worth


@cache
def tight_zoo(name):
    """A model of eight layers, the mesh, and where memory is short for it."""
    traced, machine = traced_zoo(name, layers=8), mw.cluster("2x4 v100-16gb").mesh((2, 4))
    return traced, machine, *tight(traced, machine)


def test_what_the_solve_says_memory_is_worth_is_not_sought_again(monkeypatch):
    *_, view, held = tight_zoo("gpt-tiny")
    assert view.worth.keys() <= set(held.times) and min(view.worth.values()) > 0
    told = held._replace(worth=view.worth)
    sought = unfolded_bound(view.formulation, view.cost, held)
    assert sought > 1.01 * unfolded_bound(view.formulation, view.cost)  # which knows of no memory
    monkeypatch.setattr(certificate, "ascend_prices", None)
    assert unfolded_bound(view.formulation, view.cost, told) >= (1 - 1e-3) * sought


@pytest.mark.sweep(1)
@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_where_memory_binds_a_plan_is_certified_with_it(name):
    traced, machine, view, held = tight_zoo(name)
    method = mw.Auto(memory_fraction=held.limit / machine.memory_bytes)
    solution = Task(traced, method).plan([machine], lambda _: None).solution
    assert 0.99 * view.cost <= solution.lower_bound <= view.cost
    assert unfolded_bound(view.formulation, view.cost) < 0.99 * view.cost  # which is all that is known without
    assert solution.gap < 0.01


@pytest.mark.sweep(2)
@pytest.mark.parametrize("is_cpu", [False, True])
@pytest.mark.parametrize("name", ["gpt-tiny", "moe-tiny"])
def test_each_group_is_charged_for_what_it_takes_itself(name, is_cpu):
    traced = traced_zoo(name, layers=4)
    machine = mw.cluster("1x4 cpu" if is_cpu else "1x4 h100").mesh((2, 2))
    folded, apart = (Task(traced, mw.Auto(), folding=folding).formulate(machine) for folding in (True, False))
    sizes = [len(folded.costs[which]) for which in folded.folded.group_class]
    first = np.concatenate([[0], np.cumsum(sizes)])
    passing = folded.memory.column >= len(folded.memory.examples)
    times = np.unique(folded.memory.start[passing])
    for time in times[:: max(len(times) // 60, 1)].tolist():
        costs = np.zeros(first[-1])
        folded.memory.charge({time: 2.0}, costs, first)
        usage = apart.memory.usage(time, len(apart.costs))
        taken = [usage[which] for which in apart.folded.group_class]
        expected = [np.zeros(size) if one is None else 2.0 * one for one, size in zip(taken, sizes, strict=True)]
        np.testing.assert_allclose(costs, np.concatenate(expected), atol=1e-3)


@pytest.mark.sweep(3)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("part", [None, 0.3])
def test_no_plan_of_any_method_costs_less_than_the_bound(seed, part):
    traced, machine = random_program(seed)
    if part is not None:
        formulation = Task(traced, mw.Auto()).formulate(machine)
        free, (_, least) = ViewState(View(formulation, None)).step(), least_memory(formulation)
        limit = int(least + part * max(free.peak_bytes - least, 0))
        machine = mesh(machine.sizes, machine.alpha, machine.beta, limit)
    best = Task(traced, mw.Auto(seconds=2.0)).plan([machine], lambda _: None)
    assert 0.0 <= best.solution.lower_bound <= best.cost.total
    assert best.solution.gap == relative_gap(best.cost.total, best.solution.lower_bound)
    assert (best.solution.status == "optimal") == (best.solution.gap <= PROVEN_GAP)
    for method in (*NAMED, mw.Manual(), mw.Auto()):
        method = replace(method, seconds=1.0)
        try:
            found = Task(traced, method, folding=not isinstance(method, mw.Auto)).plan([machine], lambda _: None)
        except (mw.ShardingError, mw.DoesNotFit):
            continue
        assert best.solution.lower_bound <= found.cost.total * (1 + 1e-12), found.method
