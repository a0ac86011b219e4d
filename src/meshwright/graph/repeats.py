"""Finds runs of a sequence that repeat with a period: the layers of a model, seen as a sequence of operations."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Run:
    """``tokens[i] == tokens[i + period]`` for every ``start <= i < stop - period``, at least two periods long."""

    start: int
    stop: int
    period: int


def find_runs(tokens: Sequence[int]) -> list[Run]:
    """Disjoint runs, the longest first cut out, shorter ones then sought on both sides of it.

    >>> find_runs([9, 1, 2, 1, 2, 1, 2, 8])
    [Run(start=1, stop=7, period=2)]
    """
    array = np.asarray(tokens)
    found: list[Run] = []
    spans = [(0, len(array))]
    while spans:
        first, last = spans.pop()
        run = _longest(array[first:last])
        if run is not None:
            start, stop, period = run
            found.append(Run(first + start, first + stop, period))
            spans += [(first, first + start), (first + stop, last)]
    return sorted(found, key=lambda run: run.start)


def _longest(array: np.ndarray) -> tuple[int, int, int] | None:
    """The run that covers most, with the smallest period among equals."""
    best: tuple[int, int, int] | None = None
    size = len(array)
    for period in range(1, size // 2 + 1):
        if best is not None and best[1] - best[0] >= size:
            break
        equal = np.concatenate(([False], array[:-period] == array[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        starts, stops = edges[::2], edges[1::2]
        lengths = stops - starts
        long_enough = lengths >= period
        if long_enough.any():
            i = int(np.argmax(np.where(long_enough, lengths, 0)))
            covered = int(lengths[i]) + period
            if best is None or covered > best[1] - best[0]:
                best = (int(starts[i]), int(starts[i]) + covered, period)
    return best
