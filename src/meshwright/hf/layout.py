"""How a tensor of a checkpoint becomes a parameter: which dims are split, joined, moved or picked, and which bytes."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import numpy as np

Range = tuple[int, int]  # the first index, and one past the last
Fill = Callable[[str, tuple[slice, ...], np.ndarray], None]
Empty = Callable[[list[int], np.dtype], np.ndarray]
_BLOCK = 2**14  # elements that are copied at a time


@dataclass(frozen=True)
class Pick:
    """A dim of the tensor of which a parameter has one index, such as the keys of queries, keys and values in one."""

    dim: str
    index: int
    size: int


@dataclass(frozen=True)
class Weight:
    """One line of an architecture's map.

    Attributes:
        path: Where the parameter is in the zoo's tree, such as ``layers/{i}/q``; ``{i}`` is the layer.
        name: The tensor of the checkpoint, such as ``model.layers.{i}.self_attn.q_proj.weight``. A dim of the parameter
            whose name stands in braces, such as ``{e}``, is joined from several tensors.
        layout: The dims of the tensor and of the parameter, such as ``(n h) d -> d n h``.
        pick: The dim that the parameter has only one index of.
    """

    path: str
    name: str
    layout: str
    pick: Pick | None = None


@dataclass(frozen=True)
class Place:
    """Where one parameter of some shape is in a checkpoint.

    Attributes:
        name: The tensor's name, with the joined dims in braces.
        groups: For each dim of a tensor, the dims of the parameter that it holds, the slowest first.
        dims: The dims of the parameter.
        sizes: The size of each dim.
        picked: The index of each dim that the parameter does not have.
    """

    path: str
    shape: tuple[int, ...]
    name: str
    groups: tuple[tuple[str, ...], ...]
    dims: tuple[str, ...]
    sizes: Mapping[str, int]
    picked: Mapping[str, int]

    def named(self, name: str) -> "Place":
        """The same in a tensor of another name."""
        return replace(self, name=name)

    @property
    def joined(self) -> tuple[str, ...]:
        """The dims that are joined from several tensors."""
        stored = {dim for group in self.groups for dim in group}
        return tuple(dim for dim in self.dims if dim not in stored)

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor."""
        return tuple(prod(self.sizes[dim] for dim in group) for group in self.groups)

    def tensors(self, ranges: Mapping[str, Range] | None = None) -> Iterator[tuple[str, dict[str, int]]]:
        """The tensors that hold some ranges of the joined dims, all by default, with the index of each joined dim."""
        bounds = (ranges[dim] if ranges else (0, self.sizes[dim]) for dim in self.joined)
        for indices in product(*(range(*bound) for bound in bounds)):
            index = dict(zip(self.joined, indices, strict=True))
            yield self.name.format(**index), index

    def ranges(self, index: tuple[slice, ...]) -> dict[str, Range]:
        """The range of each dim that an index of the parameter asks for."""
        return {dim: part.indices(size)[:2] for dim, part, size in zip(self.dims, index, self.shape, strict=True)} | {
            dim: (at, at + 1) for dim, at in self.picked.items()
        }

    @property
    def in_order(self) -> bool:
        """Whether a tensor's elements lie as the parameter's do."""
        return tuple(dim for dim in self._stored if dim not in self.picked) == self.dims

    @property
    def _stored(self) -> list[str]:
        return [*self.joined, *(dim for group in self.groups for dim in group)]

    def read(self, index: tuple[slice, ...], dtype: np.dtype, fill: Fill, empty: Empty = np.empty) -> np.ndarray:
        """A part of the parameter, as a view of what was read: its elements lie as the checkpoint has them.

        JAX transposes while it copies to a device, three times as quickly as NumPy does on the host.

        Args:
            index: Which part.
            dtype: The dtype of the tensors.
            fill: `fill(name, slices, target)` reads a part of a tensor into an array.
            empty: `empty(shape, dtype)` gives an array to read into.
        """
        ranges = self.ranges(index)
        narrowed = [_narrowed(group, ranges, self.sizes) for group in self.groups]
        slices = tuple(slice(*bounds) for bounds, _, _ in narrowed)
        num_joined = [ranges[dim][1] - ranges[dim][0] for dim in self.joined]
        stored = empty([*num_joined, *(bounds[1] - bounds[0] for bounds, _, _ in narrowed)], dtype)
        for name, joined in self.tensors(ranges):
            fill(name, slices, stored[tuple(joined[dim] - ranges[dim][0] for dim in self.joined)])
        split = stored.reshape([*num_joined, *(size for _, sizes, _ in narrowed for size in sizes)])
        inner = split[tuple([slice(None)] * len(num_joined) + [part for _, _, parts in narrowed for part in parts])]
        return self._to_parameter(inner, self._stored)

    def _to_parameter(self, tensor: np.ndarray, order: list[str]) -> np.ndarray:
        """A tensor whose dims are `order`, without picked dims and with the others in the parameter's order."""
        tensor = tensor[tuple(0 if dim in self.picked else slice(None) for dim in order)]
        rest = [dim for dim in order if dim not in self.picked]
        return tensor.transpose([rest.index(dim) for dim in self.dims])

    def write(self, tensor: np.ndarray, joined: Mapping[str, int], parameter: np.ndarray) -> None:
        """Puts the parameter's part of one tensor into it."""
        order = [dim for group in self.groups for dim in group]
        view = tensor.reshape([self.sizes[dim] for dim in order])
        view = view[tuple(self.picked.get(dim, slice(None)) for dim in order)]
        part = parameter[tuple(joined.get(dim, slice(None)) for dim in self.dims)]
        rest = [dim for dim in self.dims if dim not in joined]
        _copy(part.transpose([rest.index(dim) for dim in order if dim not in self.picked]), view)


