"""A case of `jax.shard_map`: its only split is the one that the user wrote."""

from jax import P, devices, make_mesh, shard_map
from jax.sharding import AxisType

from ..contract import Case
from . import Builder, Sizes


def island(size: Sizes) -> Case:
    mesh = make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,), devices=devices()[:2])
    product = shard_map(lambda a, b: a @ b, mesh=mesh, in_specs=(P("rows"), P()), out_specs=P("rows"))
    operands = [size.floats(2 * size(), 3), size.floats(3, size())]
    return Case(product, operands, lambda shard, a, b: a @ b if shard.parts else product(a, b))


CASES: list[tuple[str, Builder]] = [("shard_map", island)]
