"""The dynamic programme against brute force, on thousands of small cases with uneven costs and binding memory."""

import itertools

import numpy as np
import pytest

from meshwright.pipeline.prices.kernels import price_ranges
from meshwright.pipeline.search.unequal_stages import Ranges, may_beat, solve_stages
from meshwright.schedules import in_flight

pytestmark = pytest.mark.slow


def random_case(rng):
    """Layers, devices in one or two groups, and costs in which more microbatches in flight may cost more or not fit.

    Of each submesh there is a second kind, which adds less to the time of all and is busier besides, or the reverse.
    """
    num_layers, num_devices = rng.integers(1, 7), rng.integers(1, 9)
    size = np.array([n for n in (1, 2, 4, 8) if n <= num_devices])
    most = min(num_layers, num_devices)
    shape = (len(size), most, num_layers, num_layers + 1)
    fill, busy = np.full(shape, np.inf), np.full(shape, np.inf)
    work = rng.uniform(0.2, 3, num_layers)
    memory = rng.uniform(0.2, 2, num_layers)
    limit = rng.uniform(0.5, 8)
    for kind, first, last in itertools.product(range(len(size)), range(num_layers), range(num_layers + 1)):
        if last <= first:
            continue
        time = work[first:last].sum() / size[kind] ** rng.uniform(0.6, 1) * rng.uniform(0.8, 1.2)
        wait = rng.uniform(0, 8)
        for held in range(most):
            needed = memory[first:last].sum() * (1 + held) / size[kind]
            if needed <= limit:
                fill[kind, held, first, last], busy[kind, held, first, last] = time, wait * time
            elif needed <= 1.5 * limit:  # as if another way to split it had to be taken, quicker in one respect
                fill[kind, held, first, last], busy[kind, held, first, last] = 0.8 * time, (1.3 * wait + 0.5) * time
    border = rng.integers(0, num_devices + 1)
    left = np.arange(num_devices + 1)
    start = num_devices - left  # the device at which a stage begins
    if rng.random() < 0.5:
        less = rng.uniform(0.3, 1.2, fill.shape)
        fill, busy = np.concatenate([fill, less * fill]), np.concatenate([busy, busy + rng.uniform(-1, 2) * (1 - less)])
        size = np.concatenate([size, size])
    allowed = np.array([(start + n <= border) | (start >= border) for n in size])
    return Ranges(fill, np.maximum(busy, 0.0), size, allowed)


def brute_force(ranges, held):
    """Every way to cut the layers and to give the pieces submeshes."""
    kinds, _, num_layers, _ = ranges.fill.shape
    fill, busy, size, allowed = (table.tolist() for table in (ranges.fill, ranges.busy, ranges.size, ranges.allowed))

    def from_here(stage, numbers, first, left, filled, busiest):
        if stage == len(numbers):
            return filled + busiest if left == 0 and first == num_layers else np.inf
        best = np.inf
        for kind in range(kinds):
            if size[kind] > left or not allowed[kind][left]:
                continue
            adds, own = fill[kind][numbers[stage] - 1][first], busy[kind][numbers[stage] - 1][first]
            for last in range(first + 1, num_layers - (len(numbers) - stage) + 2):
                if adds[last] < np.inf:
                    rest = (left - size[kind], filled + adds[last], max(busiest, own[last]))
                    best = min(best, from_here(stage + 1, numbers, last, *rest))
        return best

    counts = [numbers for count in range(1, num_layers + 1) if (numbers := held(count)) is not None]
    return min((from_here(0, numbers, 0, ranges.allowed.shape[1] - 1, 0.0, 0.0) for numbers in counts), default=np.inf)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("seed", range(5))
def test_the_programme_finds_the_brute_force_optimum(schedule, seed):
    rng, solved = np.random.default_rng(seed), 0
    for _ in range(150):
        ranges = random_case(rng)
        most = ranges.fill.shape[1]
        microbatches = int(rng.integers(1, most + 1))

        def held(count, microbatches=microbatches, most=most):
            if schedule == "zb-h1" and count > most - 1:
                return None
            return [min(n, most) for n in in_flight(schedule, count, microbatches)]

        expected, found = brute_force(ranges, held), solve_stages(ranges, held)
        if np.isinf(expected):
            assert found is None
            continue
        solved += 1
        assert found.total_s == pytest.approx(expected, rel=1e-9)
        fill = sum(ranges.fill[p.kind, p.in_flight - 1, p.first, p.last] for p in found.parts)
        busy = max(ranges.busy[p.kind, p.in_flight - 1, p.first, p.last] for p in found.parts)
        assert found.total_s == pytest.approx(fill + busy)
        assert [p.in_flight for p in found.parts] == list(held(len(found.parts)))
        assert solve_stages(ranges, held, best_s=expected * (1 - 1e-6)) is None
    assert solved > 30


