"""A plan's numbers, counted again: from the choice problem, from the list of collectives, from the mesh's prices."""

import pytest

import meshwright as mw
from meshwright.planner.planner import Task
from meshwright.planner.reading.readback import Readback
from meshwright.solver import price, solve
from tests.planner.examples import mesh, traced_zoo

pytestmark = pytest.mark.slow

MODELS = [("mlp", {"hidden": 64, "layers": 4}), ("gpt-tiny", {}), ("llama-tiny", {"scan": True}), ("moe-tiny", {})]


@pytest.mark.parametrize("shape", [(8,), (2, 4)])
@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_cost_is_the_sum_of_its_collectives_and_the_solvers_price(name, options, shape):
    task = Task(traced_zoo(name, **options), mw.Auto())
    machine = mesh(shape, alpha=1, beta=(1, 0.1)[: len(shape)])
    formulation = task.formulate(machine)
    problem = formulation.problem({}, None)
    choice = solve(problem).choice
    priced = price(problem, choice)
    back = Readback(formulation, choice)
    assert priced.legal
    assert back.communication() == pytest.approx(priced.cost, rel=1e-9)
    assert sum(c.seconds for c in back.collectives) == pytest.approx(priced.cost, rel=1e-6)
    names = list(machine.names)
    for item in back.collectives:
        axes = tuple(names.index(a) for a in item.axes)
        assert item.seconds == pytest.approx(item.trips * machine.collective_s(item.kind, axes, item.bytes), abs=1e-9)
    plan = task.plan([machine], lambda _: None)
    assert plan.cost.total <= priced.cost * (1 + 1e-6)  # less where layers are better split apart
    assert plan.solution.lower_bound <= plan.cost.total * (1 + 1e-12)


def test_compute_and_communication_on_a_cluster_add_up():
    task = Task(traced_zoo("gpt-tiny", hidden=256, batch=64), mw.Auto())
    machine = mw.cluster("2x4 v100-32gb").mesh((2, 4))
    plan = task.plan([machine], lambda _: None)
    assert plan.cost.communication == pytest.approx(sum(c.seconds for c in plan.collectives), rel=1e-6, abs=1e-12)
    assert plan.cost.compute > 0


def test_collectives_name_where_they_come_from():
    plan = Task(traced_zoo("gpt-tiny"), mw.DataParallel()).plan([mesh((8,))], lambda _: None)
    gradients = [c for c in plan.collectives if c.purpose == "gradient"]
    assert gradients
    assert {c.phase for c in plan.collectives} <= {"forward", "backward", "update"}
    assert any("zoo" in c.source or ".py:" in c.source for c in plan.collectives)
    assert all(c.axes == ("x",) for c in plan.collectives)
