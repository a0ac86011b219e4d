"""The programs in Equinox: a module with functions and switches among its leaves is the state as it is."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

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
from tests.matrix.precision import RANK, Precision, fp8_dot, lora_dot, quantized
from tests.matrix.training import SEED, Training, optimizer_of

SCALE = 1024.0  # of the loss, where it is scaled


def training(program: str, precision: Precision) -> Training:
    """One program in one precision."""
    optimizer = optimizer_of(program)
    if precision.is_scaled:
        optimizer = optax.apply_if_finite(optimizer, 5)

    def init(key: Any) -> Any:
        model, stats = eqx.nn.make_with_state(Net)(program, precision, key)
        opt = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        made = {"model": model, "opt": opt, "stats": stats, "step": jnp.zeros((), jnp.int32)}
        return made | ({"average": model} if program == "EMA" else {})

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(SEED), state["step"])
        scale = SCALE if precision.is_scaled else 1.0

        def loss(model: Any) -> Any:
            logits, stats = precision_cast(model, precision)(batch, state["stats"], key)
            value = error(logits, batch)
            return value * scale, (value, stats)

        (_, (value, stats)), found = eqx.filter_value_and_grad(loss, has_aux=True)(state["model"])
        found = jax.tree.map(lambda g: g / scale, found) if precision.is_scaled else found
        updates, opt = optimizer.update(found, state["opt"], eqx.filter(state["model"], eqx.is_inexact_array))
        model = eqx.apply_updates(state["model"], updates)
        after = {"model": model, "opt": opt, "stats": stats, "step": state["step"] + 1}
        if program == "EMA":
            mixed = lambda a, p: 0.9 * a + 0.1 * p if eqx.is_inexact_array(a) else a  # noqa: E731
            after["average"] = jax.tree.map(mixed, state["average"], model)
        return after, {"loss": value, "norm": optax.tree.norm(found)}

    return Training(init, step, batch_of(program), jit=eqx.filter_jit)


def precision_cast(model: Any, precision: Precision) -> Any:
    """A module whose floats are in the dtype of the computation."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(precision.cast(arrays), rest)


class Dense(eqx.Module):
    """A dense layer on vectors along the last dim, with products of a precision."""

    weights: Any
    bias: Any
    kind: str

    def __init__(self, precision: Precision, rows: int, columns: int, key: Any):
        keys = jax.random.split(key, 2)
        w = (jax.random.normal(keys[0], (rows, columns)) / rows**0.5).astype(precision.params)
        self.kind = precision.kind
        self.bias = None if self.kind == "lora" else jnp.zeros(columns, w.dtype)
        self.weights = (w,)
        if self.kind == "lora":
            self.weights = (*quantized(w), jax.random.normal(keys[1], (rows, RANK)), jnp.zeros((RANK, columns)))

    def __call__(self, x: Any) -> Any:
        if self.kind == "lora":
            return lora_dot(x, *self.weights)
        return (fp8_dot(x, *self.weights) if self.kind == "fp8" else x @ self.weights[0]) + self.bias


