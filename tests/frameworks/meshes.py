"""The meshes every framework's models are planned on, and what must hold of each plan."""

import jax

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.planner import Task

SHAPES = ((1,), (3,), (8,), (2, 4), (2, 2, 2))


def check_plans(function, *args):
    """Plans on every mesh from one trace; structures are those of the arguments, and nothing lacks a rule."""
    task = Task(trace(function, *args), mw.Auto())
    for shape in SHAPES:
        plan = mw.Plan.of(task.plan([mw.Mesh.abstract(shape, alpha=1, beta=1)], lambda _: None))
        assert jax.tree.structure(plan.in_shardings) == jax.tree.structure(tuple(args))
        assert plan.unsplittable == ()
        assert plan.solution.lower_bound <= plan.cost.total * (1 + 1e-12)
        if shape == (1,):
            assert plan.cost.total == 0
        assert f"x={shape[0]}" in str(plan)
