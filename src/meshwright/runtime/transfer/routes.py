"""Which piece of an array goes from which device to which, so that each byte crosses between hosts at most once.

An array is cut into boxes by its source sharding and into others by its target sharding. A *tile* is the intersection
of one box of each: a target's box is made up of tiles, and each tile is held by all replicas of one source box. Devices
are divided into *groups* that share a fast link, such as the devices of one process. For each tile and each group with
devices that need it (Alpa's local all-gather, Zhuang et al., 2023, section 3):

1. A device that holds the tile already keeps it.
2. If a device of the group holds it, the others read it there.
3. Otherwise the tile crosses into the group once: each of the devices that need it fetches a part of it, or one of them
   all of it where parts would be small, and passes its part on to the others.

Of several holders the one that has sent the fewest bytes so far sends. So the bytes that cross are the fewest possible:
each group must receive what its targets need and its sources do not hold. Devices are opaque here, and no JAX is used.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import TypeAlias

Device: TypeAlias = Hashable
Interval: TypeAlias = tuple[int, int]
Box: TypeAlias = tuple[Interval, ...]  # start and stop along each dim, in the coordinates of the whole array

#: A tile is fetched in parts only if each has at least so many bytes: about what a 400 Gbit/s link carries in the 20 µs
#: that one more message takes.
LEAST_PART_BYTES = 2**20


@dataclass(frozen=True)
class Move:
    """A piece of the array goes from one device to another, or stays where it is.

    Attributes:
        box: The piece.
        source: The device that has it.
        target: The device that needs it.
    """

    box: Box
    source: Device
    target: Device

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the piece."""
        return shape_of(self.box)


@dataclass(frozen=True)
class Route:
    """How an array gets from one sharding to another.

    Attributes:
        fetches: Moves of pieces of the source's shards.
        shares: Moves, inside of a group, of pieces that another device fetched; they follow all fetches.
        crossing_bytes: Bytes of the fetches from one group to another.
        moved_bytes: Bytes of all moves between two devices.
    """

    fetches: tuple[Move, ...]
    shares: tuple[Move, ...]
    crossing_bytes: int
    moved_bytes: int

    def is_aligned(
        self,
        source: Mapping[Device, Box],
        target: Mapping[Device, Box],
        itemsize: int,
        group_of: Callable[[Device], Hashable],
    ) -> bool:
        """Whether copying the first source's shard to the first target, and so on, is right and as good as this route.

        Takes the arguments of `find_route`.
        """
        if list(source.values()) != list(target.values()):
            return False
        sizes = [(itemsize * volume(box), a, b) for (a, box), b in zip(source.items(), target, strict=True) if a != b]
        crossing = sum(size for size, a, b in sizes if group_of(a) != group_of(b))
        return crossing == self.crossing_bytes and sum(size for size, _, _ in sizes) == self.moved_bytes


def find_route(
    source: Mapping[Device, Box],
    target: Mapping[Device, Box],
    itemsize: int,
    group_of: Callable[[Device], Hashable],
    *,
    least_part_bytes: int = LEAST_PART_BYTES,
) -> Route:
    """Finds a route with the fewest bytes between groups, spread over the devices that could send them.

    Args:
        source: The box that each device holds; boxes are equal (replicas) or disjoint, and form a grid.
        target: The box that each device needs, likewise.
        itemsize: Bytes of one element.
        group_of: The group of a device.
        least_part_bytes: How small the parts may be in which a tile is fetched by several devices.
    """
    finder = _Finder(source, itemsize, group_of, least_part_bytes)
    for box, targets in _by_box(target).items():
        members = defaultdict(list)
        for device in targets:
            members[group_of(device)].append(device)
        for tile, holders in finder.tiles(box):
            for group, needy in members.items():
                finder.serve(tile, holders, group, needy)
    return Route(tuple(finder.fetches), tuple(finder.shares), finder.crossing_bytes, finder.moved_bytes)


def shape_of(box: Box) -> tuple[int, ...]:
    """The shape of the part of an array that is in a box."""
    return tuple(stop - start for start, stop in box)


