"""Orders of kernels: each after what it reads, and of two the one that takes less."""

import random

import pytest

from meshwright.graph.orders import Node, Region


def drawn(seed, count=30):
    """Kernels that each read up to three values made before."""
    draw = random.Random(seed)
    nodes = {i: Node([i], frozenset(draw.sample(range(i), min(i, draw.randint(1, 3))))) for i in range(count)}
    return Region(nodes, [float(draw.randint(1, 100)) for _ in range(count)], draw.sample(range(count), 3))


def counted(region, order):
    """The most memory of an order, value by value."""
    last = {v: max((at for at, n in enumerate(order) if v in region.nodes[n].reads), default=at)
            for at, v in enumerate(order)}  # fmt: skip
    last |= dict.fromkeys(region.ends, len(order))
    return max(sum(region.size[v] for v in order[: at + 1] if last[v] >= at) for at in range(len(order)))


@pytest.mark.parametrize("seed", range(20))
def test_every_order_runs_what_is_needed_each_after_what_it_reads(seed):
    region = drawn(seed)
    first = region.depth_first()
    greedy = region.greedy(first)
    needed, stack = set(), list(region.ends)
    while stack:
        value = stack.pop()
        if value not in needed:
            needed.add(value)
            stack += region.nodes[value].reads
    assert set(first) == set(greedy) == needed
    for order in (first, greedy):
        place = {name: at for at, name in enumerate(order)}
        assert len(place) == len(order)
        assert all(place[v] < place[name] for name in order for v in region.nodes[name].reads)
        assert region.peak(order) == counted(region, order)
    best, num_bytes = region.best()
    assert num_bytes == region.peak(best) == min(region.peak(first), region.peak(greedy))


def test_the_deepest_is_run_first_and_the_greedy_order_gives_back_what_it_can():
    # 0 → 1 → 2 goes on; 3 reads the large 0, is small, and is asked for at the end only.
    nodes = {0: Node([0], frozenset()), 1: Node([1], frozenset({0})), 2: Node([2], frozenset({1})),
             3: Node([3], frozenset({0})), 4: Node([4], frozenset({2, 3}))}  # fmt: skip
    region = Region(nodes, [100.0, 40.0, 40.0, 1.0, 1.0], [4])
    assert region.depth_first() == [0, 1, 2, 3, 4]
    assert region.greedy(region.depth_first()) == [0, 3, 1, 2, 4]
    assert region.best() == ([0, 3, 1, 2, 4], 141.0)
