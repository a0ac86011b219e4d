"""The places in the batch: which are free, and which hold a prefix that a new request may begin with.

Where each place has contiguous room in the cache, what a request has computed stays there until another one needs the
place. A request that begins with the same tokens takes the place over if it is free, and otherwise has the prefix
copied to its own; where blocks are shared (`BlockPool`), places hold nothing and their order alone matters.

Places come in rungs, the numbers of rows that steps are compiled for: those of low rungs go first, so that steps of few
requests are narrow, and within a rung the one that was used least recently.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """What a request gets.

    Attributes:
        slot: Its number.
        pieces: How many pieces of its prefix are computed.
        source: The slot that they are to be copied from; None where they are in place.
    """

    slot: int
    pieces: int
    source: int | None


class SlotPool:
    """All slots of a batch, by number from 0; a name is the digest of all tokens up to the end of a piece."""

    def __init__(self, rungs: Sequence[int]):
        self._rung_of = [rung for rung, size in enumerate(rungs) for _ in range(size - ((0, *rungs)[rung]))]
        self._free: list[OrderedDict[int, None]] = [OrderedDict() for _ in rungs]  # least recently used first
        for slot, rung in enumerate(self._rung_of):
            self._free[rung][slot] = None
        self._names: list[list[bytes]] = [[] for _ in self._rung_of]
        self._holders: dict[bytes, list[int]] = {}

    @property
    def available(self) -> bool:
        """Whether a slot is free."""
        return any(self._free)

    def take(self, names: Sequence[bytes]) -> Place:
        """Takes a free slot for a request whose pieces have these names, with the longest prefix of them there is."""
        free = next(rung for rung in self._free if rung)
        pieces, holders = self._longest(names)
        slot = next((one for one in holders if one in free), None)
        source = None if slot is not None or not pieces else holders[0]
        slot = next(iter(free)) if slot is None else slot
        del free[slot]
        self._forget(slot, 0 if source is not None else pieces)
        if source is not None:
            self.name(slot, names[:pieces])
        return Place(slot, pieces, source)

    def name(self, slot: int, names: Sequence[bytes]) -> None:
        """Says which pieces have been computed in a slot since the last call."""
        self._names[slot] += names
        for name in names:
            self._holders.setdefault(name, []).append(slot)

    def longest(self, names: Sequence[bytes]) -> int:
        """How many of these pieces some slot holds, from the first on."""
        return self._longest(names)[0]

    def free(self, slot: int) -> None:
        """Gives a slot back; what it holds is kept until the slot is taken."""
        rung = self._free[self._rung_of[slot]]
        rung[slot] = None
        rung.move_to_end(slot, last=bool(self._names[slot]))

    def _longest(self, names: Sequence[bytes]) -> tuple[int, list[int]]:
        for pieces in range(len(names), 0, -1):
            holders = self._holders.get(names[pieces - 1])
            if holders:
                return pieces, holders
        return 0, []

    def _forget(self, slot: int, kept: int) -> None:
        """The slot holds only its first pieces from now on."""
        for name in self._names[slot][kept:]:
            holders = self._holders[name]
            holders.remove(slot)
            if not holders:
                del self._holders[name]
        del self._names[slot][kept:]
