"""Constraints and per-device functions, also inside a function that runs once for each replica.

A pipeline's stage runs its replicas by `jax.shard_map` over the mesh's first axis. Inside of it JAX takes shardings of
the mesh around, in which that axis is manual, and splits over the others alone.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import zip_longest
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding, PartitionSpec

from meshwright import jax_compat
from meshwright.plans.plan import partition_spec
from meshwright.plans.tensor import Spec


def constrain(value: Any, mesh: DeviceMesh, spec: Spec) -> jax.Array:
    """A value constrained to a sharding, in the memory that it is in."""
    memory = jax_compat.HOST_MEMORY if jax_compat.is_on_host(jax.typeof(value)) else None
    return lax.with_sharding_constraint(value, NamedSharding(_around(mesh), partition_spec(spec), memory_kind=memory))


def on_each_device(
    function: Callable[..., Any], mesh: DeviceMesh, in_specs: Any, out_specs: Any, axes: Collection[str] | None = None
) -> Callable[..., Any]:
    """A function of the parts that each device has; or, along other axes than some, of what all of them have."""
    around = _around(mesh)
    free = set(around.axis_names if axes is None else axes) - set(getattr(around, "manual_axes", ()))
    return shard_map(function, around, in_specs, out_specs, free)


def shard_map(
    function: Callable[..., Any], mesh: Any, in_specs: Any, out_specs: Any, axes: Collection[str]
) -> Callable[..., Any]:
    """`jax.shard_map` of arrays, over some axes; each device makes its part of an array without elements anew.

    XLA of JAX 0.11 crashes where such an array enters a function that is mapped over some of a mesh's axes. cuDNN's
    attention has one for each operand that it was not given.
    """

    def call(*operands: Any) -> Any:
        empty = {
            n: (part_shape(x.shape, in_specs[n], mesh), x.dtype) for n, x in enumerate(operands) if jnp.size(x) == 0
        }
        kept = [n for n in range(len(operands)) if n not in empty]

        def own(*parts: Any) -> Any:
            given = iter(parts)
            return function(*(jnp.zeros(*empty[n]) if n in empty else next(given) for n in range(len(operands))))

        specs = tuple(in_specs[n] for n in kept)
        mapped = jax.shard_map(
            own, mesh=mesh, in_specs=specs, out_specs=out_specs, axis_names=set(axes), check_vma=False
        )
        return mapped(*(operands[n] for n in kept))

    return call


def part_shape(shape: Sequence[int], spec: PartitionSpec | Spec, mesh: Any) -> tuple[int, ...]:
    """The shape of a device's part; `NamedSharding.shard_shape` fails inside a mapped function."""
    axes = ((held,) if isinstance(held, str) else held or () for held in spec)
    return tuple(n // prod(mesh.shape[axis] for axis in some) for n, some in zip_longest(shape, axes, fillvalue=()))


def _around(mesh: DeviceMesh) -> DeviceMesh | jax.sharding.AbstractMesh:
    around = jax.sharding.get_abstract_mesh()
    return around if around.manual_axes else mesh
