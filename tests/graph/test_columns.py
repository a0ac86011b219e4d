"""Lazy sequences: items are made when they are first asked for, once, and look like those of a list."""

import pytest

from meshwright.graph.columns import Lazy


class Squares(Lazy[int]):
    def __init__(self, length):
        super().__init__(length)
        self.made = []

    def _make(self, first, stop):
        self.made.append((first, stop))
        return [i * i for i in range(first, stop)]


@pytest.mark.parametrize("length", [0, 1, 128, 129, 1000])
def test_it_is_like_a_list(length):
    lazy, plain = Squares(length), [i * i for i in range(length)]
    assert len(lazy) == length
    assert lazy[1:200:3] == plain[1:200:3]
    assert [lazy[-1]] == plain[-1:] if length else not lazy
    assert list(lazy) == plain
    with pytest.raises(IndexError):
        lazy[length]


def test_only_what_is_asked_for_is_made_and_only_once():
    lazy = Squares(100_000)
    assert lazy[70_000] == lazy[70_001 - 1] == 70_000**2
    ((first, stop),) = lazy.made
    assert first <= 70_000 < stop
    assert stop - first < 1000
