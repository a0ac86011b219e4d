"""A step is grouped and priced once for all methods that plan it, and planned as by each of them alone."""

import meshwright as mw
from meshwright.planner.planner import program_task
from meshwright.planner.tasks import Tasks
from tests.planner.examples import traced_zoo


def test_methods_share_the_groups_and_the_prices_of_a_step_and_plan_it_as_each_would_alone():
    traced, meshes = traced_zoo("gpt-tiny", layers=1), [mw.cluster("1x4 h100").mesh((2, 2))]
    tasks, prices = Tasks(lambda *_: None), []
    for method in (mw.Zero(2), mw.Zero(3), mw.Auto()):
        task, views = tasks.of(traced, meshes, method)
        one = program_task(traced, meshes, method)[0]
        shared, alone = (each.plan(views, lambda _: None) for each in (task, one))
        assert shared.cost == alone.cost and shared.in_shardings == alone.in_shardings
        prices.append(task.formulate(meshes[0]).pricer)
    assert prices[0] is prices[1] is prices[2]


def test_steps_that_were_not_planned_lately_are_forgotten():
    meshes = [mw.cluster("1x4 h100").mesh((4,))]
    tasks, steps = Tasks(lambda *_: None), [traced_zoo("mlp", batch=8 * n, layers=1) for n in range(1, 7)]
    groupings = [tasks.of(step, meshes, mw.Zero(3))[0].grouping for step in steps]
    assert tasks.of(steps[-1], meshes, mw.Auto())[0].grouping is groupings[-1]
    assert tasks.of(steps[0], meshes, mw.Auto())[0].grouping is not groupings[0]
