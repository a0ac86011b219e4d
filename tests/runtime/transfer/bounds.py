"""The fewest bytes that any route between two shardings moves, by which routes are judged."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.runtime.transfer.routes import Box, Device, intersect, volume


@dataclass(frozen=True)
class Bounds:
    """What no route can do without.

    Attributes:
        crossing_bytes: Bytes that some group needs and none of its devices holds, added over groups.
        moved_bytes: Bytes that some device needs and does not hold, added over devices.
    """

    crossing_bytes: int
    moved_bytes: int


def least_bytes(
    source: Mapping[Device, Box],
    target: Mapping[Device, Box],
    itemsize: int,
    group_of: Callable[[Device], Hashable],
) -> Bounds:
    """The fewest bytes that any route between two shardings moves; takes the arguments of `find_route`."""
    moved = sum(volume(box) - _common(box, [source[d]] if d in source else []) for d, box in target.items())
    held, needed = defaultdict(set), defaultdict(set)
    for device, box in source.items():
        held[group_of(device)].add(box)
    for device, box in target.items():
        needed[group_of(device)].add(box)
    crossing = sum(volume(box) - _common(box, held[group]) for group, boxes in needed.items() for box in boxes)
    return Bounds(itemsize * crossing, itemsize * moved)


def _common(box: Box, others: Sequence[Box] | set[Box]) -> int:
    """How many elements of a box are in others, which are disjoint."""
    return sum(volume(common) for common in (intersect(box, other) for other in others) if common is not None)
