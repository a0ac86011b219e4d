"""The U-Net of denoising diffusion: it learns the noise that was added to an image, at any strength of noise."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.zoo.attention import attend
from meshwright.zoo.draw import integers, normal, split
from meshwright.zoo.layers import Array, PyTree, checkpointed, init_layer_norm, project
from meshwright.zoo.vision import conv, group_norm, init_conv

TIMESTEPS = 1000


@dataclass(frozen=True)
class Config:
    """The shape of one U-Net.

    Attributes:
        channels: Channels at the full resolution.
        factors: Factor of the channels at each resolution; each level halves the image.
        layers: Residual blocks per level on the way down; one more on the way up.
        attention: Image side at which blocks have attention; the middle always has.
        groups: Groups of the group norms.
    """

    image: int
    channels: int
    factors: tuple[int, ...]
    layers: int
    attention: int
    groups: int = 32
    dtype: str = "bfloat16"
    checkpoint: str = "none"


@dataclass(frozen=True)
class _Block:
    inputs: int
    outputs: int
    attention: bool
    resample: bool


def _blocks(config: Config) -> tuple[list[_Block], list[_Block]]:
    """Returns the blocks on the way down and on the way up, in order."""
    down, up = [], []
    channels = config.channels
    skips = [channels]
    levels = [(config.channels * f, config.image >> i == config.attention) for i, f in enumerate(config.factors)]
    for level, (outputs, attention) in enumerate(levels):
        for i in range(config.layers):
            resample = i == config.layers - 1 and level < len(levels) - 1
            down.append(_Block(channels, outputs, attention, resample))
            channels = outputs
            skips += [channels, channels] if resample else [channels]
    for level, (outputs, attention) in reversed(list(enumerate(levels))):
        for i in range(config.layers + 1):
            up.append(_Block(channels + skips.pop(), outputs, attention, i == config.layers and level > 0))
            channels = outputs
    return down, up


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    down, up = _blocks(config)
    channels, top = config.channels, down[-1].outputs
    keys = iter(split(key, 6 + len(down) + len(up)))
    init_block = partial(_init_block, 4 * channels)
    middle = [_Block(top, top, True, False), _Block(top, top, False, False)]
    return {
        "stem": init_conv(next(keys), 3, 3, channels),
        "stem_bias": jnp.zeros(channels),
        "time1": normal(next(keys), channels, 4 * channels),
        "time1_bias": jnp.zeros(4 * channels),
        "time2": normal(next(keys), 4 * channels, 4 * channels),
        "time2_bias": jnp.zeros(4 * channels),
        "down": [init_block(next(keys), block) for block in down],
        "middle": [init_block(next(keys), block) for block in middle],
        "up": [init_block(next(keys), block) for block in up],
        "norm": init_layer_norm(channels),
        "head": init_conv(next(keys), 3, channels, 3),
        "head_bias": jnp.zeros(3),
    }


def _init_block(time_dim: int, key: Array, block: _Block) -> PyTree:
    keys = split(key, 6)
    inputs, outputs = block.inputs, block.outputs
    weights: dict[str, Any] = {
        "norm1": init_layer_norm(inputs),
        "conv1": init_conv(keys[0], 3, inputs, outputs),
        "conv1_bias": jnp.zeros(outputs),
        "time": normal(keys[1], time_dim, outputs),
        "time_bias": jnp.zeros(outputs),
        "norm2": init_layer_norm(outputs),
        "conv2": init_conv(keys[2], 3, outputs, outputs),
        "conv2_bias": jnp.zeros(outputs),
    }
    if inputs != outputs:
        weights |= {"shortcut": normal(keys[3], inputs, outputs), "shortcut_bias": jnp.zeros(outputs)}
    if block.attention:
        weights["attention"] = _init_attention(keys[4], outputs)
    if block.resample:
        weights |= {"resample": init_conv(keys[5], 3, outputs, outputs), "resample_bias": jnp.zeros(outputs)}
    return weights


def _init_attention(key: Array, channels: int) -> PyTree:
    keys = dict(zip("qkvo", split(key, 4), strict=True))
    weights = {name: normal(k, channels, channels) for name, k in keys.items()}
    return weights | {f"{name}_bias": jnp.zeros(channels) for name in keys} | {"norm": init_layer_norm(channels)}


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean squared error of the predicted noise, at the batch's timesteps of the linear schedule."""
    kept = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, TIMESTEPS))[batch["times"]][:, None, None, None]
    noisy = jnp.sqrt(kept) * batch["images"] + jnp.sqrt(1 - kept) * batch["noise"]
    predicted = _predict(config, params, noisy.astype(config.dtype), batch["times"])
    return jnp.mean(jnp.square(predicted.astype(jnp.float32) - batch["noise"]))


