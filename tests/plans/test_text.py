"""Printing a plan."""

import meshwright as mw
from tests.planner.examples import mesh, mlp_step


def test_a_printed_plan_shows_mesh_step_and_folded_arguments():
    step, args = mlp_step(16, 16, layers=3)
    text = str(mw.plan(step, *args, mesh=mesh((2, 2)), method=mw.DataParallel()))
    assert "DataParallel on mesh x=2 × y=2 (abstract)" in text
    assert "compute +" in text
    assert "state/params/*/kernel  (3×: 0–2)" in text
    assert "all_reduce" in text
