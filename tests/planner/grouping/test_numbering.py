"""Numbering: equal rows and stretches get one number, in the order in which they are first seen."""

import doctest

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.grouping import numbering
from meshwright.planner.grouping.numbering import number_rows, number_stretches, pack, sort_by

SMALL = st.integers(-2, 3)
LARGE = st.sampled_from([-(2**40), -1, 0, 1, 2**40, 2**40 + 1])


def first_seen(items):
    known = {}
    return [known.setdefault(item, len(known)) for item in items]


def columns(rows, width=3):
    return [np.array([row[i] for row in rows], np.int64) for i in range(width)]


def test_examples_run():
    assert doctest.testmod(numbering).failed == 0


@given(st.lists(st.tuples(SMALL | LARGE, SMALL | LARGE, SMALL | LARGE), max_size=30))
def test_equal_rows_share_a_number(rows):
    numbers, first = number_rows(*columns(rows))
    assert numbers.tolist() == first_seen(rows)
    assert [rows[i] for i in first] == list(dict.fromkeys(rows))
    assert first_seen(pack(*columns(rows)).tolist()) == first_seen(rows)


@given(st.lists(st.tuples(st.lists(SMALL, max_size=3), SMALL), max_size=20))
def test_equal_stretches_share_a_number(items):
    values = np.array([v for stretch, _ in items for v in stretch], np.int64)
    start = np.cumsum([0, *(len(stretch) for stretch, _ in items)])
    numbers = number_stretches(values, start, np.array([beside for _, beside in items], np.int64))
    assert numbers.tolist() == first_seen([(tuple(stretch), beside) for stretch, beside in items])


@given(st.lists(st.integers(-1, 4), max_size=30))
def test_things_are_sorted_by_number_and_keep_their_order(numbers):
    items, start, rank = sort_by(np.array(numbers, np.int64), 5)
    for number in range(5):
        members = [i for i, n in enumerate(numbers) if n == number]
        assert items[start[number] : start[number + 1]].tolist() == members
        assert [rank[i] for i in members] == list(range(len(members)))
    assert all(rank[i] == -1 for i, n in enumerate(numbers) if n == -1)
