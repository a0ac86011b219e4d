"""Fused kernels: each device runs one on its own parts of the arrays, since XLA cannot look into them to split them."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh as DeviceMesh

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.tracing.flatten import signature_of
from meshwright.jax_compat.kernels import has_kernel, kernel_params
from meshwright.plans.plan import OpPlan, partition_spec
from meshwright.rules import LoopNest, loop_nest
from meshwright.rules.base import REDUCING
from meshwright.rules.families.attention import RULES as ATTENTION
from meshwright.rules.families.pallas import grid_of
from meshwright.rules.registry import kernel_name
from meshwright.runtime.program import attention
from meshwright.runtime.program.contributions import Contributions, Waiting
from meshwright.runtime.program.meshes import on_each_device, part_shape

PALLAS = "pallas_call"


def is_kernel(eqn: Any) -> bool:
    """Whether an operation is a fused kernel."""
    return eqn.primitive.name == PALLAS or eqn.primitive.name in ATTENTION


def run(eqn: Any, op: OpPlan, contributions: Contributions, operands: Sequence[Any]) -> list[Any]:
    """The results of a kernel in their final shardings; partial sums are added up over the devices."""
    mesh = contributions.mesh
    check_platform(eqn, mesh.devices.flat[0].platform)
    if not any(axes for spec in op.operands for axes in spec or ()):
        return jax_compat.bind(eqn, operands)
    nest = loop_nest(signature_of(eqn))
    own, loops = _own_part(eqn, op, mesh), _loops(nest, op, mesh)
    sums = _sums(nest, loops, mesh)
    mixed = tuple(a for a, loop in loops.items() if loop in (nest.mixing.queries, nest.mixing.ring))

    def on_parts(*parts: Any) -> tuple[Any, ...]:
        if mixed:
            in_ring, count = loops[mixed[0]] == nest.mixing.ring, prod(mesh.shape[axis] for axis in mixed)
            results: Sequence[Any] = attention.run(eqn, nest.mixing, in_ring, mixed, count, parts)
        else:
            results = jax_compat.bind(own, parts)
        made = zip(results, sums, strict=True)
        return tuple(jnp.expand_dims(x, range(len(axes))) for x, axes in made)

    apart = tuple(
        partition_spec((*((axis,) for axis in axes), *(spec or ())))
        for axes, spec in zip(sums, op.partial, strict=True)
    )
    function = on_each_device(on_parts, mesh, tuple(partition_spec(spec or ()) for spec in op.operands), apart)
    made = zip(function(*operands), sums, op.partial, op.results, strict=True)
    return [
        contributions.add_up(x, Waiting(axes, partial or (), spec or ())) if axes else x
        for x, axes, partial, spec in made
    ]


def _sums(nest: LoopNest, loops: Mapping[str, int], mesh: DeviceMesh) -> list[tuple[str, ...]]:
    """For each result, the axes over which it is partial."""
    found = []
    for dims in nest.results:
        indexed = {loop for dim in dims for loop in dim}
        partial = (a for a, loop in loops.items() if nest.loops[loop].kind in REDUCING and loop not in indexed)
        found.append(tuple(sorted(partial, key=mesh.axis_names.index)))
    return found


def _loops(nest: LoopNest, op: OpPlan, mesh: DeviceMesh) -> dict[str, int]:
    """The loop that each axis splits: in a dim of several loops, major axes split major loops.

    A ring is the loop of a dim that has no other that can be split; such an operand follows the one that has both.
    """
    found: dict[str, int] = {}
    for dims, spec in zip(nest.operands, op.operands, strict=True):
        for dim, axes in zip(dims, spec or (), strict=False):
            ring = [loop for loop in dim if loop == nest.mixing.ring]
            others = [loop for loop in dim if nest.loops[loop].size > 1 and loop != nest.mixing.ring]
            if ring and all(nest.loops[loop].kind == "unsplittable" for loop in others):
                found.update(dict.fromkeys(axes, nest.mixing.ring))
                continue
            loops = iter(others)
            left = 1
            for axis in axes:
                if left == 1:
                    loop = next(loops)
                    left = nest.loops[loop].size
                found.setdefault(axis, loop)
                left //= mesh.shape[axis]
    return found


def _own_part(eqn: Any, op: OpPlan, mesh: DeviceMesh) -> JaxprEqn:
    """A kernel for the parts of one device."""
    if eqn.primitive.name != PALLAS:
        return eqn  # its parameters do not depend on the shapes
    variables = zip((*eqn.invars, *eqn.outvars), (*op.operands, *op.partial), strict=True)
    shapes = [part_shape(v.aval.shape, spec or (), mesh) for v, spec in variables]
    return eqn.replace(params=pallas_params(eqn, shapes))


def pallas_params(eqn: Any, shapes: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The parameters of a Pallas kernel for other shapes of its operands and results: its grid has fewer programs.

    Raises:
        ShardingError: A dim differs that no axis of the grid selects blocks of, or axes differ between arrays.
    """
    op = signature_of(eqn)
    grid = grid_of(op)
    sizes, arrays = list(grid.sizes), [tuple(shape) for shape in shapes[grid.num_whole :]]
    before = [tensor.shape for tensor in (*op.operands, *op.results)]
    for array, (blocks, shape) in enumerate(zip(grid.blocks, arrays, strict=True), grid.num_whole):
        for dim, ((axis, block), size) in enumerate(zip(blocks, shape, strict=True)):
            if size == before[array][dim]:
                continue
            if axis is None or size % block or sizes[axis] not in (grid.sizes[axis], size // block):
                raise _cannot_split(op, array, dim)
            sizes[axis] = size // block
    if any(tuple(shape) != old for shape, old in zip(shapes[: grid.num_whole], before, strict=False)):
        raise _cannot_split(op, 0, 0)
    return kernel_params(eqn, sizes, arrays)


def _cannot_split(op: Any, array: int, dim: int) -> ShardingError:
    count = len(op.operands)
    which = f"operand {array}" if array < count else f"result {array - count}"
    return ShardingError(
        f"the Pallas kernel {kernel_name(op)!r} cannot run split along dim {dim} of {which}, as its rule says: no axis "
        f'of its grid selects blocks of that dim alike in all arrays. Change @mw.rule("{kernel_name(op)}"), or '
        "leave it out: the grid is then split where it can be"
    )


def check_platform(eqn: Any, platform: str) -> None:
    """Refuses a kernel that devices of a platform cannot run.

    Raises:
        ShardingError: It is written for other devices.
    """
    if has_kernel(eqn, platform):
        return
    op, line = signature_of(eqn), jax_compat.source_line(eqn)
    line = f" ({line})" if line else ""
    what = f"the Pallas kernel {kernel_name(op)!r}" if op.primitive == PALLAS else "cuDNN's fused attention"
    remedy = "interpret=True" if op.primitive == PALLAS else 'implementation="xla"'
    raise ShardingError(
        f"the plan runs {what}{line}, and these devices are of platform {platform!r}, which does not have it: run "
        f"the plan on the chips that it is for, or plan with {remedy} to run it here"
    )
