"""Reads the shape of a mesh: sizes of its axes, with the names and types that the user gives them."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from meshwright.errors import ClusterError

AXIS_NAMES = ("x", "y", "z", "w")  # a mesh has at most so many

Names = tuple[str, ...]
#: Sizes in order, sizes by name, or a JAX mesh.
Shape: TypeAlias = Any


def read_shape(shape: Shape) -> tuple[tuple[int, ...], Names, Names]:
    """Sizes, the user's names, and the names of explicit axes; other values are left for the mesh to refuse.

    Examples:
        >>> read_shape((4, 8)), read_shape({"data": 4, "model": 8})
        (((4, 8), (), ()), ((4, 8), ('data', 'model'), ()))
    """
    if hasattr(shape, "axis_types") and isinstance(getattr(shape, "shape", None), Mapping):  # a JAX mesh
        types = zip(shape.axis_names, shape.axis_types, strict=True)
        return (*read_shape(dict(shape.shape))[:2], tuple(name for name, kind in types if kind.name == "Explicit"))
    if not isinstance(shape, Iterable) or isinstance(shape, str):
        raise ClusterError(
            f"the shape of a mesh is {shape!r}: give a size for each axis, e.g. (4, 8) or {{'data': 4, 'model': 8}}."
        )
    names, sizes = (tuple(shape), shape.values()) if isinstance(shape, Mapping) else ((), shape)
    return tuple(int(n) if isinstance(n, Integral) and not isinstance(n, bool) else n for n in sizes), names, ()


def check_names(names: Names, sizes: Sequence[int]) -> None:
    """Refuses names that are not one distinct word for each axis."""
    if names and (
        len(set(names)) != len(sizes)
        or len(names) != len(sizes)
        or not all(isinstance(name, str) and name for name in names)
    ):
        raise ClusterError(f"the axes are named {names!r} for sizes {tuple(sizes)}: give each axis a name of its own.")
