"""Orders of kernels: each after what it reads, and the deepest first."""

import random

import pytest

from meshwright.graph.orders import Node, depth_first


def drawn(seed, count=30):
    """Kernels that each read up to three values made before."""
    draw = random.Random(seed)
    nodes = {i: Node([i], draw.sample(range(i), min(i, draw.randint(1, 3)))) for i in range(count)}
    return nodes, [float(draw.randint(1, 100)) for _ in range(count)], draw.sample(range(count), 3)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_needed_runs_once_and_after_what_it_reads(seed):
    nodes, size, ends = drawn(seed)
    order = depth_first(nodes, size, ends)
    needed, stack = set(), list(ends)
    while stack:
        value = stack.pop()
        if value not in needed:
            needed.add(value)
            stack += nodes[value].reads
    assert sorted(order) == sorted(needed)
    place = {name: at for at, name in enumerate(order)}
    assert all(place[v] < place[name] for name in order for v in nodes[name].reads)


def test_what_has_most_behind_it_comes_first_whatever_memory_it_takes():
    # 0 → 1 → 2 goes on, and 1 has two readers; 3 reads the large 0, is small, and is asked for at the end only.
    nodes = {0: Node([0], ()), 1: Node([1], (0,)), 2: Node([2], (1,)), 5: Node([5], (1,)),
             3: Node([3], (0,)), 4: Node([4], (3, 5, 2))}  # fmt: skip
    assert depth_first(nodes, [100.0, 40.0, 40.0, 1.0, 1.0, 1.0], [4]) == [0, 1, 2, 5, 3, 4]


def test_where_counts_are_equal_memory_decides():
    nodes = {0: Node([0], ()), 1: Node([1], ()), 2: Node([2], (0, 1))}
    assert depth_first(nodes, [1.0, 2.0, 1.0], [2]) == [1, 0, 2]
    assert depth_first(nodes, [2.0, 1.0, 1.0], [2]) == [0, 1, 2]
