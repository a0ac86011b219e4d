"""Folding: tied layers reach the optimum of the untied problem, and the bound certifies it."""

from dataclasses import replace

import numpy as np
import pytest

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.planner import Task
from tests.planner.examples import mesh, mlp_step, solve_on, traced_zoo

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layers", [6, 12])
@pytest.mark.parametrize(("batch", "hidden", "shape"), [(256, 32, (4,)), (32, 256, (4,)), (256, 32, (2, 2))])
def test_a_folded_mlp_is_as_good_as_the_unfolded(layers, batch, hidden, shape):
    step, args = mlp_step(batch, hidden, layers)
    traced = trace(step, *args)
    meshes = [mesh(shape, alpha=1, beta=(1, 0.1)[: len(shape)])]
    folded, whole = (solve_on(traced, mw.Auto(), meshes, folding) for folding in (True, False))
    assert folded.cost.total == pytest.approx(whole.cost.total, rel=1e-9)
    assert whole.solution.status == "optimal"
    assert folded.solution.lower_bound <= whole.cost.total * (1 + 1e-9)


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_a_folded_llama_is_all_but_as_good_as_the_unfolded_and_says_by_how_much(shape):
    traced = traced_zoo("llama-tiny", layers=4)
    meshes = [mesh(shape, alpha=1, beta=(1, 0.1)[: len(shape)])]
    folded, whole = (solve_on(traced, mw.Auto(), meshes, folding) for folding in (True, False))
    assert whole.cost.total <= folded.cost.total * (1 + 1e-9)
    assert folded.cost.total <= whole.cost.total * 1.002  # the first and last layers of four may differ from the rest
    assert folded.solution.lower_bound <= whole.cost.total * (1 + 1e-9)


def test_the_problem_does_not_grow_with_depth():
    sizes = []
    for layers in (6, 12, 24):
        step, args = mlp_step(256, 32, layers)
        problem = Task(trace(step, *args), mw.Auto()).formulate(mesh((4,))).problem({}, None)
        sizes.append((problem.num_nodes, problem.num_edges))
    assert sizes[1] == sizes[2]
    assert sizes[0][0] <= sizes[1][0]


def test_every_copy_of_a_class_is_built_alike():
    step, args = mlp_step(64, 16, 8)
    task = Task(trace(step, *args), mw.Auto())
    graph, groups = task.graph, task.grouping.groups
    for members in task.folded.members:
        first = groups[members[0]]
        for other in (groups[m] for m in members[1:]):
            kinds = [[graph.types[v] for v in g.values] for g in (first, other)]
            assert kinds[0] == kinds[1]
            assert [graph.ops[i].primitive for i in first.ops] == [graph.ops[i].primitive for i in other.ops]
    assert sum(len(m) for m in task.folded.members) == len(groups)


@pytest.mark.parametrize(("where", "shape"), [("1x4 cpu", (2, 2)), ("2x4 h100", (2, 4))])
def test_tied_groups_have_the_prices_of_the_one_that_stands_for_them(where, shape):
    machine, traced = mw.cluster(where).mesh(shape), traced_zoo("gpt-tiny", layers=4)
    if machine.is_cpu:  # whose backend holds some of the gradients wider than others
        traced = replace(traced, graph=traced.graph.for_cpu())
    formulation = Task(traced, mw.Auto()).formulate(machine)
    assert max(map(len, formulation.folded.members)) > 1
    for group, which in enumerate(formulation.folded.group_class):
        own, price = formulation._table(group), formulation.costs[which]
        np.testing.assert_allclose(own.compute + own.communication, price, rtol=1e-12)
