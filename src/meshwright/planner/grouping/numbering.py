"""Numbers and sorts thousands of items: equal items get one number, in the order in which they are first seen."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from meshwright.arrays import Ints
from meshwright.jit import inline, kernel


class Numbers(Mapping[int, int]):
    """A mapping from whole numbers that is kept as an array, with -1 for missing keys.

    >>> Numbers(np.array([-1, 7])).get(1), 0 in Numbers(np.array([-1, 7]))
    (7, False)
    """

    def __init__(self, array: Ints):
        self._array = array

    def __getitem__(self, key: int) -> int:
        found = int(self._array[key])
        if found < 0:
            raise KeyError(key)
        return found

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int | np.integer) and bool(self._array[key] >= 0)

    def __iter__(self) -> Iterator[int]:
        return iter(np.flatnonzero(self._array >= 0).tolist())

    def __len__(self) -> int:
        return int((self._array >= 0).sum())


class Sorted(NamedTuple):
    """Items sorted by number: items of number ``n`` are ``items[start[n] : start[n + 1]]``, with ranks within it."""

    items: Ints
    start: Ints
    rank: Ints


def sort_by(numbers: Ints, count: int) -> Sorted:
    """Sorts items by their numbers below ``count``; items with -1 are left out.

    >>> sort_by(np.array([1, 0, -1, 1]), 2)
    Sorted(items=array([1, 0, 3]), start=array([0, 1, 3]), rank=array([ 0,  0, -1,  1]))
    """
    return Sorted(*_sorted(numbers, count))


@kernel
def _sorted(numbers, count):
    start, rank = np.zeros(count + 1, np.int64), np.full(len(numbers), -1)
    for i in range(len(numbers)):
        if numbers[i] >= 0:
            start[numbers[i] + 1] += 1
            rank[i] = start[numbers[i] + 1] - 1
    start = np.cumsum(start)
    items = np.empty(start[-1], np.int64)
    for i in range(len(numbers)):
        if numbers[i] >= 0:
            items[start[numbers[i]] + rank[i]] = i
    return items, start, rank


def starts(sizes: Ints) -> Ints:
    """Where each of several consecutive stretches begins, and where the last ends."""
    return np.concatenate([[0], np.cumsum(sizes)])


def ranges(first: Ints, size: Ints) -> Ints:
    """The whole numbers from each `first` on, `size` of them each."""
    return np.repeat(first - starts(size)[:-1], size) + np.arange(size.sum())


def pack(*columns: Ints) -> Ints:
    """One number for each row, given by its columns: equal where the rows are."""
    key, span = columns[0] - columns[0].min(initial=0), int(np.ptp(columns[0])) + 1 if len(columns[0]) else 1
    for column in columns[1:]:
        low, width = int(column.min(initial=0)), int(np.ptp(column)) + 1 if len(column) else 1
        if span * width >= 2**62:
            key = np.unique(key, return_inverse=True)[1]
            span = len(key)
        key, span = key * width + (column - low), span * width
    return key


def number_rows(*columns: Ints) -> tuple[Ints, Ints]:
    """The number of each row, given by its columns, and where each number is first seen.

    >>> number_rows(np.array([7, 5, 7, 5]), np.array([0, 1, 0, 2]))
    (array([0, 1, 0, 2]), array([0, 1, 3]))
    """
    rows = pack(*columns)
    found = _number(rows[:0], np.zeros(len(rows) + 1, np.int64), rows)
    first = np.empty(found.max(initial=-1) + 1, np.int64)
    first[found[::-1]] = np.arange(len(rows))[::-1]  # the last write wins
    return found, first


def number_stretches(values: Ints, start: Ints, *beside: Ints) -> Ints:
    """The number of each stretch ``values[start[i] : start[i + 1]]``, distinguished by ``beside`` as well.

    >>> number_stretches(np.array([4, 5, 5, 4, 5]), np.array([0, 2, 3, 5]))
    array([0, 1, 0])
    """
    return _number(values, start, pack(*beside) if beside else np.zeros(len(start) - 1, np.int64))


@kernel
def _number(values, start, beside):
    """Looks up every stretch in a hash table of the stretches seen before."""
    count = len(start) - 1
    found, size, seen = np.empty(count, np.int64), 4, 0
    while size < 2 * count:
        size *= 2
    table = np.full(size, -1)
    for i in range(count):
        mixed = _mix(np.uint64(beside[i]), start[i + 1] - start[i])
        for k in range(start[i], start[i + 1]):
            mixed = _mix(mixed, values[k])
        at = np.int64(mixed % np.uint64(size))
        while table[at] >= 0 and not _are_equal(values, start, beside, i, table[at]):
            at = (at + 1) % size
        if table[at] < 0:
            table[at], found[i] = i, seen
            seen += 1
        else:
            found[i] = found[table[at]]
    return found


@inline
def _mix(mixed, value):
    mixed = (mixed ^ np.uint64(value)) * np.uint64(0x9E3779B97F4A7C15)
    return mixed ^ (mixed >> np.uint64(32))


@inline
def _are_equal(values, start, beside, one, other):
    length, k = start[one + 1] - start[one], 0
    equal = beside[one] == beside[other] and start[other + 1] - start[other] == length
    while equal and k < length:
        equal = values[start[one] + k] == values[start[other] + k]
        k += 1
    return equal
