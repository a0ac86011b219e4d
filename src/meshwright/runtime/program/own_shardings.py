"""Equations without the shardings that the user wrote into them: the plan has them, and constrains their results."""

from typing import Any

from jax.extend.core import JaxprEqn
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.jax_compat.kernels import params_without_mesh

_SHARDINGS = ("out_sharding", "sharding", "dst_sharding")  # parameters that hold the sharding of a result


def on_devices(eqn: Any, mesh: DeviceMesh | None) -> JaxprEqn:
    """An equation as it runs on real devices, without what it says of shardings: its results' constraints say that.

    A `jax.shard_map` keeps its specs, on the real mesh. The context of the user's mesh is left: inside of it, JAX would
    take the types of axes from there. There is no mesh where one device rehearses its share.

    Raises:
        ShardingError: It prints in order, which JAX does on one device only.
    """
    if mesh is not None and mesh.size > 1 and jax_compat.prints_in_order(eqn):
        source = jax_compat.source_line(eqn)
        raise ShardingError(
            f"{eqn.primitive.name}{source and f' at {source}'} prints with ordered=True, which JAX does on one device "
            "only: leave ordered=True out, or use jax.experimental.io_callback(…, ordered=True), which keeps the order "
            "on several devices"
        )
    params = eqn.params
    if eqn.primitive.name == "shard_map":
        params = {**params, "mesh": mesh}
    elif eqn.primitive.name == "device_put" and any(hasattr(target, "spec") for target in params["devices"]):
        params = {**params, "devices": tuple(_memory_on(target, mesh) for target in params["devices"])}
    elif any(params.get(key) is not None for key in _SHARDINGS):
        params = {key: None if key in _SHARDINGS else value for key, value in params.items()}
    elif eqn.ctx.cur_abstract_mesh.empty:
        return eqn
    elif eqn.primitive.name == "pallas_call":
        params = params_without_mesh(eqn)
    return eqn.replace(params=params, ctx=jax_compat.context_without_mesh(eqn.ctx))


def _memory_on(target: Any, mesh: DeviceMesh | None) -> NamedSharding | None:
    """The target of a `jax.device_put` inside a function: nothing, unless it names another memory than the devices'."""
    if not hasattr(target, "spec"):
        return target
    is_usual = target.memory_kind in (None, "device")
    return None if is_usual or mesh is None else NamedSharding(mesh, target.spec, memory_kind=target.memory_kind)
