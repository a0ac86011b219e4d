"""The programs in Flax linen."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax

from tests.matrix.parts import DROPPED, EXPERTS, HIDDEN, LAYERS, WIDTH, WORDS, attend, error, experts
from tests.matrix.precision import RANK, Precision, fp8_dot_general, lora_dot, quantized
from tests.matrix.training import Model, Training, trained


def training(program: str, precision: Precision) -> Training:
    """One program in one precision."""
    net = _Net(program, precision)

    def init(key: Any, batch: Any) -> Any:
        keys = dict(zip(("params", "dropout"), jax.random.split(key), strict=True))
        variables = net.init(keys, batch)
        return variables.pop("params"), variables

    def loss(params: Any, rest: Any, batch: Any, key: Any) -> Any:
        variables = {"params": params, **rest}
        logits, changed = net.apply(variables, batch, rngs={"dropout": key}, mutable=["batch_stats"])
        return error(logits, batch), {**rest, **changed}

    return trained(program, precision, Model(init, loss), by_flax=True)


class _LoRA(nn.Module):
    """A dense layer whose matrix is frozen in int8."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shape = (x.shape[-1], self.features)

        def base() -> Any:
            return dict(
                zip(("q", "scale"), quantized(nn.initializers.lecun_normal()(self.make_rng(), shape)), strict=True)
            )

        frozen = self.variable("frozen", "base", base).value
        a = self.param("a", nn.initializers.lecun_normal(), (shape[0], RANK))
        b = self.param("b", nn.initializers.zeros, (RANK, shape[1]))
        return lora_dot(x, frozen["q"], frozen["scale"], a, b)


def _dense(precision: Precision, features: int, name: str) -> nn.Module:
    if precision.kind == "lora":
        return _LoRA(features, precision.compute, name=name)
    made: Any = {"dot_general": fp8_dot_general} if precision.kind == "fp8" else {}
    return nn.Dense(features, dtype=precision.compute, param_dtype=precision.params, name=name, **made)


class _Block(nn.Module):
    program: str
    precision: Precision

    @nn.compact
    def __call__(self, x: Any, read: Any = None) -> Any:
        of = {"dtype": self.precision.compute, "param_dtype": self.precision.params}
        dense = partial(_dense, self.precision)
        y = nn.LayerNorm(**of)(x)
        if self.program == "encoder-decoder":
            over = y if read is None else read
            x = x + attend(dense(WIDTH, "query")(y), dense(WIDTH, "key")(over), dense(WIDTH, "value")(over))
            y = nn.LayerNorm(**of)(x)
        if self.program.startswith("MoE"):
            return x + self._experts(y)
        x = x + dense(WIDTH, "down")(nn.gelu(dense(HIDDEN, "up")(y)))
        return nn.Dropout(DROPPED, deterministic=False)(x) if self.program == "dropout" else x

    def _experts(self, y: Any) -> Any:
        shapes = ((WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        drawn = [
            self.param(name, nn.initializers.lecun_normal(), shape, self.precision.params)
            for name, shape in zip(("router", "up", "down"), shapes, strict=True)
        ]
        return experts(self.program, y, *self.precision.cast(drawn))


class _Net(nn.Module):
    program: str
    precision: Precision

    @nn.compact
    def __call__(self, batch: Any) -> Any:
        of = {"dtype": self.precision.compute, "param_dtype": self.precision.params}
        if self.program == "convolution":
            x = batch["x"]
            for _ in range(2):
                x = nn.Conv(WIDTH, (3, 3), use_bias=False, **of)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, **of)(x))
            return _dense(self.precision, WORDS, "head")(x.mean((1, 2)))
        embed = nn.Embed(WORDS, WIDTH, name="embed", **of)
        x, made = embed(batch["x"]), (self.program, self.precision)
        if self.program == "scan":
            axes = {"params": 0, "frozen": 0}
            x, _ = nn.scan(_Step, axes, split_rngs={"params": True}, length=LAYERS)(*made, name="layers")(x, None)
        elif self.program == "encoder-decoder":
            for _ in range(LAYERS // 2):
                x = _Block(*made)(x)
            source, x = x, embed(batch["target"])
            for _ in range(LAYERS // 2):
                x = _Block(*made)(x, source)
        else:
            policy = jax.checkpoint_policies.nothing_saveable
            block = nn.remat(_Block, policy=policy) if self.program == "checkpoint" else _Block
            for _ in range(LAYERS):
                x = block(*made)(x)
        x = nn.LayerNorm(**of)(x)
        return embed.attend(x) if self.program == "tied embedding" else _dense(self.precision, WORDS, "head")(x)


class _Step(nn.Module):
    """A block as `nn.scan` calls it."""

    program: str
    precision: Precision

    @nn.compact
    def __call__(self, x: Any, _: Any) -> Any:
        return _Block(self.program, self.precision)(x), None
