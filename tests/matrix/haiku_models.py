"""The programs in Haiku."""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp

from tests.matrix.parts import DROPPED, EXPERTS, HIDDEN, LAYERS, WIDTH, WORDS, attend, error, experts
from tests.matrix.precision import RANK, Precision, fp8_dot, lora_dot, quantized
from tests.matrix.training import Model, Training, trained

_NORMAL = hk.initializers.VarianceScaling()


def training(program: str, precision: Precision) -> Training:
    """One program in one precision."""
    net = hk.transform_with_state(lambda batch: _forward(program, precision, batch))

    def init(key: Any, batch: Any) -> Any:
        params, stats = net.init(key, batch)
        params = jax.tree.map(
            lambda x: x.astype(precision.params) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
        )
        frozen, params = hk.data_structures.partition(lambda module, name, value: name.startswith("frozen"), params)
        return params, (frozen, stats)

    def loss(params: Any, rest: Any, batch: Any, key: Any) -> Any:
        frozen, stats = rest
        whole = hk.data_structures.merge(precision.cast(params), frozen)
        logits, stats = net.apply(whole, stats, key, batch)
        return error(logits, batch), (frozen, stats)

    return trained(program, precision, Model(init, loss))


class _Dense(hk.Module):
    """A dense layer with products of a precision."""

    def __init__(self, precision: Precision, features: int, name: str | None = None):
        super().__init__(name)
        self.precision = precision
        self.features = features

    def __call__(self, x: Any) -> Any:
        shape = (x.shape[-1], self.features)
        if self.precision.kind == "lora":
            q = hk.get_parameter("frozen_q", shape, jnp.int8, init=lambda s, d: quantized(_NORMAL(s, jnp.float32))[0])
            scale = hk.get_parameter("frozen_scale", shape[1:], init=hk.initializers.Constant(1 / 127))
            a = hk.get_parameter("a", (shape[0], RANK), init=_NORMAL)
            return lora_dot(x, q, scale, a, hk.get_parameter("b", (RANK, shape[1]), init=jnp.zeros))
        w = hk.get_parameter("w", shape, init=_NORMAL)
        product = fp8_dot(x, w) if self.precision.kind == "fp8" else x @ w
        return product + hk.get_parameter("b", shape[1:], init=jnp.zeros)


def _block(program: str, precision: Precision, x: Any, read: Any = None) -> Any:
    y = hk.LayerNorm(-1, True, True)(x)
    if program == "encoder-decoder":
        over = y if read is None else read
        query, key, value = (_Dense(precision, WIDTH, name) for name in ("query", "key", "value"))
        x = x + attend(query(y), key(over), value(over))
        y = hk.LayerNorm(-1, True, True)(x)
    if program.startswith("MoE"):
        shapes = ((WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        return x + _Experts(program, shapes)(y)
    x = x + _Dense(precision, WIDTH, "down")(jax.nn.gelu(_Dense(precision, HIDDEN, "up")(y)))
    return hk.dropout(hk.next_rng_key(), DROPPED, x) if program == "dropout" else x


class _Experts(hk.Module):
    def __init__(self, program: str, shapes: Any):
        super().__init__()
        self.program = program
        self.shapes = shapes

    def __call__(self, y: Any) -> Any:
        names = ("router", "up", "down")
        drawn = [hk.get_parameter(n, s, init=_NORMAL) for n, s in zip(names, self.shapes, strict=True)]
        return experts(self.program, y, *drawn)


def _forward(program: str, precision: Precision, batch: Any) -> Any:
    if program == "convolution":
        x = batch["x"].astype(precision.compute)
        for _ in range(2):
            x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(WIDTH, 3, with_bias=False)(x), is_training=True)
            x = jax.nn.relu(x).astype(precision.compute)  # whose statistics are in float32
        return _Dense(precision, WORDS, "head")(x.mean((1, 2)))
    embed = hk.Embed(WORDS, WIDTH, name="embed")
    x = embed(batch["x"])
    if program == "scan":
        x = hk.layer_stack(LAYERS)(lambda x: _block(program, precision, x))(x)
    elif program == "encoder-decoder":
        for _ in range(LAYERS // 2):
            x = _block(program, precision, x)
        source, x = x, embed(batch["target"])
        for _ in range(LAYERS // 2):
            x = _block(program, precision, x, source)
    else:
        block = lambda x: _block(program, precision, x)  # noqa: E731
        if program == "checkpoint":
            block = hk.remat(block, policy=jax.checkpoint_policies.dots_saveable)
        for _ in range(LAYERS):
            x = block(x)
    x = hk.LayerNorm(-1, True, True)(x)
    return x @ embed.embeddings.T if program == "tied embedding" else _Dense(precision, WORDS, "head")(x)
