"""Finds runs of a sequence that repeat with a period: the layers of a model, seen as a sequence of operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.jit import kernel


@dataclass(frozen=True, slots=True)
class RepeatedRun:
    """``tokens[i] == tokens[i + period]`` for every ``start <= i < stop - period``, at least two periods long."""

    start: int
    stop: int
    period: int


def find_runs(tokens: Sequence[int] | NDArray[np.int64]) -> list[RepeatedRun]:
    """Disjoint runs, the longest first cut out, shorter ones then sought on both sides of it.

    >>> find_runs([9, 1, 2, 1, 2, 1, 2, 8])
    [Run(start=1, stop=7, period=2)]
    """
    array = np.asarray(tokens, np.int64)
    runs: list[RepeatedRun] = []
    spans = [(0, len(array))]
    while spans:
        first, last = spans.pop()
        run = _longest(array[first:last])
        if run is not None:
            start, stop, period = run
            runs.append(RepeatedRun(first + start, first + stop, period))
            spans += [(first, first + start), (first + stop, last)]
    return sorted(runs, key=lambda run: run.start)


def _longest(array: np.ndarray) -> tuple[int, int, int] | None:
    """The longest run, with the smallest period among equals."""
    start, stop, period = _seek(array)
    return (start, stop, period) if period else None


@kernel
def _seek(array):
    """Searches only where a longer stretch of equal pairs is possible: an unequal pair rules out stretches over it."""
    size, best_start, best_stop, best_period = len(array), 0, 0, 0
    for period in range(1, size // 2 + 1):
        pairs, i = size - period, -1
        while True:
            wanted = max(period, best_stop - best_start - period + 1)
            i += wanted
            if i >= pairs:
                break
            if array[i] != array[i + period]:
                continue
            first = i
            while first > 0 and array[first - 1] == array[first - 1 + period]:
                first -= 1
            while i < pairs and array[i] == array[i + period]:
                i += 1
            if i - first >= wanted:
                best_start, best_stop, best_period = first, i + period, period
    return best_start, best_stop, best_period
