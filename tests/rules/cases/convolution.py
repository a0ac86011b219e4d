"""Cases of convolutions."""

from typing import Any

import jax
import numpy as np
from jax import lax

from ..contract import Case, Shard
from . import Builder, Sizes


def convolution(lhs: np.ndarray, rhs: np.ndarray, **params: Any) -> Case:
    """A convolution in the order batch, feature, then the spatial dims."""
    rank = lhs.ndim - 2
    params = {
        "window_strides": (1,) * rank,
        "lhs_dilation": (1,) * rank,
        "rhs_dilation": (1,) * rank,
        "padding": ((0, 0),) * rank,
        "dimension_numbers": lax.ConvDimensionNumbers(*[tuple(range(rank + 2))] * 3),
        "feature_group_count": 1,
        "batch_group_count": 1,
    } | params

    def run(x, y):
        return lax.conv_general_dilated(x, y, **params)

    return Case(run, [lhs, rhs], lambda shard, x, y: _local(shard, x, y, params))


def _local(shard: Shard, x: np.ndarray, y: np.ndarray, params: dict[str, Any]) -> jax.Array:
    """Fetches the halo, then pads so that the shard's own positions come out."""
    reach, padding = {}, []
    for i, d in enumerate(range(2, x.ndim)):
        fetched, padded = _direction(shard, i, d, x.shape[d], y.shape[d], params)
        padding.append(padded)
        if fetched is not None:
            reach[d] = fetched
    x = shard.with_halo(0, reach, 0) if reach else x
    groups = {
        "feature_group_count": x.shape[1] // y.shape[1],
        "batch_group_count": x.shape[0] // shard.result_shape()[0],
    }
    return lax.conv_general_dilated(x, y, **(params | groups | {"padding": padding}))


def _direction(shard: Shard, i: int, d: int, image: int, window: int, params: dict[str, Any]):
    """Elements to fetch in one direction, if it is split, and the padding to convolve with."""
    low, dilation = params["padding"][i][0], params["lhs_dilation"][i]
    stride, holes = params["window_strides"][i], params["rhs_dilation"][i]
    positions = shard.result_shape()[d]
    split = image < shard.operands[0].shape[d]
    left = low // dilation if split else 0
    last = (positions - 1) * stride + (window - 1) * holes - low  # the last place, between elements too, that is met
    right = last // dilation + 1 - image if split else 0
    covered = (image + left + right - 1) * dilation + 1
    high = last + low + 1 - covered - (low - left * dilation)
    return (left, right) if split else None, (low - left * dilation, high)


def same_padding(size: Sizes) -> Case:
    return convolution(size.floats(2, 1, 8, 6), size.floats(1, 1, 3, 5), padding=((1, 1), (2, 2)))


def batch_and_features(size: Sizes) -> Case:
    b, i, o = size.shape(3)
    return convolution(size.floats(b, i, 4), size.floats(o, i, 3), padding=((1, 1),))


def strided_stem(size: Sizes) -> Case:
    return convolution(size.floats(1, 2, 16), size.floats(1, 2, 7), window_strides=(2,), padding=((2, 3),))


def strided_with_even_window(size: Sizes) -> Case:
    return convolution(size.floats(1, 1, 16), size.floats(1, 1, 4), window_strides=(2,), padding=((0, 2),))


def strided_pointwise(size: Sizes) -> Case:
    return convolution(size.floats(1, 1, 4, 6), size.floats(2, 1, 1, 1), window_strides=(2, 3))


def valid_padding_stays_whole(size: Sizes) -> Case:
    return convolution(size.floats(2, 1, 6), size.floats(2, 1, 3))


def feature_groups(size: Sizes) -> Case:
    g, i, o = 2, size(), size()
    return convolution(size.floats(1, g * i, 3), size.floats(g * o, i, 1), feature_group_count=g)


def depthwise(size: Sizes) -> Case:
    same = {"padding": ((1, 1),), "feature_group_count": 4}
    return convolution(size.floats(size(), 4, 4), size.floats(4, 1, 3), **same)


def batch_groups(size: Sizes) -> Case:
    g, b, i, o = 2, size(), size(), size()
    return convolution(size.floats(g * b, i, 3), size.floats(g * o, i, 2), batch_group_count=g)


def gradient_of_image(size: Sizes) -> Case:
    """The transposed convolution that a strided one's gradient is."""
    dilated = {"lhs_dilation": (2, 3), "padding": ((1, 2), (2, 2))}
    return convolution(size.floats(1, 2, 4, 4), size.floats(2, 2, 3, 3), **dilated)


def gradient_of_kernel(size: Sizes) -> Case:
    """Image and cotangent are slid over each other; the few positions are the kernel."""
    return convolution(size.floats(2, 1, 8, 6), size.floats(1, 1, 8, 6), padding=((1, 1), (1, 1)))


def gradient_of_strided_kernel(size: Sizes) -> Case:
    padded = {"rhs_dilation": (2,), "padding": ((1, 1),)}
    return convolution(size.floats(2, 2, 8), size.floats(3, 2, 4), **padded)


def holes_in_window(size: Sizes) -> Case:
    holes = {"rhs_dilation": (2,), "padding": ((2, 2),)}
    return convolution(size.floats(2, 2, 8), size.floats(1, 2, 3), **holes)


def channels_last(size: Sizes) -> Case:
    """Another order of the dims; nothing is padded or grouped, so a shard runs the same convolution."""
    numbers = lax.ConvDimensionNumbers((0, 3, 1, 2), (3, 2, 0, 1), (0, 3, 1, 2))

    def run(x, y):
        return lax.conv_general_dilated(x, y, (1, 1), "VALID", dimension_numbers=numbers)

    return Case(run, [size.floats(2, 3, 1, 4), size.floats(1, 1, 4, 2)])


CASES: list[tuple[str, Builder]] = [
    ("conv_general_dilated", build)
    for build in (
        same_padding,
        batch_and_features,
        strided_stem,
        strided_with_even_window,
        strided_pointwise,
        valid_padding_stays_whole,
        feature_groups,
        depthwise,
        batch_groups,
        gradient_of_image,
        gradient_of_kernel,
        gradient_of_strided_kernel,
        holes_in_window,
        channels_last,
    )
]