class Experts(eqx.Module):
    """A router and the experts' weights."""

    router: Any
    up: Any
    down: Any
    program: str

    def __init__(self, program: str, precision: Precision, key: Any):
        shapes = ((WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
        drawn = [jax.random.normal(k, s) / s[-2] ** 0.5 for k, s in zip(jax.random.split(key, 3), shapes, strict=True)]
        self.router, self.up, self.down = (w.astype(precision.params) for w in drawn)
        self.program = program

    def __call__(self, x: Any) -> Any:
        return experts(self.program, x, self.router, self.up, self.down)


class Block(eqx.Module):
    """One layer, on the tokens of all examples."""

    norm: eqx.nn.LayerNorm
    attention: Any
    experts: Any
    up: Any
    down: Any
    activation: Callable
    dropout: eqx.nn.Dropout

    def __init__(self, program: str, precision: Precision, key: Any):
        keys = jax.random.split(key, 6)
        self.norm = eqx.nn.LayerNorm(WIDTH, dtype=precision.params)
        attends = program == "encoder-decoder"
        self.attention = [Dense(precision, WIDTH, WIDTH, k) for k in keys[:3]] if attends else None
        self.experts = Experts(program, precision, keys[3]) if program.startswith("MoE") else None
        self.up = None if self.experts else Dense(precision, WIDTH, HIDDEN, keys[4])
        self.down = None if self.experts else Dense(precision, HIDDEN, WIDTH, keys[5])
        self.activation = jax.nn.gelu
        self.dropout = eqx.nn.Dropout(DROPPED, inference=program != "dropout")

    def __call__(self, x: Any, key: Any, read: Any = None) -> Any:
        norm = jax.vmap(jax.vmap(self.norm))
        y = norm(x)
        if self.attention is not None:
            over = y if read is None else read
            query, keys, value = self.attention
            x = x + attend(query(y), keys(over), value(over))
            y = norm(x)
        if self.experts is not None:
            return x + self.experts(y)
        return x + self.dropout(self.down(self.activation(self.up(y))), key=key)


class Net(eqx.Module):
    """The model of a program."""

    convs: Any
    norms: Any
    embed: Any
    layers: Any
    norm: Any
    head: Any
    program: str

    def __init__(self, program: str, precision: Precision, key: Any):
        keys = jax.random.split(key, 4)
        self.program = program
        self.convs = self.norms = self.embed = self.layers = self.norm = self.head = None
        if program != "tied embedding":
            self.head = Dense(precision, WIDTH, WORDS, keys[0])
        if program == "convolution":
            sizes = zip((COLOURS, WIDTH), jax.random.split(keys[1]), strict=True)
            of = {"use_bias": False, "padding": 1, "dtype": precision.params}
            self.convs = [eqx.nn.Conv2d(n, WIDTH, 3, key=k, **of) for n, k in sizes]
            self.norms = [eqx.nn.BatchNorm(WIDTH, "batch", mode="ema") for _ in range(2)]
            return
        self.embed = eqx.nn.Embedding(weight=jax.random.normal(keys[1], (WORDS, WIDTH)).astype(precision.params))
        made = lambda key: Block(program, precision, key)  # noqa: E731
        layer_keys = jax.random.split(keys[2], LAYERS)
        self.layers = eqx.filter_vmap(made)(layer_keys) if program == "scan" else [made(k) for k in layer_keys]
        self.norm = eqx.nn.LayerNorm(WIDTH, dtype=precision.params)

    def __call__(self, batch: Any, stats: Any, key: Any) -> Any:
        if self.program == "convolution":
            images = jnp.moveaxis(batch["x"], -1, 1).astype(self.convs[0].weight.dtype)
            pooled, stats = jax.vmap(self._convolved, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
                images, stats
            )
            return self.head(pooled.astype(images.dtype)), stats
        look_up = jax.vmap(jax.vmap(self.embed))
        x = look_up(batch["x"])
        if self.program == "scan":
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            x = jax.lax.scan(lambda x, a: (eqx.combine(a, rest)(x, key), None), x, arrays)[0]
        elif self.program == "encoder-decoder":
            for layer in self.layers[: LAYERS // 2]:
                x = layer(x, key)
            source, x = x, look_up(batch["target"])
            for layer in self.layers[LAYERS // 2 :]:
                x = layer(x, key, source)
        else:
            call = eqx.filter_checkpoint(_called) if self.program == "checkpoint" else _called
            for number, layer in enumerate(self.layers):
                x = call(layer, x, jax.random.fold_in(key, number))
        x = jax.vmap(jax.vmap(self.norm))(x)
        return (x @ self.embed.weight.T if self.program == "tied embedding" else self.head(x)), stats

    def _convolved(self, x: Any, stats: Any) -> Any:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            # A batch norm of Equinox keeps its statistics in float32, and takes no narrower numbers beside them.
            x, stats = norm(conv(x.astype(conv.weight.dtype)).astype(jnp.float32), stats)
            x = jax.nn.relu(x)
        return x.mean((1, 2)), stats


def _called(layer: Block, x: Any, key: Any) -> Any:
    return layer(x, key)
