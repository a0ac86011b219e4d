"""Operations that XLA's partitioner computes wrongly, rewritten to be right; docs/compiler-faults.md has every fault.

Results are those of one device: NaN wins where numbers are compared, zeros keep their sign, positions beyond an end are
clamped, and each window is padded with its own padding value. The bytes sent equal the priced bytes.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as DeviceMesh

from meshwright import jax_compat
from meshwright.graph.graph import cpu_itemsize
from meshwright.graph.tracing.flatten import signature_of
from meshwright.plans.plan import OpPlan, partition_spec
from meshwright.plans.tensor import Spec
from meshwright.rules import loop_nest
from meshwright.rules.base import NARROWEST
from meshwright.rules.written import ANNOTATIONS
from meshwright.runtime.program import kernels
from meshwright.runtime.program.bits import from_ordered, ordered, words_of
from meshwright.runtime.program.contributions import Contributions, Waiting
from meshwright.runtime.program.meshes import constrain, on_each_device
from meshwright.runtime.program.per_device import convolve, cut_first, do_alone, is_done_alone, is_multiplied

_SLICES = {"dynamic_slice": 1, "dynamic_update_slice": 2}  # where their start positions begin
_SCATTERS = ("scatter-max", "scatter_max", "scatter-min", "scatter_min")
_LARGEST, _LEAST = ("reduce_max", *_SCATTERS[:2]), ("reduce_min", *_SCATTERS[2:])
# Sums are not among them: they pad with zeros, as every other reader of a shared operand does.
_WINDOWS = ("reduce_window", "reduce_window_max", "reduce_window_min", "select_and_gather_add")


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation on its operands, with start positions that are clamped before XLA sees them.

    If its result were split or sliced again, XLA would start a slice at the unclamped position; and it would drop an
    update beyond the end of a split dim.
    """
    if eqn.primitive.name in ANNOTATIONS:  # the plan's own constraints say what the user's did
        return list(operands)
    first = _SLICES.get(eqn.primitive.name)
    if first is not None:
        whole = eqn.invars[0].aval.shape
        part = eqn.params["slice_sizes"] if first == 1 else eqn.invars[1].aval.shape
        room, last = (size - taken for size, taken in zip(whole, part, strict=True)), first + len(whole)
        starts = [_clamped(start, high) for start, high in zip(operands[first:last], room, strict=True)]
        operands = [*operands[:first], *starts, *operands[last:]]
    return jax_compat.bind(eqn, operands)


def make_virtual(
    eqn: Any, read: Sequence[Spec | None], made: Sequence[Spec], mesh: DeviceMesh, operands: Sequence[Any]
) -> list[Any]:
    """Runs one equation whose results are virtual, and which XLA must split as its rule says.

    Args:
        eqn: The equation.
        read: The sharding in which it takes each operand; None for scalars.
        made: The sharding in which it makes each result.
        mesh: The devices.
        operands: The operands, in any sharding.
    """
    eqn, operands = cut_first(eqn, read[0] if read else None, operands)
    if is_done_alone(eqn, read):
        return do_alone(eqn, read, made, mesh, operands)
    placed = [x if spec is None else constrain(x, mesh, spec) for x, spec in zip(operands, read, strict=True)]
    results = convolve(eqn, read, made, mesh, placed) if is_multiplied(eqn, read) else bind(eqn, placed)
    return [constrain(x, mesh, spec) for x, spec in zip(results, made, strict=True)]


def _clamped(start: Any, high: int) -> np.generic | np.ndarray | jax.Array:
    """A start position between 0 and the last one, in its own dtype."""
    dtype = jnp.result_type(start)
    zero, last = np.asarray(0, dtype), np.asarray(min(high, int(jnp.iinfo(dtype).max)), dtype)
    return np.clip(start, zero, last) if isinstance(start, np.generic | np.ndarray) else lax.clamp(zero, start, last)