def _copy(source: np.ndarray, target: np.ndarray) -> None:
    """Copies elements; those of one dtype as integers, since NumPy copies bfloat16 one by one, under its lock."""
    if source.dtype == target.dtype:
        bits = np.dtype(f"u{target.dtype.itemsize}")
        source, target = source.view(bits), target.view(bits)
    _copy_in_blocks(source, target)


def _copy_in_blocks(source: np.ndarray, target: np.ndarray) -> None:
    """Copies halves of the longest dim until a block fits a cache; NumPy transposes a large array ten times slower."""
    if target.size <= _BLOCK or (source.flags.c_contiguous and target.flags.c_contiguous):
        target[...] = source
        return
    axis = max(range(target.ndim), key=target.shape.__getitem__)
    half = target.shape[axis] // 2
    for part in (slice(half), slice(half, None)):
        index = (slice(None),) * axis + (part,)
        _copy_in_blocks(source[index], target[index])


def _narrowed(
    group: tuple[str, ...], ranges: Mapping[str, Range], sizes: Mapping[str, int]
) -> tuple[Range, list[int], list[slice]]:
    """The shortest range of a tensor's dim that holds ranges of the dims in it.

    Returns:
        That range, the sizes of the dims within it, and the parts of these that are asked for.
    """
    start, block = 0, prod(sizes[dim] for dim in group)
    read: list[int] = []
    inner: list[slice] = []
    for number, dim in enumerate(group):
        low, high = ranges[dim]
        block //= sizes[dim]
        start += low * block
        read.append(high - low)
        inner.append(slice(None))
        if high - low != 1:
            rest = group[number + 1 :]
            read += [sizes[other] for other in rest]
            inner += [slice(*ranges[other]) for other in rest]
            return (start, start + (high - low) * block), read, inner
    return (start, start + block), read, inner


def path_of(keys: tuple[Any, ...]) -> str:
    """The path of a leaf whose keys JAX names, such as `layers/3/q`."""
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def place(weights: tuple[Weight, ...], path: str, shape: tuple[int, ...]) -> Place:
    """Where the parameter of a path is; the layers' parameters may be stacked on a leading dim."""
    for weight in weights:
        found = re.fullmatch(re.escape(weight.path).replace(re.escape("{i}"), r"(\d+)"), path)
        if found:
            layer = found.groups()
            name = weight.name.replace("{i}", layer[0]) if layer else weight.name
            return _placed(weight, path, name, shape, ())
        if weight.path.replace("{i}/", "") == path:
            return _placed(weight, path, weight.name, shape, ("i",))
    raise KeyError(path)


def _placed(weight: Weight, path: str, name: str, shape: tuple[int, ...], leading: tuple[str, ...]) -> Place:
    stored, own = weight.layout.split("->")
    groups = tuple(tuple((many or one).split()) for many, one in re.findall(r"\(([^)]*)\)|(\w+)", stored))
    dims = (*leading, *own.split())
    sizes = dict(zip(dims, shape, strict=True))
    picked = {}
    if weight.pick is not None:
        sizes[weight.pick.dim] = weight.pick.size
        picked[weight.pick.dim] = weight.pick.index
    return Place(path, shape, name, groups, dims, sizes, picked)
