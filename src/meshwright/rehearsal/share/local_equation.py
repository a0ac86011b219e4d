"""One device's part of an operation: the same primitive on the device's shards, with parameters for their shapes.

Where a device would use its own offset (an iota, a look-up in a part of a table) it begins at 0 here, and where it
would read elements of its neighbours (the halo of a convolution) it reads padding: times and shapes are the same, the
numbers are not.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from meshwright import jax_compat
from meshwright.plans.tensor import Spec
from meshwright.runtime.program.kernels import PALLAS, pallas_params
from meshwright.runtime.program.per_device import CONVOLUTION

Shape = tuple[int, ...]

#: Operations that only say where a value should be: on one device there is nothing to do.
_PLACING = frozenset(("sharding_constraint", "mesh_cast", "reshard", "device_put", "layout_constraint"))


def local_shape(shape: Sequence[int], spec: Spec | None, sizes: dict[str, int]) -> Shape:
    """The shape of one device's shard.

    >>> local_shape((8, 6), (("x",), ("y",)), {"x": 4, "y": 2})
    (2, 3)
    """
    if spec is None:
        return tuple(shape)
    found = list(shape)
    for dim, axes in enumerate(spec):
        for axis in axes:
            found[dim] //= sizes[axis]
    return tuple(found)


def run_local(eqn: Any, operands: Sequence[Any], made: Sequence[Shape]) -> list[Any] | None:
    """The results of an equation on one device's operands; None where they do not have the expected shapes."""
    if eqn.primitive.name in _PLACING:
        return list(operands)
    change = _CHANGES.get(eqn.primitive.name)
    shapes = [tuple(getattr(x, "shape", ())) for x in operands]
    if eqn.primitive.name == "reshape" and prod(shapes[0]) != prod(made[0]):  # JAX notices this only later
        return None
    local = eqn if change is None else eqn.replace(params=eqn.params | change(eqn, shapes, made))
    try:
        results = jax_compat.bind(local, operands)
    except (TypeError, ValueError):  # JAX refuses these shapes: the caller computes the whole operation
        return None
    return results if [tuple(x.shape) for x in results] == list(made) else None


def _shape(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    return {"shape": made[0]}


def _tail(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    """The shape of what is drawn for each of the keys, whose dims lead."""
    return {"shape": made[0][len(shapes[0]) :]}


def _new_sizes(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    return {"new_sizes": made[0]}


def _slice_sizes(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    return {"slice_sizes": made[0]}


def _reps(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    return {"reps": tuple(n // max(size, 1) for n, size in zip(made[0], shapes[0], strict=True))}


def _slice(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    """Dims that are taken whole may be split; a device takes its own part whole."""
    whole = eqn.invars[0].aval.shape
    ends = zip(eqn.params["limit_indices"], whole, shapes[0], strict=True)
    return {"limit_indices": tuple(part if part != size else end for end, size, part in ends)}


def _gather(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    rows = zip(eqn.params["slice_sizes"], eqn.invars[0].aval.shape, shapes[0], strict=True)
    sizes = tuple(part if taken == size else taken for taken, size, part in rows)
    # A device looks up positions of the whole table in its own part: those beyond it are clamped.
    return {"slice_sizes": sizes, "indices_are_sorted": False, "unique_indices": False}


def _convolution(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    params, numbers = eqn.params, eqn.params["dimension_numbers"]
    (image, kernel), result = shapes, made[0]
    whole = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    features, batch = params["feature_group_count"], params["batch_group_count"]
    if features > 1:  # the device's own groups
        features = features * image[numbers.lhs_spec[1]] // whole[0][numbers.lhs_spec[1]]
    if batch > 1:
        batch = batch * image[numbers.lhs_spec[0]] // whole[0][numbers.lhs_spec[0]]
    padding = []
    for i, at in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], strict=True)):
        sizes = image[at[0]], kernel[at[1]], result[at[2]]
        is_split = sizes[0] != whole[0][at[0]] or sizes[1] != whole[1][at[1]]
        steps = params["window_strides"][i], params["lhs_dilation"][i], params["rhs_dilation"][i]
        padding.append(_padding(params["padding"][i], sizes, steps) if is_split else params["padding"][i])
    return {"feature_group_count": features, "batch_group_count": batch, "padding": tuple(padding)}


def _pallas(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    return pallas_params(eqn, [*shapes, *made])


def _windows(eqn: Any, shapes: Sequence[Shape], made: Sequence[Shape]) -> dict[str, Any]:
    """The paddings with which windows over a part have as many positions as the part of the result."""
    params = eqn.params
    scatters = eqn.primitive.name.startswith("select_and_scatter")
    array = next(i for i, v in enumerate(eqn.invars) if v.aval.shape)
    over = 1 if eqn.primitive.name == "select_and_scatter_add" else array
    positions = shapes[1 - over] if scatters else made[0]
    whole, ones = eqn.invars[over].aval.shape, (1,) * len(shapes[over])
    found = []
    for d, size in enumerate(shapes[over]):
        sizes = size, params["window_dimensions"][d], positions[d]
        holes = ((params.get(name) or ones)[d] for name in ("base_dilation", "window_dilation"))
        steps = (params["window_strides"][d], *holes)
        found.append(params["padding"][d] if size == whole[d] else _padding(params["padding"][d], sizes, steps))
    return {"padding": tuple(found)}


def _padding(whole: tuple[int, int], sizes: Sequence[int], steps: Sequence[int]) -> tuple[int, int]:
    """Padding with which a window has a number of positions over an image: what is missing at its end is padded."""
    (image, window, positions), (stride, apart, holes) = sizes, steps
    reach, width = (window - 1) * holes + 1, (image - 1) * apart + 1
    return whole[0], (positions - 1) * stride + reach - width - whole[0]


_WINDOWED = (
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
    "select_and_scatter_add",
    "select_and_scatter",
)

#: Primitives whose parameters state shapes, with what changes in them.
_CHANGES: dict[str, Callable[[Any, Sequence[Shape], Sequence[Shape]], dict[str, Any]]] = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "iota_2x32_shape", "empty", "empty2"), _shape),
    **dict.fromkeys(("random_bits", "random_split"), _tail),
    **dict.fromkeys(_WINDOWED, _windows),
    "reshape": _new_sizes,
    "dynamic_slice": _slice_sizes,
    "tile": _reps,
    "slice": _slice,
    "gather": _gather,
    CONVOLUTION: _convolution,
    PALLAS: _pallas,
}
