"""A sequence that is kept as columns; its items are built in blocks when they are first accessed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar, overload

T = TypeVar("T")

_AT_ONCE = 128


class Lazy(Sequence[T], ABC):
    """Accessing one item builds its neighbours, too: most are accessed in order, and a block costs little more."""

    def __init__(self, length: int):
        self._items: list[T | None] = [None] * length

    @abstractmethod
    def _make(self, first: int, stop: int) -> Iterable[T]:
        """Builds the items ``[first, stop)``."""

    def __len__(self) -> int:
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        item = self._items[index]
        if item is None:
            self._fill(range(len(self))[index] // _AT_ONCE * _AT_ONCE)
            item = self._items[index]
            assert item is not None
        return item

    def __iter__(self) -> Iterator[T]:
        for first in range(0, len(self), _AT_ONCE):
            if self._items[first] is None:
                self._fill(first)
        return iter(self._items)  # type: ignore[arg-type] # all items are built

    def _fill(self, first: int) -> None:
        stop = min(first + _AT_ONCE, len(self))
        self._items[first:stop] = self._make(first, stop)