def random_options(rng, num_layers, most):
    """Options of one submesh: quick for a microbatch and slow once a step, or the reverse; lean, or not."""
    count = int(rng.integers(1, 6))
    often, once = rng.uniform(0.1, 2, (2, count, num_layers))
    leans = rng.uniform(0.2, 1, (count, 1))
    once *= rng.uniform(0, 8, (count, 1))
    weights = often * rng.uniform(0, 1 / 3, (count, 1))
    held, state, transient = leans * rng.uniform(0, 1, (3, count, num_layers))
    rows = np.stack([often, weights, once, state, state, held], axis=1)
    sums = np.concatenate([np.zeros((count, 6, 1)), np.cumsum(rows, axis=2)], axis=2)
    ways = rng.uniform(0, 0.3, (count, 2, 2, 2))
    ties = np.array([[0, num_layers - 1]]) if num_layers > 1 else np.zeros((0, 2), np.int64)
    shared = rng.uniform(0, 0.5, (2, count, len(ties)))
    transfer = rng.uniform(0, 0.5, (count, num_layers + 1))
    transfer[:, -1] = 0.0
    return sums, transient, ways, ties, *shared, transfer


def priced(options, limit, pace, floor, best_s, most):
    """The tables of all ranks of some options."""
    num_layers = options[1].shape[1]
    shape = (len(options[0]), most, num_layers, num_layers + 1)
    tables = np.full(shape, np.inf), np.full(shape, np.inf), np.full(shape, -1)
    ranks = price_ranges(*options, limit, *pace, floor, best_s, *tables)
    return [table[: max(ranks, 1)] for table in tables]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_no_option_that_is_left_out_could_have_been_part_of_the_best(schedule):
    rng, several = np.random.default_rng(7), 0
    for _ in range(150):
        num_layers, num_devices = int(rng.integers(1, 6)), int(rng.integers(1, 7))
        most, microbatches = min(num_layers, num_devices), int(rng.integers(1, 12))
        size = [n for n in (1, 2, 4) if n <= num_devices]
        pace = (microbatches, 2.0 if schedule == "zb-h1" else 0.0)
        options = [random_options(rng, num_layers, most) for _ in size]
        limit = rng.uniform(1, 6)

        def held(count, microbatches=microbatches, most=most):
            full = microbatches >= (2 if schedule == "zb-h1" else 0) * count
            return [min(n, most) for n in in_flight(schedule, count, microbatches)] if full else None

        def ranges(tables, sizes, num_devices=num_devices):
            fill, busy = (np.concatenate([table[i] for table in tables]) for i in (0, 1))
            sizes = np.array([n for n, table in zip(sizes, tables, strict=True) for _ in table[0]])
            return Ranges(fill, busy, sizes, np.ones((len(sizes), num_devices + 1), bool))

        none = np.zeros(num_layers + 1)
        each = [
            (n, [part if k == 3 else part[i : i + 1] for k, part in enumerate(some)])
            for n, some in zip(size, options, strict=True)
            for i in range(len(some[0]))
        ]
        alone = [priced(one, limit, pace, none, np.inf, most) for _, one in each]
        expected = brute_force(ranges(alone, [n for n, _ in each]), held)
        floor = np.min([np.diff(o[0][:, 0] - pace[1] * o[0][:, 1]).min(axis=0) for o in options], axis=0)
        floor = np.concatenate([[0.0], np.cumsum(floor)])
        for best_s in (np.inf, 1.1 * expected):
            together = [priced(some, limit, pace, floor, best_s, most) for some in options]
            found = solve_stages(ranges(together, size), held, best_s)
            loose = [priced(some, limit, pace, floor, best_s, 1) for some in options]
            assert found is None or may_beat(ranges(loose, size), best_s)
            assert (np.inf if found is None else found.total_s) == pytest.approx(expected, rel=1e-9)
        several += any(len(table[0]) > 1 for table in together)
        assert not may_beat(ranges(loose, size), floor[-1])  # no stages are quicker than the least that all layers add
    assert several > 50
