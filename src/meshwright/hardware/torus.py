"""Maps logical mesh axes to the dims of a TPU torus, and computes the rates of each axis."""

import math
from dataclasses import dataclass
from itertools import product

from meshwright.hardware.link import Link


@dataclass(frozen=True)
class TorusPiece:
    """A piece of one torus dim that a mesh axis runs along.

    Attributes:
        size: Number of chips along the piece.
        stride: Distance between neighbours of the piece, in chips.
        wraps: Whether the piece is a whole dim that closes into a ring.
    """

    size: int
    stride: int
    wraps: bool


def torus_shape(num_devices: int, num_dims: int) -> tuple[int, ...]:
    """The most cubic torus of some chips, smallest dim first, as TPU slices are sold.

    >>> torus_shape(256, 2), torus_shape(128, 3)
    ((16, 16), (4, 4, 8))
    """
    return min(_factorisations(num_devices, num_dims), key=lambda shape: (sum(shape), shape))


def place_axes(
    shape: tuple[int, ...], link: Link, sizes: tuple[int, ...], domain: int
) -> tuple[tuple[TorusPiece, ...], ...]:
    """Gives each mesh axis the pieces of torus dims that it runs along, inside one slice.

    Whole dims are assigned where the sizes allow it, as JAX's ``create_device_mesh`` does; otherwise axes take
    pieces of dims from the last dim on.
    """
    inside = _inside(sizes, domain)
    whole = _whole_dims(shape, inside)
    if whole is not None:
        return tuple(tuple(_run(shape[d], link) for d in dims) for dims in whole)
    return _pieces(shape, inside, link)


def torus_inner(
    link: Link, runs: tuple[tuple[TorusPiece, ...], ...], axes: tuple[int, ...]
) -> tuple[float, float, float, int]:
    """Rates of ring-like collectives, of an all-to-all and of a shift, and the number of hops, along some axes.

    A chip sends both ways along every dim at once; on an open line the end chips do so one way only, and neighbours
    that lie apart share the wires between them.
    """
    used = [run for axis in axes for run in runs[axis]]
    if not used:
        return link.bandwidth, link.bandwidth, link.bandwidth, 0
    wire = link.bandwidth / (2 * link.torus_dims)
    rates = [wire * (2 if run.wraps else 1) / run.stride for run in used]
    size = math.prod(run.size for run in used)
    # Half the chips' data crosses the middle of each dim: a ring's chip sends over a quarter of it on average.
    exchange = min((8 if run.wraps else 4) * wire * (size - 1) / (size * run.size * run.stride) for run in used)
    steps = sum((run.size // 2 if run.wraps else run.size - 1) * run.stride for run in used)
    return sum(rates), min(exchange, sum(rates)), wire / min(run.stride for run in used), max(steps, 1)


def divisors(number: int) -> list[int]:
    """All divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return [*small, *(number // d for d in reversed(small) if d * d != number)]


def _run(size: int, link: Link) -> TorusPiece:
    return TorusPiece(size, 1, bool(link.wrap_multiple) and size > 2 and size % link.wrap_multiple == 0)


def _inside(sizes: tuple[int, ...], domain: int) -> tuple[int, ...]:
    """The part of each axis inside one slice, the last axis innermost."""
    left, inside = domain, []
    for size in reversed(sizes):
        part = math.gcd(size, left)
        left //= part
        inside.append(part)
    return tuple(reversed(inside))


def _whole_dims(shape: tuple[int, ...], inside: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
    for owners in product(range(len(inside)), repeat=len(shape)):
        dims_of_axes = tuple(tuple(d for d, owner in enumerate(owners) if owner == a) for a in range(len(inside)))
        if all(math.prod(shape[d] for d in dims) == size for dims, size in zip(dims_of_axes, inside, strict=True)):
            return tuple(tuple(d for d in dims if shape[d] > 1) for dims in dims_of_axes)
    return None


def _pieces(shape: tuple[int, ...], inside: tuple[int, ...], link: Link) -> tuple[tuple[TorusPiece, ...], ...]:
    dims = [[size, 1] for size in reversed(shape)]  # the remaining size of each dim, and the part that is taken
    runs = []
    for size in reversed(inside):
        axis: list[TorusPiece] = []
        for dim, whole in zip(dims, reversed(shape), strict=True):
            part = math.gcd(size, dim[0])
            if part > 1:
                axis.append(_run(whole, link) if part == whole else TorusPiece(part, dim[1], False))
                dim[0], dim[1], size = dim[0] // part, dim[1] * part, size // part
        runs.append(tuple(axis))
    return tuple(reversed(runs))


def _factorisations(number: int, length: int) -> list[tuple[int, ...]]:
    if length == 1:
        return [(number,)]
    return [(first, *rest) for first in divisors(number) for rest in _factorisations(number // first, length - 1)]
