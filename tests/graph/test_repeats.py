"""Runs that repeat: checked against a search by hand over every start, stop and period."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshwright.graph.repeats import RepeatedRun, find_runs

find_runs([1, 1])  # compiled before anything is timed


def longest_by_hand(tokens):
    """Length of the longest stretch that repeats with some period at least twice."""
    size = len(tokens)
    best = 0
    for period in range(1, size // 2 + 1):
        for start in range(size):
            stop = start + period
            while stop < size and tokens[stop] == tokens[stop - period]:
                stop += 1
            if stop - start >= 2 * period:
                best = max(best, stop - start)
    return best


def is_run(tokens, run):
    return run.stop - run.start >= 2 * run.period and all(
        tokens[i] == tokens[i + run.period] for i in range(run.start, run.stop - run.period)
    )


@given(st.lists(st.integers(0, 2), max_size=24))
def test_runs_repeat_are_disjoint_and_the_longest_is_among_them(tokens):
    runs = find_runs(tokens)
    assert all(is_run(tokens, run) for run in runs)
    assert all(a.stop <= b.start for a, b in pairwise(runs))
    assert max((run.stop - run.start for run in runs), default=0) == longest_by_hand(tokens)


@given(st.lists(st.integers(0, 2), max_size=24))
def test_nothing_that_repeats_is_left_between_runs(tokens):
    runs = find_runs(tokens)
    ends = [0, *(end for run in runs for end in (run.start, run.stop)), len(tokens)]
    for first, last in zip(ends[::2], ends[1::2], strict=True):
        assert longest_by_hand(tokens[first:last]) == 0


@given(st.lists(st.integers(0, 3), max_size=20), st.integers(2, 6), st.lists(st.integers(4, 6), max_size=5))
def test_a_planted_run_is_covered(layer, laps, prefix):
    tokens = prefix + layer * laps
    covered = {i for run in find_runs(tokens) for i in range(run.start, run.stop)}
    if layer:
        longest = longest_by_hand(tokens)
        assert longest >= laps * len(layer)
        assert len(covered) >= longest


def test_the_smallest_period_of_equals_is_taken():
    assert find_runs([1, 2] * 6) == [RepeatedRun(0, 12, 2)]
    assert find_runs([7] * 5) == [RepeatedRun(0, 5, 1)]


def test_two_separate_runs_are_both_found():
    tokens = [1, 2] * 4 + [9] + [3, 4, 5] * 3
    assert find_runs(tokens) == [RepeatedRun(0, 8, 2), RepeatedRun(9, 18, 3)]


def test_nothing_repeats():
    assert find_runs([]) == []
    assert find_runs([1, 2, 3]) == []
