"""Convolutions: batch, features and groups as in a product, spatial dims with a halo."""

from math import prod

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, ordered
from meshwright.rules.families.windows import Dim, Sliding


def conv_general_dilated(op: Signature) -> LoopNest:
    """``b i s…, o i w… -> b o s…`` with i and the windows summed; groups lead the dims they divide."""
    lhs, rhs, out = op.operands[0].shape, op.operands[1].shape, op.results[0].shape
    numbers = op.params["dimension_numbers"]
    lhs_at, rhs_at, out_at = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    loops = Loops()
    feature_group = _group(loops, op.params["feature_group_count"])
    batch_group = _group(loops, op.params["batch_group_count"])
    batch = loops.add(out[out_at[0]])
    inputs = loops.add(rhs[rhs_at[1]], "sum")
    outputs = loops.add(rhs[rhs_at[0]] // (op.params["feature_group_count"] * op.params["batch_group_count"]))
    left, right, result = {}, {}, {}
    left[lhs_at[0]], left[lhs_at[1]] = batch_group + batch, feature_group + inputs
    right[rhs_at[0]], right[rhs_at[1]] = feature_group + batch_group + outputs, inputs
    result[out_at[0]], result[out_at[1]] = batch, feature_group + batch_group + outputs
    for i, at in enumerate(zip(lhs_at[2:], rhs_at[2:], out_at[2:], strict=True)):
        left[at[0]], right[at[1]], result[at[2]] = _spatial(loops, op, i, (lhs[at[0]], rhs[at[1]], out[at[2]]))
    fetching = _fetching(op, [*feature_group, *batch_group, *batch], inputs, right, result)
    return loops.nest([ordered(left), ordered(right)], [ordered(result)], _flops(op), leads=True, fetching=fetching)


def _group(loops: Loops, count: int) -> Dim:
    return loops.add(count) if count > 1 else ()


def _spatial(loops: Loops, op: Signature, i: int, sizes: tuple[int, int, int]) -> tuple[Dim, Dim, Dim]:
    """Dims of the image, the window and the result in one spatial direction.

    The element read is ``position · stride + offset · holes - low``, so position and offset are interchangeable. In a
    forward pass there are many positions and few offsets; in the gradient of a kernel there are many offsets, which are
    a sum loop that can be split like the image.
    """
    image, window, positions = sizes
    if op.params["feature_group_count"] * op.params["batch_group_count"] > 1:  # no partitioner handles the borders
        return loops.fixed((image,))[0], loops.fixed((window,))[0], loops.fixed((positions,))[0]
    stride, holes = op.params["window_strides"][i], op.params["rhs_dilation"][i]
    low, dilation = op.params["padding"][i][0], op.params["lhs_dilation"][i]
    over_positions = Sliding(image, positions, (window - 1) * holes + 1, stride, low, dilation)
    if over_positions.halo is not None:
        image_dim, position_dim = over_positions.dims(loops)
        return image_dim, loops.add(window, "unsplittable"), position_dim
    over_offsets = Sliding(image, window, (positions - 1) * stride + 1, holes, low, dilation)
    image_dim, offset_dim = over_offsets.dims(loops, "sum")
    return image_dim, offset_dim, loops.add(positions, "unsplittable")


def _fetching(op: Signature, groups: list[int], inputs: Dim, right: dict[int, Dim], result: dict[int, Dim]) -> Dim:
    """Loops each iteration of which fetches once under the windows: over rows of pixels, and features of dilated rows.

    Pixels of a row and their features are contiguous, so that one fetch reads them. In the gradient of the kernel of a
    strided convolution there are gaps between pixels, and fetching takes far longer.
    """
    numbers, holes = op.params["dimension_numbers"], op.params["rhs_dilation"]
    fetching = [*groups, *(loop for at in numbers.out_spec[2:] for loop in result[at])]
    minor = max(range(len(holes)), key=lambda i: numbers.lhs_spec[2 + i], default=0)
    for i, at in enumerate(numbers.rhs_spec[2:]):
        if i != minor:
            fetching += right[at]
        elif holes[i] > 1:
            fetching += inputs
    return tuple(dict.fromkeys(fetching))


def _flops(op: Signature) -> float:
    """Two flops for each element of the result and of one filter; zeros inserted by dilation are not counted."""
    outputs = op.operands[1].shape[op.params["dimension_numbers"].rhs_spec[0]]
    filter_size = prod(op.operands[1].shape) / max(outputs, 1)
    return 2.0 * prod(op.results[0].shape) * filter_size / prod(op.params["lhs_dilation"])


RULES: dict[str, Rule] = {"conv_general_dilated": conv_general_dilated}
