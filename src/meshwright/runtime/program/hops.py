"""The way from one sharding to another as the plan's mesh takes it, in the names of its axes."""

from typing import Any

from meshwright import jax_compat
from meshwright.graph.graph import cpu_itemsize
from meshwright.hardware import Mesh
from meshwright.plans.tensor import Spec
from meshwright.strategy.reshard import Resharding
from meshwright.strategy.sharding import Axes


class Hops:
    """The hops of the cheapest reshardings on a mesh."""

    def __init__(self, mesh: Mesh, axes: Axes):
        self._mesh, self._axes, self._resharding = mesh, axes, Resharding(mesh, axes)

    def between(self, shape: tuple[int, ...], dtype: Any, source: Spec, target: Spec) -> list[tuple[str, Spec, Spec]]:
        """The kind of each hop of a value of this whole shape, with the shardings before and after it."""
        itemsize = jax_compat.itemsize(dtype)
        itemsize = cpu_itemsize(str(dtype), itemsize) if self._mesh.is_cpu else itemsize
        names, found, before = self._mesh.names, list[tuple[str, Spec, Spec]](), source
        start, goal = (
            self._axes.code(tuple(tuple(names.index(name) for name in dim) for dim in spec))
            for spec in (source, target)
        )
        for hop in self._resharding.path(shape, itemsize, start, goal):
            after = tuple(tuple(names[axis] for axis in dim) for dim in self._axes.dims(hop.code, len(shape)))
            found.append((hop.kind, before, after))
            before = after
        return found
