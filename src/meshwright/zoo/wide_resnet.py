"""Wide-ResNet: bottleneck residual blocks with batch norm, their inner convolutions widened."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, checkpointed, init_layer_norm, project
from meshwright.zoo.losses import cross_entropy
from meshwright.zoo.vision import batch_norm, conv, init_conv, max_pool, sample_images


@dataclass(frozen=True)
class Config:
    """The shape of one Wide-ResNet.

    Attributes:
        channels: Channels after the stem; each stage doubles them.
        width: Factor by which the 3x3 convolution of each block is widened.
        squeeze: The same for the 1x1 convolution before it: torchvision widens both, Alpa only the 3x3.
        stages: Blocks of each stage.
        layers: When given, the most blocks of any stage.
    """

    image: int
    classes: int
    channels: int
    width: int
    squeeze: int
    stages: tuple[int, ...]
    layers: int | None = None
    dtype: str = "bfloat16"
    checkpoint: str = "none"

    @property
    def blocks(self) -> list[tuple[int, int]]:
        """Base channels and stride of every block, in order."""
        blocks = []
        for stage, depth in enumerate(self.stages):
            for i in range(min(depth, self.layers or depth)):
                blocks.append((self.channels * 2**stage, 2 if stage > 0 and i == 0 else 1))
        return blocks


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    stem_key, head_key, *keys = split(key, 2 + len(config.blocks))
    layers = []
    inputs = config.channels
    for (base, _), block_key in zip(config.blocks, keys, strict=True):
        layers.append(_init_block(config, block_key, inputs, base))
        inputs = 4 * base
    return {
        "stem": init_conv(stem_key, 7, 3, config.channels),
        "stem_norm": init_layer_norm(config.channels),
        "layers": layers,
        "head": normal(head_key, inputs, config.classes),
        "head_bias": jnp.zeros(config.classes),
    }


def _init_block(config: Config, key: Array, inputs: int, base: int) -> PyTree:
    squeezed, widened, outputs = base * config.squeeze, base * config.width, 4 * base
    keys = split(key, 4)
    weights = {
        "conv1": init_conv(keys[0], 1, inputs, squeezed),
        "norm1": init_layer_norm(squeezed),
        "conv2": init_conv(keys[1], 3, squeezed, widened),
        "norm2": init_layer_norm(widened),
        "conv3": init_conv(keys[2], 1, widened, outputs),
        "norm3": init_layer_norm(outputs),
    }
    if inputs != outputs:
        weights |= {"shortcut": init_conv(keys[3], 1, inputs, outputs), "shortcut_norm": init_layer_norm(outputs)}
    return weights


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean cross entropy of the class."""
    x = conv(batch["images"].astype(config.dtype), params["stem"], stride=2)
    x = max_pool(jax.nn.relu(batch_norm(x, params["stem_norm"])), side=3, stride=2)
    block = checkpointed(_block, config.checkpoint, static_argnums=2)
    for weights, (_, stride) in zip(params["layers"], config.blocks, strict=True):
        x = block(weights, x, stride)
    logits = project("bd,dc->bc", jnp.mean(x, axis=(1, 2)), params["head"], params["head_bias"])
    return jnp.mean(cross_entropy(logits, batch["labels"]))


@jax.named_scope("block")
def _block(weights: PyTree, x: Array, stride: int) -> Array:
    y = jax.nn.relu(batch_norm(conv(x, weights["conv1"]), weights["norm1"]))
    y = jax.nn.relu(batch_norm(conv(y, weights["conv2"], stride=stride), weights["norm2"]))
    y = batch_norm(conv(y, weights["conv3"]), weights["norm3"])
    if "shortcut" in weights:
        x = batch_norm(conv(x, weights["shortcut"], stride=stride), weights["shortcut_norm"])
    return jax.nn.relu(x + y)


def sample(config: Config, key: Array, batch: int, seq: int | None) -> PyTree:
    """Returns random images and classes."""
    return sample_images(key, batch, config.image, config.classes)
