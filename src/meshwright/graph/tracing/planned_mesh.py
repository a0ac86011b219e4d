"""The mesh that a function is planned for, while it is traced: `mw.current_mesh`, and JAX's own mesh in context."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.hardware import Mesh
from meshwright.hardware.axes import AXIS_NAMES, Shape, read_shape

_CURRENT: ContextVar[Any] = ContextVar("meshwright_current_mesh", default=None)


@contextmanager
def planned(mesh: Mesh | Shape | None, devices: Any = None) -> Iterator[None]:
    """A context in which functions are traced for a mesh; None leaves the mesh around it.

    Args:
        mesh: The mesh.
        devices: The same mesh of real devices, as JAX has it, if the function is traced to run there.

    If the user named the axes, the mesh is also JAX's mesh in context: `jax.lax.with_sharding_constraint` then takes
    bare `PartitionSpec`s, and `jax.shard_map` needs no mesh. Otherwise the planner chose the names, and code that asks
    JAX for a mesh must find none, as it did when the function was planned.
    """
    if mesh is None:
        yield
        return
    given = (mesh.sizes, mesh.axis_names, mesh.explicit) if isinstance(mesh, Mesh) else read_shape(mesh)
    sizes, names, explicit = given
    found = jax_compat.abstract_mesh(sizes, names or AXIS_NAMES[: len(sizes)], explicit, devices)
    before = _CURRENT.set(found)
    try:
        with jax_compat.in_mesh(found if names else None):
            yield
    finally:
        _CURRENT.reset(before)


def current_mesh() -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """The mesh that the function around is planned for, to be called inside of it.

    It is known while the function is traced for planning and for running, where ``mesh=`` says which mesh it is.

    Returns:
        A `jax.sharding.AbstractMesh`, for `NamedSharding`, `jax.shard_map` and for the sizes of its axes: a plan may be
        made where the devices are not.

    Raises:
        ShardingError: No function is being traced, or its mesh is still to be chosen.

    Examples:
        >>> import jax, jax.numpy as jnp, meshwright as mw
        >>> from jax.sharding import NamedSharding
        >>> def f(x, w):
        ...     return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mw.current_mesh(), jax.P("data")))
        >>> plan = mw.plan(f, jnp.ones((8, 4)), jnp.ones((4, 4)), cluster="1x4 h100", mesh={"data": 4})
        >>> [tuple(spec) for spec in (plan.out_shardings,)]
        [('data',)]
    """
    found = _CURRENT.get()
    if found is None:
        raise ShardingError(
            "mw.current_mesh() is called where no mesh is known: call it inside a function that is planned or run with "
            "mesh=…, such as mesh={'data': 4, 'model': 2}; without it, the planner chooses the mesh after the function "
            "is traced"
        )
    return found
