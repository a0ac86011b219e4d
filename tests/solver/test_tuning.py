"""Tuning: every entry is used, and reaches the solve that it was given to."""

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

import meshwright.solver
from meshwright.contest.tuning import SearchTuning
from meshwright.planner.solving.tuning import ViewTuning
from meshwright.solver import Status, solve
from meshwright.solver.deadline import NEVER, Deadline
from meshwright.solver.tuning import TUNING, Tuning
from meshwright.solver.warm import example

SOLVER = Path(meshwright.solver.__file__).parent
PLANNING = [SOLVER.parent / "planner", SOLVER.parent / "explain"]


@pytest.mark.parametrize(
    ("tuning", "folders"),
    [(Tuning, [SOLVER]), (SearchTuning, [SOLVER.parent / "contest"]), (ViewTuning, PLANNING)],
)
def test_every_entry_is_read_somewhere(tuning, folders):
    text = "".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("*.py"))
    read = set(re.findall(r"\btuning\.([a-z_]+)", text))
    assert {field.name for field in fields(tuning)} <= read


def test_a_solve_reads_nothing_but_what_it_was_given():
    """Without memory that may be left out, rows to eliminate, or prices nearby, the optimum is the same."""
    problem = example(True, num_nodes=10)
    best = solve(problem, seconds=60)
    other = replace(TUNING, small_memory=0.0, rows=0.0, fan=0, minima_reach=0.0)
    found = solve(problem, seconds=60, tuning=other)
    assert found.status == best.status == Status.OPTIMAL and found.cost == best.cost


def test_a_deadline_tells_what_is_left_by_its_own_clock():
    now = [100.0]
    deadline = Deadline.after(10.0, lambda: now[0])
    assert (deadline.left, deadline.is_over, deadline.part(0.5).at, deadline.within(3.0).at) == (
        10.0,
        False,
        105.0,
        103,
    )
    assert deadline.part(0.1, least=4.0).at == 104.0 and deadline.part(0.1, least=40.0).at == 110.0
    now[0] = 111.0
    assert deadline.is_over and deadline.left == 0.0 and deadline.part(0.5).is_over
    assert not NEVER.is_over and NEVER.within(0.0).left == 0.0
