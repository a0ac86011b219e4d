"""Shardings that users give by paths: globs matched to arguments and results, specs checked against their shapes."""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from meshwright.errors import ShardingError
from meshwright.graph import Graph
from meshwright.hardware import Mesh
from meshwright.plans.paths import nearest
from meshwright.strategy.sharding import Axes

_WILD = re.compile(r"[*?[]")


def spec_dims(spec: Any) -> tuple[tuple[str, ...], ...]:
    """A PartitionSpec (or a tuple like one) as the axis names of each dim."""
    try:
        return tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in spec)
    except TypeError:
        raise ShardingError(f"{spec!r} is not a PartitionSpec; write P('x', None, …), one entry a dim") from None


def matched(fix: Mapping[str, Any], graph: Graph) -> tuple[dict[int, Any], dict[int, Any]]:
    """Positions of the arguments and results that each glob fixes."""
    inputs: dict[int, Any] = {}
    outputs: dict[int, Any] = {}
    for glob, spec in fix.items():
        found = False
        for paths, target in ((graph.input_paths, inputs), (graph.output_paths, outputs)):
            for i in _places(paths, glob):
                target[i] = spec
                found = True
        if not found:
            hint = nearest(glob, (*graph.input_paths, *graph.output_paths))
            raise ShardingError(f"fix: {glob!r} matches no argument or result; {hint}")
    return inputs, outputs


def _places(paths: Sequence[str], glob: str) -> list[int]:
    """The positions of the paths that a glob matches."""
    if not _WILD.search(glob):  # thousands of paths may be given, and comparing is quicker than matching
        return [i for i, path in enumerate(paths) if path == glob]
    return [i for i, path in enumerate(paths) if path == glob or fnmatchcase(path, glob)]


def sharding_code(spec: Any, path: str, shape: tuple[int, ...], mesh: Mesh, axes: Axes) -> int:
    """The code of a PartitionSpec, checked against the tensor's shape and the mesh."""
    dims = spec_dims(spec)
    names = [name for dim in dims for name in dim]
    unknown = [name for name in names if name not in mesh.names]
    if unknown:
        raise ShardingError(
            f"{path}: axis {unknown[0]!r} is not on mesh {mesh.shape}; its axes are {', '.join(mesh.names)}"
        )
    if len(set(names)) != len(names):
        raise ShardingError(f"{path}: {spec} uses an axis twice; an axis can split one dim only")
    if len(dims) > len(shape):
        raise ShardingError(f"{path}: {spec} has {len(dims)} entries but the tensor has shape {shape}")
    for dim, size in zip(dims, shape, strict=False):
        parts = 1
        for name in dim:
            parts *= mesh.shape[name]
        if list(dim) != sorted(dim, key=mesh.names.index):
            raise ShardingError(f"{path}: write the axes of {dim} in the mesh's order, {', '.join(mesh.names)}")
        if size % parts:
            raise ShardingError(
                f"{path}: a dim of {size} (shape {shape}) cannot be split evenly into {parts} by {dim}; "
                "choose another dim or mesh, or pad the dim"
            )
    return axes.code(tuple(tuple(mesh.names.index(n) for n in dim if mesh.shape[n] > 1) for dim in dims))
