"""What the models share: products with weights, norms, and running a stack of layers.

Weights are float32 and are cast at use to the dtype of the activations they meet, so a model computes in whatever
dtype its first activation has. Softmax, norms and the loss are computed in float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import cycle
from math import floor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.zoo.draw import integers, split
from meshwright.zoo.options import checkpoint_parts

Array = jax.Array
PyTree = Any
Layer = Callable[..., PyTree]  # (weights, x) to x

FUSED_ATTENTION = "fused_attention"  # the name of what checkpoints keep of a kernel that is not one operation


class Weight(ABC):
    """A weight that multiplies in a way of its own: what stands in the parameters in place of an array."""

    @abstractmethod
    def project(self, spec: str, x: Array) -> Array:
        """The product that the einsum `spec` says."""


def project(spec: str, x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiplies by a weight as the einsum `spec` says, in the activations' dtype, and adds a bias if there is one."""
    y = weight.project(spec, x) if isinstance(weight, Weight) else jnp.einsum(spec, x, weight.astype(x.dtype))
    return y if bias is None else y + bias.astype(x.dtype)


def rms_norm(x: Array, scale: Array, epsilon: float = 1e-5) -> Array:
    """Root-mean-square norm over the last dim (https://arxiv.org/abs/1910.07467)."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * scale).astype(x.dtype)


def capped(scores: Array, cap: float) -> Array:
    """Scores bent by a tanh, so that they stay between `-cap` and `cap`."""
    return cap * jnp.tanh(scores / cap)


def init_layer_norm(dim: int) -> PyTree:
    """Returns the weights of a layer norm."""
    return {"scale": jnp.ones(dim), "bias": jnp.zeros(dim)}


def layer_norm(x: Array, weights: PyTree, epsilon: float = 1e-5) -> Array:
    """Layer norm over the last dim, with scale and bias (https://arxiv.org/abs/1607.06450)."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return (y * weights["scale"] + weights["bias"]).astype(x.dtype)


def init_stack(init_layer: Callable[[Array], PyTree], key: Array, count: int, *, scan: bool) -> PyTree:
    """Returns the weights of `count` layers: a list of them or, to be scanned, one tree stacked on a leading dim."""
    keys = split(key, count)
    if scan and not isinstance(keys, list):
        return jax.vmap(init_layer)(keys)
    layers = [init_layer(k) for k in keys]
    return jax.tree.map(_stacked, *layers) if scan else layers


def _stacked(*weights: Any) -> Array:
    """Several arrays as one, of NumPy where arrays are wanted now: JAX would compile a program for every shape."""
    return jnp.stack(weights) if isinstance(weights[0], jax.core.Tracer) else jax.device_put(np.stack(weights))


def run_stack(layer: Layer | Sequence[Layer], stack: PyTree, x: PyTree, *, checkpoint: str) -> PyTree:
    """Runs `x = layer(weights, x)` through a list of layers' weights, or scans over stacked ones.

    Args:
        layer: One layer, or several kinds with weights of the same shapes that take turns.
        stack: The weights.
        x: The input of the first layer.
        checkpoint: What the backward pass recomputes: a name of `options.CHECKPOINTS`, followed by the part of the
            layers that do so where these are not all: ``"full:1/2"`` is every second layer.
    """
    checkpoint, share = checkpoint_parts(checkpoint)
    kinds = (layer,) if callable(layer) else tuple(layer)
    if isinstance(stack, list):
        for i, (kind, weights) in enumerate(zip(cycle(kinds), stack, strict=False)):
            repeats = floor((i + 1) * share) > floor(i * share)
            x = checkpointed(kind, checkpoint if repeats else "none")(weights, x)
        return x
    assert share == 1, "scanned layers are alike"
    # A scan's body cannot be merged with its backward pass.
    turn = [checkpointed(kind, checkpoint, prevent_cse=False) for kind in kinds]
    if len(turn) == 1:
        return jax.lax.scan(lambda x, weights: (turn[0](weights, x), None), x, stack)[0]

    def turns(x: PyTree, weights: PyTree) -> tuple[PyTree, None]:
        for one, own in zip(turn, _unstacked(weights), strict=False):
            x = one(own, x)
        return x, None

    whole = len(jax.tree.leaves(stack)[0]) // len(turn)
    groups = jax.tree.map(lambda w: w[: whole * len(turn)].reshape(whole, len(turn), *w.shape[1:]), stack)
    x, _ = jax.lax.scan(turns, x, groups)
    return turns(x, jax.tree.map(lambda w: w[whole * len(turn) :], stack))[0]


def _unstacked(stack: PyTree) -> list[PyTree]:
    return [jax.tree.map(lambda w, i=i: w[i], stack) for i in range(len(jax.tree.leaves(stack)[0]))]


def checkpointed(layer: Layer, checkpoint: str, **options: Any) -> Layer:
    """A layer whose backward pass recomputes what a `checkpoint` of the zoo says; options are `jax.checkpoint`'s."""
    if checkpoint == "none":
        return layer
    policies: dict[str, Any] = {"selective": _keep_products, "alternate": _KeepEverySecondProduct(), "full": None}
    return jax.checkpoint(layer, policy=policies[checkpoint], **options)


def _keep_products(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Keeps the results of convolutions, of products with weights, and of fused attention."""
    if primitive.name.startswith("conv_general") or _is_attention(primitive, params):
        return True
    return bool(jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *avals, **params))


def _is_attention(primitive: Any, params: Any) -> bool:
    named = primitive.name == "name" and params["name"] == FUSED_ATTENTION
    return named or primitive.name.startswith("dot_product_attention")


class _KeepEverySecondProduct:
    """Keeps fused attention and every second product with a weight, counted within one layer as torchtitan does."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> bool:
        kept = _keep_products(primitive, *avals, **params)
        if not kept or _is_attention(primitive, params):
            return kept
        self.count += 1
        return self.count % 2 == 1


def sample_tokens(key: Array, batch: int, seq: int, vocab: int) -> PyTree:
    """Returns random tokens, each labelled with its successor."""
    tokens = integers(key, batch, seq + 1, below=vocab)
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