def run(eqn: Any, op: OpPlan | None, contributions: Contributions, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation as the plan says; if it is not in the plan, the result is virtual."""
    mesh = contributions.mesh
    eqn, operands = cut_first(eqn, op.operands[0] if op and op.operands else None, operands)
    if op is None:
        return bind(eqn, operands)
    if kernels.is_kernel(eqn):
        return kernels.run(eqn, op, contributions, operands)
    if not op.sums and is_done_alone(eqn, op.operands):
        return do_alone(eqn, op.operands, op.results, mesh, operands)
    if is_multiplied(eqn, op.operands):
        return convolve(eqn, op.operands, op.partial, mesh, operands)
    if eqn.primitive.name.startswith("scatter") and _num_positions(eqn, op, mesh) == 1:
        # XLA reads the one row that is written. If the table is a slice, XLA does not clamp a position beyond it whose
        # row another device has.
        operands = [lax.optimization_barrier(operands[0]), *operands[1:]]
    if _is_compared(eqn, op):
        return [_compared(eqn, op, mesh, operands)]
    if _is_looked_up(eqn, op):
        return [_looked_up(eqn, op, contributions, operands)]
    if eqn.primitive.name in _WINDOWS and _reaches(eqn, op):
        # XLA pads an operand once for all windows of the same kind, with the padding value of the first.
        operands = lax.optimization_barrier(list(operands))
    return bind(eqn, operands)


def is_settled(eqn: Any, op: OpPlan) -> bool:
    """Whether `run` itself combines the values of the devices, and leaves the result in its final sharding."""
    return kernels.is_kernel(eqn) or _is_compared(eqn, op) or _is_looked_up(eqn, op)


def _num_positions(eqn: Any, op: OpPlan, mesh: DeviceMesh) -> int:
    """At how many positions each device scatters."""
    sizes, spec = eqn.invars[1].aval.shape[:-1], op.operands[1] or ()
    held = (prod(mesh.shape[axis] for axis in axes) for axes in spec)
    return prod(size // parts for size, parts in zip(sizes, held, strict=False)) if spec else prod(sizes)


def _reaches(eqn: Any, op: OpPlan) -> bool:
    """Whether an operation's windows reach into other devices' parts of its first operand."""
    nest = loop_nest(signature_of(eqn))
    pairs = zip(nest.operands[0], op.operands[0] or (), strict=True)
    return any(held and any(nest.loops[loop].halo for loop in dim) for dim, held in pairs)


def _is_compared(eqn: Any, op: OpPlan) -> bool:
    """Whether floats of several devices are compared: all-reduces drop NaN, and take either of two zeros."""
    is_float = jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating)
    return bool(op.sums) and is_float and eqn.primitive.name in (*_LARGEST, *_LEAST)


def _compared(eqn: Any, op: OpPlan, mesh: DeviceMesh, operands: Sequence[Any]) -> jax.Array:
    """The largest or least numbers: first on each device, then over all devices as integers in the floats' order."""
    largest, is_scatter = eqn.primitive.name in _LARGEST, eqn.primitive.name in _SCATTERS
    dtype = eqn.outvars[0].aval.dtype
    wide = jnp.dtype(jnp.float32) if dtype.itemsize < NARROWEST else dtype  # as priced

    def own(*parts: Any) -> jax.Array:
        made = _own_scatter(eqn, op, mesh, *parts) if is_scatter else jax_compat.bind(eqn, parts)
        keys = ordered(made[0].astype(wide), largest)
        keys = lax.pmax(keys, op.sums) if largest else lax.pmin(keys, op.sums)
        return from_ordered(keys, wide, largest).astype(dtype)

    return _by_hand(own, op, mesh, op.results[0] or ())(*operands)


def _is_looked_up(eqn: Any, op: OpPlan) -> bool:
    """Whether floats are looked up in a table of which each device has a part: XLA's sum of the parts loses −0."""
    return bool(op.sums) and eqn.primitive.name == "gather" and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact)


def _looked_up(eqn: Any, op: OpPlan, contributions: Contributions, operands: Sequence[Any]) -> jax.Array:
    """Each device looks up the rows it has; they are added as integers to the zeros of the devices without them."""
    kind, whole, mesh = eqn.outvars[0].aval, eqn.invars[0].aval.shape, contributions.mesh
    sent = _sent(kind.dtype, mesh)
    words = words_of(sent, in_pairs=_is_paired(kind.shape, sent, op, mesh))

    def own(table: Any, indices: Any) -> jax.Array:
        positions, has = _own_positions(eqn, op, mesh, indices)
        rows = zip(eqn.params["slice_sizes"], whole, table.shape, strict=True)
        sizes = tuple(part if taken == size else taken for taken, size, part in rows)
        params = eqn.params | {"slice_sizes": sizes, "indices_are_sorted": False, "unique_indices": False}
        found = words.pack(jax_compat.bind(eqn.replace(params=params), (table, positions))[0].astype(sent))
        offsets = eqn.params["dimension_numbers"].offset_dims
        has = jnp.expand_dims(has, (*offsets, *range(kind.ndim, found.ndim)))
        return jnp.expand_dims(jnp.where(has, found, jnp.zeros_like(found)), range(len(op.sums)))

    partial, settled = ((*(spec or ()), *((),) * words.extra) for spec in (op.partial[0], op.results[0]))
    found = _by_hand(own, op, mesh, (*((axis,) for axis in op.sums), *partial))(*operands)
    total = contributions.add_up(found, Waiting(op.sums, partial, settled))
    return words.unpack(total).astype(kind.dtype)


