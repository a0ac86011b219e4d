"""The dynamic programme against brute force, on thousands of small cases with uneven costs and binding memory."""

import itertools

import numpy as np
import pytest

from meshwright.pipeline.schedules import in_flight
from meshwright.pipeline.stages import Ranges, solve_stages


def random_case(rng):
    """Layers, devices in one or two groups, and costs in which more microbatches in flight may cost more or not fit."""
    num_layers, num_devices = rng.integers(1, 7), rng.integers(1, 9)
    size = np.array([n for n in (1, 2, 4, 8) if n <= num_devices])
    most = min(num_layers, num_devices)
    shape = (len(size), num_layers, num_layers + 1)
    fill, busy = np.full((most, *shape), np.inf), np.full((most, *shape), np.inf)
    work = rng.uniform(0.2, 3, num_layers)
    memory = rng.uniform(0.2, 2, num_layers)
    limit = rng.uniform(0.5, 8)
    for kind, first, last in itertools.product(range(shape[0]), range(num_layers), range(num_layers + 1)):
        if last <= first:
            continue
        time = work[first:last].sum() / size[kind] ** rng.uniform(0.6, 1) * rng.uniform(0.8, 1.2)
        wait = rng.uniform(0, 8)
        for held in range(most):
            needed = memory[first:last].sum() * (1 + held) / size[kind]
            if needed <= limit:
                fill[held, kind, first, last], busy[held, kind, first, last] = time, wait * time
            elif needed <= 1.5 * limit:  # as if another way to split it had to be taken, quicker in one respect
                fill[held, kind, first, last], busy[held, kind, first, last] = 0.8 * time, (1.3 * wait + 0.5) * time
    border = rng.integers(0, num_devices + 1)
    left = np.arange(num_devices + 1)
    start = num_devices - left  # the device at which a stage begins
    allowed = np.array([(start + n <= border) | (start >= border) for n in size])
    return Ranges(fill, busy, size, allowed)


def brute_force(ranges, held):
    """Every way to cut the layers and to give the pieces submeshes."""
    _, kinds, num_layers, _ = ranges.fill.shape
    num_devices, best = ranges.allowed.shape[1] - 1, np.inf
    for count in range(1, num_layers + 1):
        numbers = held(count)
        if numbers is None:
            continue
        for cuts in itertools.combinations(range(1, num_layers), count - 1):
            edges = (0, *cuts, num_layers)
            for submeshes in itertools.product(range(kinds), repeat=count):
                left, fill, busy = num_devices, 0.0, 0.0
                for stage, kind in enumerate(submeshes):
                    if ranges.size[kind] > left or not ranges.allowed[kind, left]:
                        break
                    place = (numbers[stage] - 1, kind, edges[stage], edges[stage + 1])
                    fill, busy = fill + ranges.fill[place], max(busy, ranges.busy[place])
                    left -= ranges.size[kind]
                else:
                    if left == 0:
                        best = min(best, fill + busy)
    return best


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("seed", range(5))
def test_the_programme_finds_the_brute_force_optimum(schedule, seed):
    rng, solved = np.random.default_rng(seed), 0
    for _ in range(150):
        ranges = random_case(rng)
        most = ranges.fill.shape[0]
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
        fill = sum(ranges.fill[p.in_flight - 1, p.kind, p.first, p.last] for p in found.parts)
        busy = max(ranges.busy[p.in_flight - 1, p.kind, p.first, p.last] for p in found.parts)
        assert found.total_s == pytest.approx(fill + busy)
        assert [p.in_flight for p in found.parts] == list(held(len(found.parts)))
        assert solve_stages(ranges, held, best_s=expected * (1 - 1e-6)) is None
    assert solved > 30