def _predict(config: Config, params: PyTree, x: Array, times: Array) -> Array:
    block = checkpointed(partial(_block, config), config.checkpoint)
    time = _embed_time(config, params, times)
    x = conv(x, params["stem"], bias=params["stem_bias"])
    skips = [x]
    for weights in params["down"]:
        x = block(weights, x, time)
        skips.append(x)
        if "resample" in weights:
            x = conv(x, weights["resample"], stride=2, bias=weights["resample_bias"])
            skips.append(x)
    for weights in params["middle"]:
        x = block(weights, x, time)
    for weights in params["up"]:
        x = block(weights, jnp.concatenate([x, skips.pop()], axis=-1), time)
        if "resample" in weights:
            x = conv(_double(x), weights["resample"], bias=weights["resample_bias"])
    x = jax.nn.silu(group_norm(x, params["norm"], config.groups))
    return conv(x, params["head"], bias=params["head_bias"])


@jax.named_scope("time")
def _embed_time(config: Config, params: PyTree, times: Array) -> Array:
    half = config.channels // 2
    angles = times[:, None] * 10_000.0 ** (-jnp.arange(half) / (half - 1))
    x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(config.dtype)
    x = jax.nn.silu(project("bi,io->bo", x, params["time1"], params["time1_bias"]))
    return project("bi,io->bo", x, params["time2"], params["time2_bias"])


@jax.named_scope("block")
def _block(config: Config, weights: PyTree, x: Array, time: Array) -> Array:
    groups = config.groups
    y = jax.nn.silu(group_norm(x, weights["norm1"], groups))
    y = conv(y, weights["conv1"], bias=weights["conv1_bias"])
    y = y + project("bi,io->bo", jax.nn.silu(time), weights["time"], weights["time_bias"])[:, None, None, :]
    y = jax.nn.silu(group_norm(y, weights["norm2"], groups))
    y = conv(y, weights["conv2"], bias=weights["conv2_bias"])
    if "shortcut" in weights:
        x = project("bhwi,io->bhwo", x, weights["shortcut"], weights["shortcut_bias"])
    x = x + y
    return x + _attention(config, weights["attention"], x) if "attention" in weights else x


@jax.named_scope("attention")
def _attention(config: Config, weights: PyTree, x: Array) -> Array:
    """Attention with one head over all pixels."""
    batch, height, width, channels = x.shape
    pixels = group_norm(x, weights["norm"], config.groups).reshape(batch, height * width, channels)
    q, k, v = (project("bsc,cd->bsd", pixels, weights[n], weights[f"{n}_bias"])[:, :, None, :] for n in "qkv")
    mixed = attend(q, k, v, causal=False)
    return project("bsd,dc->bsc", mixed[:, :, 0], weights["o"], weights["o_bias"]).reshape(x.shape)


def _double(x: Array) -> Array:
    """Doubles height and width by repeating each pixel."""
    batch, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return x.reshape(batch, 2 * height, 2 * width, channels)


def sample(config: Config, key: Array, batch: int, seq: int | None) -> PyTree:
    """Returns random images, the noise to add to them, and how much of it."""
    image_key, noise_key, time_key = split(key, 3)
    shape = (batch, config.image, config.image, 3)
    return {
        "images": normal(image_key, *shape, scale=1.0),
        "noise": normal(noise_key, *shape, scale=1.0),
        "times": integers(time_key, batch, below=TIMESTEPS),
    }
