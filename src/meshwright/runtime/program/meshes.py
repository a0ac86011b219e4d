"""Constraints and per-device functions, also inside a function that runs once for each replica.

A pipeline's stage runs its replicas by `jax.shard_map` over the mesh's first axis. Inside of it JAX takes shardings of
the mesh around, in which that axis is manual, and splits over the others alone.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding

from meshwright.plans.plan import partition_spec
from meshwright.plans.tensor import Spec


def constrain(value: Any, mesh: DeviceMesh, spec: Spec) -> Any:
    """A value constrained to a sharding."""
    return lax.with_sharding_constraint(value, NamedSharding(_around(mesh), partition_spec(spec)))


def on_each_device(
    function: Callable[..., Any], mesh: DeviceMesh, in_specs: Any, out_specs: Any, axes: Collection[str] | None = None
) -> Callable[..., Any]:
    """A function of the parts that each device has; or, along other axes than some, of what all of them have."""
    around = _around(mesh)
    free = set(around.axis_names if axes is None else axes) - set(getattr(around, "manual_axes", ()))
    mapped = jax.shard_map(
        function, mesh=around, in_specs=in_specs, out_specs=out_specs, axis_names=free, check_vma=False
    )
    return mapped  # type: ignore[no-any-return]


def _around(mesh: DeviceMesh) -> Any:
    around = jax.sharding.get_abstract_mesh()
    return around if around.manual_axes else mesh
