"""Operations that each device computes on its own parts in a shard_map: XLA would gather their operands, or fail."""

from collections.abc import Sequence
from math import prod
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh as DeviceMesh

from meshwright import jax_compat
from meshwright.plans.plan import partition_spec
from meshwright.plans.tensor import Spec
from meshwright.runtime.program.meshes import on_each_device

Specs = Sequence[Spec | None]

CONVOLUTION = "conv_general_dilated"

# XLA's partitioner cannot split these along their batch dims, the only dims that their rules allow to be split.
_UNKNOWN_TO_XLA = frozenset(("fft", "top_k"))


def is_done_alone(eqn: Any, operands: Specs) -> bool:
    """Whether XLA would not split an operation as its operands are split; or fails over one that is not split.

    An FFT on CPUs takes an operand in row-major order only, and XLA hands it others that were gathered.
    """
    if eqn.primitive.name == "fft":
        return True
    is_split = any(any(spec) for spec in operands if spec is not None)
    return is_split and (eqn.primitive.name in _UNKNOWN_TO_XLA or in_groups(eqn))


def in_groups(eqn: Any) -> bool:
    """Whether an operation is a convolution of several groups: XLA gathers those, or ends the process over them."""
    return eqn.primitive.name == CONVOLUTION and eqn.params["feature_group_count"] * eqn.params["batch_group_count"] > 1


def do_alone(eqn: Any, read: Specs, made: Specs, mesh: DeviceMesh, operands: Sequence[Any]) -> list[Any]:
    """The results of an operation, which reads its operands and makes its results in the given shardings."""
    own = own_part(eqn, read, mesh)
    function = on_each_device(lambda *xs: tuple(jax_compat.bind(own, xs)), mesh, _partitions(read), _partitions(made))
    return list(function(*operands))


def cut_first(eqn: Any, image: Spec | None, operands: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The same convolution of an image that is cut off where its padding is negative below and positive above.

    XLA's CPU backend reads beyond the end of such an image. A dim that is split is left to the partitioner, which cuts
    it off itself.
    """
    if eqn.primitive.name != CONVOLUTION:
        return eqn, operands
    starts, padding = [0] * eqn.invars[0].aval.ndim, list(eqn.params["padding"])
    for i, (dim, (low, high)) in enumerate(zip(eqn.params["dimension_numbers"].lhs_spec[2:], padding, strict=True)):
        if low < 0 < high and eqn.params["lhs_dilation"][i] == 1 and not (image and image[dim]):
            starts[dim] = min(-low, eqn.invars[0].aval.shape[dim])
            padding[i] = (low + starts[dim], high)
    if not any(starts):
        return eqn, operands
    cut = lax.slice(operands[0], starts, operands[0].shape)
    return eqn.replace(params=eqn.params | {"padding": tuple(padding)}), [cut, *operands[1:]]


def own_part(eqn: Any, operands: Specs, mesh: DeviceMesh) -> JaxprEqn:
    """One device's part of an operation: for a convolution, its own groups, the major part of the output features."""
    if not in_groups(eqn):
        return eqn
    parts = prod(mesh.shape[axis] for axis in _features(eqn, operands))
    counts = {name: max(1, eqn.params[name] // parts) for name in ("feature_group_count", "batch_group_count")}
    return eqn.replace(params=eqn.params | counts)


def is_multiplied(eqn: Any, operands: Specs) -> bool:
    """Whether an operation is a convolution whose pixels and output features are split: XLA may add its results up."""
    if eqn.primitive.name != CONVOLUTION:
        return False
    image = operands[0] or ()
    return bool(_features(eqn, operands)) and any(image[d] for d in eqn.params["dimension_numbers"].lhs_spec[2:])


def convolve(eqn: Any, read: Specs, made: Specs, mesh: DeviceMesh, operands: Sequence[Any]) -> list[Any]:
    """The same results with each device's own output features, so that XLA splits by pixels alone."""
    axes = set(_features(eqn, read))

    def kept(specs: Specs) -> tuple[Any, ...]:
        return _partitions([tuple(tuple(a for a in dim if a in axes) for dim in spec or ()) for spec in specs])

    function = on_each_device(lambda *xs: tuple(jax_compat.bind(eqn, xs)), mesh, kept(read), kept(made), axes)
    return list(function(*operands))


def _features(eqn: Any, operands: Specs) -> tuple[str, ...]:
    """The axes that split the output features of a convolution."""
    kernel = operands[1] or ()
    return tuple(kernel[eqn.params["dimension_numbers"].rhs_spec[0]]) if kernel else ()


def _partitions(specs: Specs) -> tuple[Any, ...]:
    return tuple(partition_spec(spec or ()) for spec in specs)
