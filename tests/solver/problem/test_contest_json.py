"""Reading and writing the contest's JSON, and the messages for files that cannot be read."""

import gzip
import json

import numpy as np
import pytest

from meshwright.errors import ProblemError
from meshwright.solver import ChoiceProblem, price
from meshwright.solver.problem import contest_json
from tests.solver.problems import brute_force, random_problem

TEXT = {
    "problem": {
        "name": "tiny",
        "nodes": {"intervals": [[0, 2], [3, 3]], "costs": [[1, 2], [3]], "usages": [[1, 1], [2]]},
        "edges": {"nodes": [[0, 1]], "costs": [[5, 10**18]]},
        "usage_limit": 4,
    }
}


@pytest.mark.parametrize("name", ["tiny.json", "tiny.json.gz"])
def test_a_problem_survives_the_disk(tmp_path, name):
    for seed in range(8):
        problem = random_problem(seed, max_nodes=5, max_states=3, whole=seed % 2 == 0)
        problem.save(tmp_path / name)
        again = ChoiceProblem.load(tmp_path / name)
        assert again.limit == problem.limit
        # Further rows of a node came back as tied nodes: the optimum is the same.
        if again.num_nodes <= 7:
            assert brute_force(again) == pytest.approx(brute_force(problem), rel=1e-12)


def test_fractions_are_read():
    text = json.loads(json.dumps(TEXT))
    text["problem"]["nodes"]["costs"] = [[1.5, 2], [3]]
    assert contest_json.from_text(json.dumps(text).encode()).cost.tolist() == [1.5, 2, 3]


def test_empty_intervals_make_no_row(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(TEXT))
    problem = ChoiceProblem.load(tmp_path / "p.json")
    assert problem.row_node.tolist() == [0]
    assert price(problem, [0, 0]).cost == 9


def _without(*path):
    text = json.loads(json.dumps(TEXT))
    inner = text
    for key in path[:-1]:
        inner = inner[key]
    del inner[path[-1]]
    return json.dumps(text).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "field problem is missing"),
        (_without("problem", "nodes"), "field problem.nodes is missing"),
        (_without("problem", "edges", "costs"), "field problem.edges.costs is missing"),
        (json.dumps(TEXT).replace("[[0, 1]]", "[[0, 1], [0, 1]]").encode(), "2 pairs of nodes and 1 lists of costs"),
        (json.dumps(TEXT).replace("[[0, 1]]", "[[0, 9]]").encode(), "edge 0 joins nodes"),
        (json.dumps(TEXT).replace("[[0, 1]]", "[[0]]").encode(), "edge 0 is"),
        (gzip.compress(json.dumps(TEXT).encode(), mtime=0)[:-20], "truncated gzip"),
        (b"\x1f\x8b" + b"\0" * 30, "damaged gzip"),
    ],
)
def test_unreadable_files_are_named_in_one_line(tmp_path, data, message):
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(ProblemError, match=message) as error:
        contest_json.load(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(ProblemError, match="cannot be read"):
        ChoiceProblem.load(tmp_path / "nothing.json")


def test_impossible_costs_are_written_as_the_contest_does(tmp_path):
    ChoiceProblem(costs=[[np.inf, 1]]).save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["problem"]["nodes"]["costs"] == [[10**18, 1]]
