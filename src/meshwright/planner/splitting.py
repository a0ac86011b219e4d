"""How methods split the batch and the state, also over a number of devices that does not divide them.

On N devices a dim of n elements is split evenly by part of them if N = a·b and a divides n. A mesh that has a and b as
axes of their own offers that split; `divided_view` finds the axes that split most of what a method spreads.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations, permutations
from math import prod

import numpy as np

from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.hardware import Cluster, Mesh
from meshwright.hardware.torus import divisors
from meshwright.planner.grouping.roles import Roles, find_roles
from meshwright.rules.base import TensorType
from meshwright.strategy.sharding import Axes
from meshwright.units import format_bytes

Sizes = tuple[int, ...]

_MOST_AXES = 3
_WORTH_SAYING = 0.01  # of the bytes of the state on a device: less is not mentioned


def split_batch(graph: Graph, roles: Roles, mesh: Mesh, axes: Axes, over: Iterable[int]) -> dict[int, frozenset[int]]:
    """Splits data leaves with the batch's leading dim over the axes, and replicates the others (keys, scalars).

    If the axes together do not divide the batch, those that together do are used: the most devices that can share it.
    """
    used = [a for a in over if axes.sizes[a] > 1]
    shapes = {v: graph.types[v].shape for v in roles.data}
    batch = _batch_rows(shapes.values())
    if not batch or not used:
        return {v: frozenset({0}) for v in roles.data}
    choices = [some for n in range(1, len(used) + 1) for some in combinations(used, n)]
    even = [some for some in choices if batch % prod(axes.sizes[a] for a in some) == 0]
    if not even:
        parts = prod(axes.sizes[a] for a in used)
        path = next(
            p for p, v in zip(graph.input_paths, graph.inputs, strict=True) if shapes.get(v, ())[:1] == (batch,)
        )
        raise ShardingError(
            f"the batch has {batch} rows ({path}), which {parts} devices on the data axes of mesh {mesh.shape} cannot "
            f"share evenly; use a batch that is a multiple of {parts}, fewer devices, or mw.Auto()"
        )
    code = axes.code((max(even, key=lambda some: prod(axes.sizes[a] for a in some)),))
    return {v: frozenset({code if shape[:1] == (batch,) else 0}) for v, shape in shapes.items()}


def most_split(shape: tuple[int, ...], axes: Axes, over: int | None = None) -> frozenset[int]:
    """The shardings with the most shards that the shape allows, over all axes or over one of them alone."""
    codes = axes.legal_codes(shape)
    if over is not None:
        codes = codes[(np.delete(axes.unpack(codes), over, axis=1) < 0).all(axis=1)]
    parts = axes.num_parts(codes)
    return frozenset(codes[parts == parts.max()].tolist())


def split_over(shape: tuple[int, ...], axes: Axes, axis: int) -> frozenset[int]:
    """The shardings that use one axis alone; also replication, for vectors and if nothing else is legal."""
    codes = axes.legal_codes(shape)
    held = axes.unpack(codes)
    alone = (held >= 0).sum(axis=1) == (held[:, axis] >= 0)
    split = alone & (held[:, axis] >= 0)
    return frozenset(codes[split if len(shape) > 1 and split.any() else alone].tolist())


def most_split_along(shape: tuple[int, ...], axes: Axes, axis: int) -> frozenset[int]:
    """The shardings with the most shards; of a matrix only those that use one axis, where any legal one does."""
    codes = axes.legal_codes(shape)
    along = axes.unpack(codes)[:, axis] >= 0
    if len(shape) > 1 and along.any():
        codes = codes[along]
    parts = axes.num_parts(codes)
    return frozenset(codes[parts == parts.max()].tolist())


def divided_view(graph: Graph, mesh: Mesh, spread: Sequence[int]) -> Mesh:
    """A view with the axes that split the batch the furthest and then some values; the mesh if it does so already.

    Args:
        graph: The function.
        mesh: One axis of all devices.
        spread: The values that a method splits as far as possible.
    """
    number, cluster = mesh.num_devices, mesh.cluster
    if cluster is None or len(mesh.sizes) > 1:
        return mesh
    batch = _batch_rows(graph.types[v].shape for v in find_roles(graph).data)
    kinds = _spreadable([graph.types[v] for v in spread], number)
    if batch % number == 0 and _divide_all(kinds, number):
        return mesh

    def quality(sizes: Sizes) -> tuple[int, float, int]:
        rows = max((d for d in _products(sizes) if batch % d == 0), default=1)
        return -rows, _least_bytes(kinds, sizes), len(sizes)

    best = min(_factorings(number), key=quality)
    return mesh if len(best) == 1 else cluster.mesh(_ordered(best, kinds, cluster))


def finer_view(graph: Graph, meshes: Sequence[Mesh]) -> list[Mesh]:
    """A further view on which the arguments can be split further than on all views, if there is one."""
    cluster = meshes[0].cluster
    if cluster is None:
        return []
    kinds = _spreadable([graph.types[v] for v in graph.inputs], cluster.num_devices)
    if _divide_all(kinds, cluster.num_devices):
        return []
    least = min(_least_bytes(kinds, mesh.sizes) for mesh in meshes)
    best = min(_factorings(cluster.num_devices), key=lambda sizes: (_least_bytes(kinds, sizes), len(sizes)))
    known = {tuple(sorted(mesh.sizes)) for mesh in meshes}
    if best in known or _least_bytes(kinds, best) >= least:
        return []
    return [cluster.mesh(_ordered(best, kinds, cluster))]


def uneven_state(kinds: Sequence[TensorType], parts: Sequence[int], axes: Axes) -> list[str]:
    """A remark on tensors that are split as far as their dims allow, which is less than over all devices."""
    number, held = axes.num_devices, Counter[int]()
    count, excess, total = Counter[int](), 0.0, 0.0
    for kind, split in zip(kinds, parts, strict=True):
        total += kind.num_bytes / split
        if split == number or prod(kind.shape) < number or axes.num_parts(axes.legal_codes(kind.shape)).max() > split:
            continue
        excess += kind.num_bytes / split - kind.num_bytes / number
        held[split] += kind.num_bytes
        count[split] += 1
    if excess <= _WORTH_SAYING * total:
        return []
    words = [
        f"{count[n]} ({format_bytes(held[n])}) {f'{n} ways' if n > 1 else 'not at all'}" for n in sorted(count)[::-1]
    ]
    return [
        f"{number} devices do not divide some of the state's {len(kinds)} tensors, which are split as far as their "
        f"dims allow on this mesh: {', '.join(words)}."
    ]


def uneven_batch(rows: Sequence[tuple[int, ...]], parts: Sequence[int], number: int) -> list[str]:
    """A remark on a batch that not all devices share."""
    batch, most = _batch_rows(rows), max(parts, default=1)
    if not batch or batch % number == 0 or most == number:
        return []
    return [
        f"The batch has {batch} rows, which {most} of {number} devices share: the others split other dims, or repeat "
        f"their work. Use a batch that is a multiple of {number}."
    ]


def _batch_rows(shapes: Iterable[tuple[int, ...]]) -> int:
    """The size of the batch: the leading dim that most data leaves have; 0 for none."""
    leading = Counter(shape[0] for shape in shapes if shape)
    return max(leading, key=lambda size: (leading[size], size), default=0)


def _spreadable(kinds: Iterable[TensorType], number: int) -> Counter[TensorType]:
    """How often each type occurs, of tensors that have an element for each device."""
    return Counter(kind for kind in kinds if prod(kind.shape) >= number)


def _divide_all(kinds: Iterable[TensorType], number: int) -> bool:
    """Whether a number of devices divides some dim of every tensor."""
    return all(any(size % number == 0 for size in kind.shape) for kind in kinds)


def _least_bytes(kinds: Counter[TensorType], sizes: Sizes) -> float:
    """Bytes on a device if every tensor is split as far as axes of these sizes allow."""
    axes = Axes(sizes)
    return sum(
        n * kind.num_bytes / int(axes.num_parts(axes.legal_codes(kind.shape)).max()) for kind, n in kinds.items()
    )


def _factorings(number: int, most: int = _MOST_AXES, least: int = 2) -> list[Sizes]:
    """The ways to write a number as a product of a few factors above 1, in ascending order."""
    found: list[Sizes] = [(number,)]
    for first in divisors(number) if most > 1 else ():
        if least <= first <= number // first:
            found += [(first, *rest) for rest in _factorings(number // first, most - 1, first)]
    return found


def _products(sizes: Sizes) -> set[int]:
    """The numbers of devices that some of the axes have together."""
    return {prod(some) for n in range(1, len(sizes) + 1) for some in combinations(sizes, n)}


def _ordered(sizes: Sizes, kinds: Counter[TensorType], cluster: Cluster) -> Sizes:
    """The axes with the most used one innermost, where links are fast; each within hosts or across whole hosts."""
    host = cluster.devices_per_host
    used = {
        size: sum(n * kind.num_bytes for kind, n in kinds.items() if any(dim % size == 0 for dim in kind.shape))
        for size in sizes
    }

    def quality(order: Sizes) -> tuple[int, list[int]]:
        inside = [prod(order[i:]) for i in range(1, len(order))]
        return sum(host % p != 0 and p % host != 0 for p in inside), [-used[size] for size in reversed(order)]

    return min(permutations(sizes), key=quality)
