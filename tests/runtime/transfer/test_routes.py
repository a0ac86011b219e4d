"""Routes: every target gets its box, no byte moves that need not, checked cell by cell on small arrays."""

from collections import Counter

import numpy as np
import pytest

from meshwright.runtime.transfer.routes import find_route, split, volume
from tests.runtime.transfer.bounds import least_bytes


def grid(shape, counts, devices):
    """Boxes of a grid with so many cells along each dim, dealt to devices in order, as replicas once all are dealt."""
    boxes = [
        tuple((i * n // c, (i + 1) * n // c) for i, n, c in zip(cell, shape, counts, strict=True))
        for cell in np.ndindex(*counts)
    ]
    return {device: boxes[i % len(boxes)] for i, device in enumerate(devices)}


def mark(shape, boxes):
    cells = np.zeros(shape, bool)
    for box in boxes:
        cells[tuple(slice(*interval) for interval in box)] = True
    return cells


def counted(shape, source, target, group_of):
    """The least elements that move between devices and cross between groups, counted cell by cell."""
    moved = sum(
        int((mark(shape, [box]) & ~mark(shape, [source[d]] if d in source else [])).sum()) for d, box in target.items()
    )
    crossing = 0
    for group in {group_of(device) for device in target}:
        needed = mark(shape, [box for device, box in target.items() if group_of(device) == group])
        held = mark(shape, [box for device, box in source.items() if group_of(device) == group])
        crossing += int((needed & ~held).sum())
    return crossing, moved


def check(shape, source, target, group_of, **options):
    """Follows a route by hand."""
    route = find_route(source, target, 4, group_of, **options)
    has = {device: mark(shape, [box]) for device, box in source.items()}
    received = {device: np.zeros(shape, int) for device in target}
    for moves, is_share in ((route.fetches, False), (route.shares, True)):
        for move in moves:
            place = tuple(slice(*interval) for interval in move.box)
            assert (received if is_share else has)[move.source][place].all(), "nobody sends what it does not have"
            received[move.target][place] += 1
            assert not is_share or group_of(move.source) == group_of(move.target)
    for device, box in target.items():
        assert (received[device] == mark(shape, [box])).all(), "each target gets each of its cells once"
    crossing, moved = counted(shape, source, target, group_of)
    bounds = least_bytes(source, target, 4, group_of)
    assert (route.crossing_bytes, route.moved_bytes) == (4 * crossing, 4 * moved)
    assert (bounds.crossing_bytes, bounds.moved_bytes) == (4 * crossing, 4 * moved)
    return route


@pytest.mark.parametrize("seed", range(60))
def test_random_routes_deliver_everything_at_the_lower_bound(seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.choice([1, 2, 3, 4, 6, 12], rng.integers(0, 4)))
    sides = []
    for _ in range(2):
        counts = [int(rng.choice([c for c in (1, 2, 3, 4) if n % c == 0])) for n in shape]
        devices = rng.permutation(24)[: int(np.prod(counts, dtype=int)) * int(rng.integers(1, 4))]
        sides.append(grid(shape, counts, [int(d) for d in devices]))
    per_group = int(rng.choice([1, 4, 24]))
    check(shape, *sides, lambda device: device // per_group, least_part_bytes=int(rng.choice([1, 16, 2**20])))


def test_the_devices_of_a_host_fetch_a_part_each_and_share_it():
    source = grid((8, 6), (1, 1), [0, 1])
    target = grid((8, 6), (1, 1), [4, 5])
    route = check((8, 6), source, target, lambda device: device // 4, least_part_bytes=1)
    assert {(move.source, move.target, move.box) for move in route.fetches} == {
        (0, 4, ((0, 4), (0, 6))),
        (1, 5, ((4, 8), (0, 6))),
    }, "half from each of the source's replicas, to each of the target's"
    assert {(move.source, move.target) for move in route.shares} == {(4, 5), (5, 4)}
    small = check((8, 6), source, target, lambda device: device // 4)
    assert len(small.fetches) == 1 and len(small.shares) == 1, "one fetches all of what is too small to be split"


def test_replicas_send_equally_much():
    source = grid((8,), (1,), [0, 1, 2, 3])
    route = check((8,), source, grid((8,), (8,), range(10, 18)), lambda device: 0)
    assert Counter(move.source for move in route.fetches) == dict.fromkeys(range(4), 2)


def test_what_is_near_is_preferred():
    source = grid((4,), (1,), [0, 5, 9])
    route = check((4,), source, grid((4,), (2,), [5, 6]), lambda device: device // 5)
    assert [(move.source, move.target) for move in route.fetches] == [(5, 5), (5, 6)]
    assert route.crossing_bytes == 0


def test_equal_layouts_are_aligned_unless_replicas_of_a_host_would_fetch_twice():
    source, target = grid((8,), (2,), [0, 1, 2, 3]), grid((8,), (2,), [4, 5, 6, 7])
    for group_of, aligned in ((lambda device: 0, True), (lambda device: device // 4, False)):
        route = find_route(source, target, 4, group_of)
        assert route.is_aligned(source, target, 4, group_of) == aligned
    other = grid((8,), (4,), [4, 5, 6, 7])
    assert not find_route(source, other, 4, lambda device: 0).is_aligned(source, other, 4, lambda device: 0)


def test_parts_are_about_equal_along_the_longest_dim():
    assert [volume(box) for box in split(((0, 2), (3, 10)), 3)] == [4, 4, 6]
    assert split(((0, 2), (0, 3)), 5) == [((0, 2), (i, i + 1)) for i in range(3)], "no part is empty"
    assert split((), 4) == [()]
