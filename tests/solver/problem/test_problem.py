"""Building choice problems: shared storage, several rows, and a named fault for every kind of bad input."""

import pickle

import numpy as np
import pytest

from meshwright.errors import ProblemError
from meshwright.solver import ChoiceProblem, price

GOOD = {
    "costs": [[1, 2], [3]],
    "usages": [[1, 1], [2]],
    "intervals": [[0, 2], [1, 3]],
    "edges": [(0, 1, [5, 6])],
    "limit": 4,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"costs": []}, "costs is empty"),
        ({"costs": [[1, 2], []]}, "node 1 has no strategies"),
        ({"costs": [[1, "x"], [3]]}, "costs of node 0, entry 1 is 'x'"),
        ({"costs": [[1, float("nan")], [3]]}, "costs of node 0, entry 1 is nan"),
        ({"costs": [[1, 10**400], [3]]}, "costs of node 0, entry 1 is too large"),
        ({"costs": [[1, True], [3]]}, None),
        ({"costs": [[1, 2], 3]}, "costs of node 1 is 3"),
        ({"costs": "ab"}, "costs is str"),
        ({"usages": [[1, 1]]}, "usages has 1 entries for 2 nodes"),
        ({"usages": [[1], [2]]}, "node 0 has 1 usages for 2 strategies"),
        ({"usages": [[1, -1], [2]]}, "usages of node 0, entry 1 is -1.0"),
        ({"usages": [[1, float("inf")], [2]]}, "usages of node 0, entry 1 is inf"),
        ({"usages": None}, "usages is missing"),
        ({"intervals": [[0, 2], [-1, 3]]}, "interval 1 is .*: times must be 0 or more"),
        ({"intervals": [[0, 2], [1]]}, "interval 1 is .*: give two whole numbers"),
        ({"intervals": [[0, 2], [1, 2.5]]}, "interval 1 is .*: give two whole numbers"),
        ({"edges": [(0, 2, [5, 6])]}, r"edge 0 joins nodes \[0, 2\]; the nodes are 0 to 1"),
        ({"edges": [(1, 1, [5])]}, "edge 0 joins node 1 to itself"),
        ({"edges": [(0, 1, [5])]}, "edge 0 has 1 costs; .* need 2"),
        ({"edges": [(0, 1, np.zeros((1, 2)))]}, "edge 0 has a 1×2 matrix; nodes 0 and 1 need 2×1"),
        ({"edges": [(0, 1)]}, "edge 0 has 2 parts"),
        ({"edges": [(0, 1, [5, float("nan")])]}, "costs of matrix 0, entry 1 is nan"),
        ({"limit": -1}, "limit is -1"),
        ({"limit": float("nan")}, "limit is nan"),
        ({"limit": "much"}, "limit is 'much'"),
    ],
)
def test_every_fault_is_named(change, message):
    if message is None:
        ChoiceProblem(**{**GOOD, **change})  # a bool is a number in Python; it is read as 1
        return
    with pytest.raises(ProblemError, match=message) as error:
        ChoiceProblem(**{**GOOD, **change})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((0, 0, 1), "row 0 has 3 parts"),
        ((5, 0, 1, [1, 1]), "row 0 names node 5"),
        ((0, 0, 1, [1]), "row 0 has 1 usages for the 2 strategies of node 0"),
    ],
)
def test_bad_rows_are_named(row, message):
    with pytest.raises(ProblemError, match=message):
        ChoiceProblem.from_rows([[1, 2]], [], [row], 3)


def test_edges_that_share_an_array_share_storage():
    matrix = np.arange(4.0).reshape(2, 2)
    problem = ChoiceProblem(costs=[[0, 0]] * 3, edges=[(0, 1, matrix), (1, 2, matrix), (0, 2, matrix.copy())])
    assert problem.edge_matrix.tolist() == [0, 0, 1]
    assert problem.matrix.size == 8
    assert price(problem, [0, 1, 0]).cost == 1 + 2 + 0


def test_parallel_edges_add_up():
    problem = ChoiceProblem(costs=[[0, 0], [0]], edges=[(0, 1, [1, 2]), (1, 0, [[10, 20]])])
    assert price(problem, [1, 0]).cost == 22


def test_problems_are_read_only_and_survive_pickling():
    problem = ChoiceProblem(**GOOD)
    with pytest.raises(ValueError, match="read-only"):
        problem.cost[0] = 7
    copy = pickle.loads(pickle.dumps(problem))
    assert repr(copy) == repr(problem)
    assert copy.with_limit(None).limit == np.inf
