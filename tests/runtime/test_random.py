"""Forty-four random pairs of a program and a plan, good or bad: whatever is split, one device's numbers come out.

`python benchmarks/equality.py --pairs 5000` tries more of them.
"""

import pytest

from tests.generator.pairs import PLANS, outcome

pytestmark = pytest.mark.devices


# Programs that together have every step, with and without a batch, and every primitive of the first forty.
SEEDS = (3, 4, 6, 7, 10, 11, 12, 13, 14, 16, 18, 21, 24, 25, 26, 28, 29, 30, 33, 34, 36, 39)


@pytest.mark.sweep(6)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_program_computes_what_one_device_computes_under_any_plan(seed):
    planned = 3 + seed // 5 % 2  # by a method or for a cluster, in turn; each fifth program runs in microbatches
    assert PLANS[0] == "random" != PLANS[planned]
    found = [outcome(seed, number) for number in (0, planned)]
    assert [f"{one.pair}: {one.trouble}" for one in found if one.trouble] == []