def volume(box: Box) -> int:
    """How many elements a box has."""
    return math.prod(shape_of(box))


def intersect(box: Box, other: Box) -> Box | None:
    """What two boxes have in common; None where that is nothing."""
    found = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, other, strict=True))
    return found if all(start < stop for start, stop in found) else None


def relative(box: Box, outer: Box) -> Box:
    """A box in the coordinates of another one that contains it."""
    return tuple((start - origin, stop - origin) for (start, stop), (origin, _) in zip(box, outer, strict=True))


class _Finder:
    """The moves found so far, and how many bytes each device sends in them."""

    def __init__(
        self,
        source: Mapping[Device, Box],
        itemsize: int,
        group_of: Callable[[Device], Hashable],
        least_part_bytes: int,
    ):
        self.fetches: list[Move] = []
        self.shares: list[Move] = []
        self.crossing_bytes = self.moved_bytes = 0
        self._holders = _by_box(source)
        self._itemsize, self._group_of, self._least_part_bytes = itemsize, group_of, least_part_bytes
        self._sent: dict[Device, int] = defaultdict(int)
        # Along each dim the boxes' intervals, in order: they are disjoint, so that both ends are in order.
        self._intervals = [sorted(set(intervals)) for intervals in zip(*self._holders, strict=True)]
        assert math.prod(map(len, self._intervals)) == len(self._holders), "the boxes of a sharding form a grid"

    def tiles(self, box: Box) -> Iterator[tuple[Box, list[Device]]]:
        """The tiles of a target's box, and which devices hold each of them."""
        near = []
        for (start, stop), intervals in zip(box, self._intervals, strict=True):
            first = bisect_right(intervals, start, key=lambda interval: interval[1])
            near.append(intervals[first : bisect_left(intervals, stop, key=lambda interval: interval[0])])
        for held in product(*near):
            tile = intersect(box, held)
            if tile is not None:
                yield tile, self._holders[held]

    def serve(self, tile: Box, holders: Sequence[Device], group: Hashable, needy: Sequence[Device]) -> None:
        """Brings a tile to the devices of one group that need it."""
        for device in needy:
            if device in holders:
                self._move(self.fetches, tile, [device], device)
        rest = [device for device in needy if device not in holders]
        near = [device for device in holders if self._group_of(device) == group]
        if near:
            for device in rest:
                self._move(self.fetches, tile, near, device)
        elif rest:
            num_parts = min(len(rest), max(1, self._itemsize * volume(tile) // self._least_part_bytes))
            for part, device in zip(split(tile, num_parts), rest, strict=False):
                self._move(self.fetches, part, holders, device)
                for other in rest:
                    if other != device:
                        self._move(self.shares, part, [device], other)

    def _move(self, moves: list[Move], box: Box, holders: Sequence[Device], target: Device) -> None:
        source = min(holders, key=self._sent.__getitem__)  # of equals the first
        moves.append(Move(box, source, target))
        if source == target:
            return
        num_bytes = self._itemsize * volume(box)
        self._sent[source] += num_bytes
        self.moved_bytes += num_bytes
        if self._group_of(source) != self._group_of(target):
            self.crossing_bytes += num_bytes


def split(box: Box, num_parts: int) -> list[Box]:
    """A box in at most so many parts of about equal size, along its longest dim."""
    if not box or num_parts == 1:
        return [box]
    dim = max(range(len(box)), key=lambda i: box[i][1] - box[i][0])
    start, stop = box[dim]
    num_parts = min(num_parts, stop - start)
    ends = [start + (stop - start) * i // num_parts for i in range(num_parts + 1)]
    return [(*box[:dim], (a, b), *box[dim + 1 :]) for a, b in pairwise(ends)]


def _by_box(boxes: Mapping[Device, Box]) -> dict[Box, list[Device]]:
    found: dict[Box, list[Device]] = defaultdict(list)
    for device, box in boxes.items():
        found[box].append(device)
    return dict(found)
