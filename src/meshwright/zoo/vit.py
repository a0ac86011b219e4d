"""Vision transformer: an image cut into patches, a class token before them, pre-norm layers, a linear classifier."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo import transformer
from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import (
    Array,
    PyTree,
    init_layer_norm,
    init_stack,
    layer_norm,
    project,
    run_stack,
)
from meshwright.zoo.losses import cross_entropy
from meshwright.zoo.vision import sample_images


@dataclass(frozen=True)
class Config:
    """The shape of one ViT; `image` and `patch` are sides in pixels."""

    image: int
    patch: int
    classes: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    dtype: str = "bfloat16"
    scan: bool = False
    checkpoint: str = "none"
    attention: str | None = None


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    d, side = config.hidden, config.image // config.patch
    keys = split(key, 5)
    init_layer = partial(transformer.init_layer, d=d, heads=config.heads, ffn=config.ffn)
    return {
        "patch": normal(keys[0], config.patch, config.patch, 3, d),
        "patch_bias": jnp.zeros(d),
        "class_token": normal(keys[1], d),
        "positions": normal(keys[2], side * side + 1, d),
        "layers": init_stack(init_layer, keys[3], config.layers, scan=config.scan),
        "norm": init_layer_norm(d),
        "head": normal(keys[4], d, config.classes),
        "head_bias": jnp.zeros(config.classes),
    }


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the class."""
    x = _embed(config, params, batch["images"].astype(config.dtype))  # B S D
    layer = partial(transformer.pre_norm_layer, causal=False, kind=config.attention)
    x = run_stack(layer, params["layers"], x, checkpoint=config.checkpoint)
    x = layer_norm(x[:, 0], params["norm"])
    logits = project("bd,dc->bc", x, params["head"], params["head_bias"])
    return jnp.mean(cross_entropy(logits, batch["labels"]))


@jax.named_scope("embed")
def _embed(config: Config, params: PyTree, images: Array) -> Array:
    batch, side = images.shape[0], config.image // config.patch
    patches = images.reshape(batch, side, config.patch, side, config.patch, 3)
    x = project("bhpwqc,pqcd->bhwd", patches, params["patch"], params["patch_bias"])
    x = x.reshape(batch, side * side, config.hidden)
    first = jnp.broadcast_to(params["class_token"].astype(x.dtype), (batch, 1, config.hidden))
    return jnp.concatenate([first, x], axis=1) + params["positions"].astype(x.dtype)


def sample(config: Config, key: Array, batch: int, seq: int | None) -> PyTree:
    """Returns random images and classes."""
    return sample_images(key, batch, config.image, config.classes)
