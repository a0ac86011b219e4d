"""What the vision models share: convolutions, norms, pooling, random images; all (batch, height, width, channels)."""

import jax
import jax.numpy as jnp

from meshwright.zoo.draw import integers, normal, split
from meshwright.zoo.layers import Array, PyTree


def init_conv(key: Array, side: int, inputs: int, outputs: int) -> Array:
    """Returns a kernel (side, side, inputs, outputs), scaled to keep the variance of activations."""
    return normal(key, side, side, inputs, outputs, scale=(2 / (side * side * inputs)) ** 0.5)


def conv(x: Array, kernel: Array, *, stride: int = 1, bias: Array | None = None) -> Array:
    """Convolves with zero padding, in the activations' dtype."""
    y = jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y if bias is None else y + bias.astype(x.dtype)


def batch_norm(x: Array, weights: PyTree, epsilon: float = 1e-5) -> Array:
    """Batch norm in training mode: statistics of this batch, per channel; running averages are not kept."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=(0, 1, 2))
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=(0, 1, 2)) + epsilon)
    return (y * weights["scale"] + weights["bias"]).astype(x.dtype)


def group_norm(x: Array, weights: PyTree, groups: int, epsilon: float = 1e-6) -> Array:
    """Group norm over pixels and the channels of each group (https://arxiv.org/abs/1803.08494)."""
    batch, height, width, channels = x.shape
    y = x.astype(jnp.float32).reshape(batch, height, width, groups, channels // groups)
    y = y - jnp.mean(y, axis=(1, 2, 4), keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=(1, 2, 4), keepdims=True) + epsilon)
    return (y.reshape(x.shape) * weights["scale"] + weights["bias"]).astype(x.dtype)


def max_pool(x: Array, side: int, stride: int) -> Array:
    """Takes the maximum of each window."""
    window, strides = (1, side, side, 1), (1, stride, stride, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, strides, "SAME")


def sample_images(key: Array, batch: int, image: int, classes: int) -> PyTree:
    """Returns random images and classes."""
    image_key, label_key = split(key)
    return {
        "images": normal(image_key, batch, image, image, 3, scale=1.0),
        "labels": integers(label_key, batch, below=classes),
    }
