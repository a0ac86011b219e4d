"""Copies as nodes of a choice problem: the same costs, and the bytes that are there at each time."""

import numpy as np
import pytest

from meshwright.solver import solve
from meshwright.solver.problem.check import price
from meshwright.solver.problem.copies import Copied, Lifetimes, copies_made, find_routes
from meshwright.solver.problem.priced import Usage, choice_problem
from meshwright.strategy.sharding import Axes

AXES = Axes((2, 2))
KEY = (0, 0, 1, 0)


def copied_of(rng):
    codes = AXES.legal_codes((4, 4))
    made, needed = rng.choice(codes, rng.integers(1, 6)), rng.choice(codes, rng.integers(1, 6))
    free, of_pair = rng.random(len(needed)) < 0.2, rng.uniform(1, 5, (codes.max() + 1,) * 2)
    resharding = np.where(free | (made[:, None] == needed), 0.0, of_pair[np.ix_(made, needed)])
    start = rng.integers(1, 4, 3)
    lives = (start, start + rng.integers(1, 3, 3), start - rng.integers(0, 2, 3), rng.random(3) < 0.5)
    saved = rng.uniform(0, 1, resharding.shape) if rng.random() < 0.3 else None
    return Copied(AXES, made, needed, free, resharding, saved, 16.0, Lifetimes(*lives))


def bytes_by_hand(copied, source, reader, time):
    made, needed = copied.made[source], copied.needed[reader]
    if made == needed or copied.free[reader]:
        return 0.0
    cuts = AXES.only_cuts(int(made), int(needed))
    total = 0.0
    for start, stop, ahead, cut in zip(*copied.live, strict=True):
        is_there = (start <= time < stop and not cut) if cuts else ahead <= time < stop
        total += is_there * copied.num_bytes / AXES.num_parts(needed)
    return total


@pytest.mark.parametrize("seed", range(40))
def test_a_route_costs_and_takes_what_its_edge_does(seed):
    copied, times = copied_of(np.random.default_rng(seed)), [0, 1, 2, 3]
    routes = find_routes({KEY: copied}, [KEY], times)
    for source in range(len(copied.made)):
        for reader in range(len(copied.needed)):
            choice = np.array([source, reader])
            expected = [bytes_by_hand(copied, source, reader, time) for time in times]
            spans = copies_made({KEY: copied}, choice)
            assert [spans.bytes_at(time) for time in times] == expected
            assert np.cumsum(spans.change(6))[:4].tolist() == pytest.approx(expected)
            assert [copied.bytes_at(time)[source, reader] for time in times] == expected
            if not routes:
                assert not any(expected)
                continue
            way = routes[KEY].strategy(choice)
            seconds = routes[KEY].before[source] + routes[KEY].after[:, reader]
            assert seconds[way] == pytest.approx(copied.resharding[source, reader])
            assert np.isinf(np.delete(seconds, way)).all()  # there is no other way
            assert routes[KEY].usage[:, way].tolist() == expected


@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_problems_with_routes_have_the_costs_of_problems_without(seed, same):
    """And their peak is that of nodes and copies together; an edge may lead from a node to itself."""
    rng = np.random.default_rng(seed)
    copied = copied_of(rng)
    if same:
        copied = copied._replace(made=np.resize(copied.made, len(copied.needed)))
        table = rng.uniform(1, 5, (AXES.legal_codes((4, 4)).max() + 1,) * 2)
        paid = copied.free | (copied.made[:, None] == copied.needed)
        copied = copied._replace(resharding=np.where(paid, 0.0, table[np.ix_(copied.made, copied.needed)]), saved=None)
    key = (0, 0, 0, 0) if same else KEY
    sizes = [len(copied.made)] if same else [len(copied.made), len(copied.needed)]
    costs, memory, times = [rng.uniform(1, 5, n) for n in sizes], Usage(6), {1: 0.0, 2: 1.0, 3: 0.0}
    columns = [memory.add(node, rng.uniform(0, 9, n)) for node, n in enumerate(sizes)]
    memory.take(np.array(columns), np.zeros(len(sizes)), np.full(len(sizes), 3), np.ones(len(sizes)))
    matrix = copied.resharding if copied.saved is None else copied.resharding - copied.saved
    routes = find_routes({key: copied}, [key], times)
    parts = ([1.0] * len(sizes), costs, {key: (2, matrix)}, memory, times, 1e9)
    plain, laid = choice_problem(*parts), choice_problem(*parts, routes)
    for choice in np.ndindex(*sizes):
        longer = np.array([*choice, *(route.strategy(np.array(choice)) for route in routes.values())])
        used = memory.profile(np.array(choice), copies_made({key: copied}, np.array(choice))).bytes_at
        peak = max(used[t] + free for t, free in times.items())
        assert price(laid, longer).cost == pytest.approx(price(plain, np.array(choice)).cost)
        assert price(laid, longer).peak_usage == pytest.approx(peak)
    assert solve(laid).cost == pytest.approx(solve(plain).cost)


def test_dear_memory_counts_copies():
    """Of two choices that cost the same, the one without a copy is taken where memory is dear."""
    codes = AXES.legal_codes((4, 4))[:2]
    alive = (np.array([1]), np.array([3]), np.array([1]), np.zeros(1, bool))
    copied = Copied(AXES, codes, codes, np.zeros(2, bool), np.zeros((2, 2)), None, 16.0, Lifetimes(*alive))
    costs, memory = [np.array([0.0, 0.1]), np.array([0.2, 0.0])], Usage(4)
    memory.take(np.zeros(0), np.zeros(0), np.zeros(0), np.zeros(0))
    parts = ([1, 1], costs, {KEY: (1, copied.resharding)}, memory, {}, None, {})
    assert solve(choice_problem(*parts)).choice.tolist() == [0, 1]
    assert solve(choice_problem(*parts, {1: 1.0}, {KEY: copied})).choice.tolist() == [1, 1]
    assert solve(choice_problem(*parts, {3: 1.0}, {KEY: copied})).choice.tolist() == [0, 1]
