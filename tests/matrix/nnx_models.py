"""The programs in Flax nnx: modules that are updated in place, and returned."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from tests.matrix.parts import (
    COLOURS,
    DROPPED,
    EXPERTS,
    HIDDEN,
    LAYERS,
    WIDTH,
    WORDS,
    attend,
    batch_of,
    error,
    experts,
)
from tests.matrix.precision import RANK, Precision, fp8_dot_general, lora_dot, quantized
from tests.matrix.training import Training, optimizer_of

SCALE = 1024.0  # of the loss, where it is scaled


class Frozen(nnx.Variable):
    """What is not trained."""


def training(program: str, precision: Precision) -> Training:
    """One program in one precision."""
    optimizer_by = optimizer_of(program)
    if precision.is_scaled:
        optimizer_by = optax.apply_if_finite(optimizer_by, 5)

    def init(key: Any) -> Any:
        model = Net(program, precision, nnx.Rngs(key))
        made = (model, nnx.Optimizer(model, optimizer_by, wrt=nnx.Param))
        return (*made, nnx.state(nnx.clone(model), nnx.Param)) if program == "EMA" else made

    def step(model: Any, optimizer: Any, *rest: Any) -> Any:
        *average, batch = rest
        scale = SCALE if precision.is_scaled else 1.0

        def loss(model: Any) -> Any:
            value = error(model(batch), batch)
            return value * scale, value

        (_, value), found = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.Param), has_aux=True)(model)
        found = jax.tree.map(lambda g: g / scale, found) if precision.is_scaled else found
        optimizer.update(model, found)
        metrics = {"loss": value, "norm": optax.tree.norm(found)}
        if average:
            return model, optimizer, optax.incremental_update(nnx.state(model, nnx.Param), average[0], 0.1), metrics
        return model, optimizer, metrics

    return Training(init, step, batch_of(program), 3 if program == "EMA" else 2, nnx.jit)


class LoRA(nnx.Module):
    """A dense layer whose matrix is frozen in int8."""

    def __init__(self, rows: int, columns: int, *, rngs: nnx.Rngs):
        q, scale = quantized(nnx.initializers.lecun_normal()(rngs.params(), (rows, columns)))
        self.q, self.scale = Frozen(q), Frozen(scale)
        self.a = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (rows, RANK)))
        self.b = nnx.Param(jnp.zeros((RANK, columns)))

    def __call__(self, x: Any) -> Any:
        return lora_dot(x, self.q[...], self.scale[...], self.a[...], self.b[...])


def _dense(precision: Precision, rows: int, columns: int, rngs: nnx.Rngs) -> nnx.Module:
    if precision.kind == "lora":
        return LoRA(rows, columns, rngs=rngs)
    made: Any = {"dot_general": fp8_dot_general} if precision.kind == "fp8" else {}
    return nnx.Linear(rows, columns, dtype=precision.compute, param_dtype=precision.params, rngs=rngs, **made)


class Block(nnx.Module):
    """One layer."""

    def __init__(self, program: str, precision: Precision, rngs: nnx.Rngs):
        self.program = program
        self.precision = precision
        of = {"dtype": precision.compute, "param_dtype": precision.params, "rngs": rngs}
        self.norm = nnx.LayerNorm(WIDTH, **of)
        if program == "encoder-decoder":
            self.second = nnx.LayerNorm(WIDTH, **of)
            self.query, self.key, self.value = (_dense(precision, WIDTH, WIDTH, rngs) for _ in range(3))
        if program.startswith("MoE"):
            shapes = ((WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
            draw = nnx.initializers.lecun_normal()
            self.router, self.up, self.down = (nnx.Param(draw(rngs.params(), s, precision.params)) for s in shapes)
        else:
            self.up, self.down = _dense(precision, WIDTH, HIDDEN, rngs), _dense(precision, HIDDEN, WIDTH, rngs)
        if program == "dropout":
            self.dropout = nnx.Dropout(DROPPED, rngs=rngs)

    def __call__(self, x: Any, read: Any = None) -> Any:
        y = self.norm(x)
        if self.program == "encoder-decoder":
            over = y if read is None else read
            x = x + attend(self.query(y), self.key(over), self.value(over))
            y = self.second(x)
        if self.program.startswith("MoE"):
            drawn = self.precision.cast([self.router[...], self.up[...], self.down[...]])
            return x + experts(self.program, y, *drawn)
        x = x + self.down(nnx.gelu(self.up(y)))
        return self.dropout(x) if self.program == "dropout" else x


class Net(nnx.Module):
    """The model of a program."""

    def __init__(self, program: str, precision: Precision, rngs: nnx.Rngs):
        self.program = program
        of = {"dtype": precision.compute, "param_dtype": precision.params, "rngs": rngs}
        if program != "tied embedding":
            self.head = _dense(precision, WIDTH, WORDS, rngs)
        if program == "convolution":
            conv = partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, **of)
            self.convs = nnx.List([conv(n, WIDTH) for n in (COLOURS, WIDTH)])
            self.norms = nnx.List([nnx.BatchNorm(WIDTH, **of) for _ in range(2)])
            return
        self.embed = nnx.Embed(WORDS, WIDTH, **of)
        self.norm = nnx.LayerNorm(WIDTH, **of)
        if program == "scan":
            stacked = nnx.vmap(lambda rngs: Block(program, precision, rngs), in_axes=(nnx.StateAxes({...: 0}),))
            self.layers = stacked(rngs.fork(split=LAYERS))
        else:
            self.layers = nnx.List([Block(program, precision, rngs) for _ in range(LAYERS)])

    def __call__(self, batch: Any) -> Any:
        if self.program == "convolution":
            x = batch["x"]
            for conv, norm in zip(self.convs, self.norms, strict=True):
                x = nnx.relu(norm(conv(x)))
            return self.head(x.mean((1, 2)))
        x = self.embed(batch["x"])
        if self.program == "scan":
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        elif self.program == "encoder-decoder":
            for layer in self.layers[: LAYERS // 2]:
                x = layer(x)
            source, x = x, self.embed(batch["target"])
            for layer in self.layers[LAYERS // 2 :]:
                x = layer(x, source)
        else:
            policy = jax.checkpoint_policies.dots_saveable
            call = nnx.remat(_called, policy=policy) if self.program == "checkpoint" else _called
            for layer in self.layers:
                x = call(layer, x)
        x = self.norm(x)
        return self.embed.attend(x) if self.program == "tied embedding" else self.head(x)


def _called(layer: Block, x: Any) -> Any:
    return layer(x)