def _own_positions(eqn: Any, op: OpPlan, mesh: DeviceMesh, indices: Any) -> tuple[Any, Any]:
    """Positions within a device's own part of a table, −1 beyond the table, and which positions are in that part.

    A position beyond the table that is not clamped counts as in the part that it would be clamped to.
    """
    numbers, clamps = eqn.params["dimension_numbers"], _clamps(eqn)
    dims = getattr(numbers, "start_index_map", None) or numbers.scatter_dims_to_operand_dims
    has, found = jnp.ones(indices.shape[:-1], bool), []
    for k, d in enumerate(dims):
        size, taken, axes = eqn.invars[0].aval.shape[d], _taken(eqn)[d], (op.operands[0] or ())[d]
        asked = indices[..., k]
        place = _clamped(asked, size - taken)
        beyond, place = (place != asked) & (not clamps), place.astype(jnp.int32)
        if axes and taken != size:
            part = size // prod(mesh.shape[axis] for axis in axes)
            place = place - part * lax.axis_index(axes)
            has &= (place >= 0) & (place < part)
        found.append(jnp.where(beyond, -1, place))
    return jnp.stack(found, -1), has


def _own_scatter(eqn: Any, op: OpPlan, mesh: DeviceMesh, table: Any, indices: Any, updates: Any) -> list[Any]:
    """A device's own part of a table with its own updates; where updates are compared, so is the part before them."""
    positions, has = _own_positions(eqn, op, mesh, indices)
    params = {"mode": lax.GatherScatterMode.FILL_OR_DROP, "indices_are_sorted": False, "unique_indices": False}
    own = eqn.replace(params=eqn.params | params)
    return jax_compat.bind(own, (table, jnp.where(has[..., None], positions, -1), updates))


def _clamps(eqn: Any) -> bool:
    """Whether positions beyond a table are clamped; otherwise they are filled or dropped."""
    promised = eqn.primitive.name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return promised or eqn.params["mode"] == lax.GatherScatterMode.CLIP


def _taken(eqn: Any) -> tuple[int, ...]:
    """How much of each dim of a table one position takes or writes."""
    if eqn.primitive.name == "gather":
        return tuple(eqn.params["slice_sizes"])
    numbers, updates = eqn.params["dimension_numbers"], eqn.invars[2].aval.shape
    widths = (updates[d] for d in numbers.update_window_dims)
    single = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    return tuple(1 if d in single else next(widths) for d in range(eqn.invars[0].aval.ndim))


def _is_paired(shape: tuple[int, ...], dtype: Any, op: OpPlan, mesh: DeviceMesh) -> bool:
    """Whether floats of 16 bits can be sent in pairs: not on CPUs, and only if each device's rows have even length."""
    parts = [prod(mesh.shape[axis] for axis in (spec or ((),))[-1]) for spec in (op.partial[0], op.results[0])]
    even = bool(shape) and all(shape[-1] % (2 * count) == 0 for count in parts)
    return even and dtype.itemsize == 2 and mesh.devices.flat[0].platform != "cpu"


def _sent(dtype: Any, mesh: DeviceMesh) -> np.dtype:
    """The dtype in which floats are sent: XLA's CPU backend sends bfloat16 as float32."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return jnp.dtype(jnp.float32 if on_cpu and cpu_itemsize(str(dtype), dtype.itemsize) == 4 else dtype)


def _by_hand(function: Callable[..., Any], op: OpPlan, mesh: DeviceMesh, result: Spec) -> Callable[..., Any]:
    specs = tuple(partition_spec(spec or ()) for spec in op.operands)
    return on_each_device(function, mesh, specs, partition_spec(result))
