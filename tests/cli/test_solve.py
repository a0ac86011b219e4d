"""The solve command: the answer line, the exit status, and one-line messages."""

import json

import pytest
import typer
from typer.testing import CliRunner

from meshwright.cli.solve import solve_command
from meshwright.solver import ChoiceProblem, price

app = typer.Typer()
app.command()(solve_command)


@pytest.fixture
def saved(tmp_path):
    problem = ChoiceProblem(costs=[[1, 2], [0, 5]], edges=[(0, 1, [[9, 0], [0, 9]])], name="tiny")
    problem.save(tmp_path / "tiny.json.gz")
    return problem, tmp_path / "tiny.json.gz"


def test_the_answer_line_comes_last_on_stdout(saved, tmp_path):
    problem, path = saved
    result = CliRunner().invoke(app, [str(path), "--seconds", "60", "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0
    choice = json.loads(result.stdout.splitlines()[-1])
    assert price(problem, choice).cost == 2
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["status"] == "optimal"
    assert written["choice"] == choice
    assert "optimal" in result.stderr


def test_bad_input_is_one_line_and_status_2(tmp_path):
    path = tmp_path / "bad.json"
    path.write_text('{"problem": {}}')
    result = CliRunner().invoke(app, [str(path)])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "problem.nodes is missing" in result.stderr


def test_infeasible_is_status_1_and_says_what_would_do(tmp_path):
    problem = ChoiceProblem(costs=[[1, 1]], usages=[[5, 7]], intervals=[(0, 1)], limit=2)
    problem.save(tmp_path / "p.json")
    result = CliRunner().invoke(app, [str(tmp_path / "p.json"), "--quiet"])
    assert result.exit_code == 1
    assert "At least 5 would be needed" in result.stderr
    assert result.stdout == ""
