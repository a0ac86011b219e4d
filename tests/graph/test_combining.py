"""Reductions that are made one: those that are alike and do not need one another."""

import random

import pytest

from meshwright.graph.combining import combine
from meshwright.graph.orders import Node


def chain(*reads):
    """Nodes that each make the value of their own name."""
    return {name: Node([name], values) for name, values in enumerate(reads)}


def test_what_needs_one_another_is_reduced_one_after_the_other_and_the_rest_together():
    # 1 → 3 → 5 need one another; 2, 4 and 6 are the sums of what is made on the way.
    nodes = chain((), (0,), (1,), (1,), (3,), (3,), (5,), (2, 4, 6))
    groups = combine(nodes, [7], dict.fromkeys((2, 4, 6), "x"))
    assert groups == [[2, 4, 6]]
    assert combine(nodes, [7], dict.fromkeys((1, 3, 5), "x")) == [[1], [3], [5]]


def test_only_reductions_over_the_same_axes_are_combined():
    nodes = chain((), (0,), (0,), (0,), (1, 2, 3))
    assert sorted(combine(nodes, [4], {1: "x", 2: "y", 3: "x"})) == [[1, 3], [2]]


def test_what_was_combined_is_one_node_for_those_that_come_after():
    # Taking 1 and 3 together makes 3 wait for 1's operand: 2, which needs 3, then needs 1 as well.
    nodes = chain((), (0,), (3,), (0,), (1, 2))
    assert combine(nodes, [4], dict.fromkeys((1, 2, 3), "x")) == [[1, 3], [2]]


@pytest.mark.parametrize("seed", range(20))
def test_every_reduction_is_in_one_group_and_no_group_waits_for_itself(seed):
    draw = random.Random(seed)
    nodes = {i: Node([i], draw.sample(range(i), min(i, draw.randint(1, 3)))) for i in range(40)}
    nodes[40] = Node([40], range(40))
    keys = {i: draw.choice("xy") for i in draw.sample(range(40), 15)}
    groups = combine(nodes, [40], keys)
    assert sorted(name for group in groups for name in group) == sorted(keys)
    assert all(len({keys[name] for name in group}) == 1 for group in groups)
    where = {name: group[0] for group in groups for name in group}
    before = {name: set() for name in nodes}
    for name, node in nodes.items():
        before[where.get(name, name)] |= {where.get(v, v) for v in node.reads}
    done: set[int] = set()
    while ready := {n for n in before if n not in done and where.get(n, n) == n and before[n] <= done}:
        done |= ready
    assert done == {where.get(n, n) for n in nodes}  # no cycle
