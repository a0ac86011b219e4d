"""Random train steps: layers of many kinds, skips, shared weights, auxiliary losses, optimisers, metrics."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

WORDS = 12
Layer = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class TrainStep:
    """A drawn train step.

    Attributes:
        words: What it is made of.
        init: Makes the state from a key.
        step: The state and a batch to the next state and metrics.
        batch: An example.
    """

    words: str
    init: Callable[[Any], Any]
    step: Callable[[Any, Any], Any]
    batch: Any


def draw_train_step(seed: int) -> TrainStep:
    """A train step whose sizes, layers, loss, optimiser and metrics are drawn."""
    rng = np.random.default_rng(seed)
    width, rows, length = int(rng.choice([4, 6, 8])), int(rng.choice([8, 12, 16])), int(rng.choice([2, 3, 6]))
    names = [str(rng.choice(list(LAYERS))) for _ in range(int(rng.integers(2, 8)))]
    loss_name, optimizer_name = str(rng.choice(list(LOSSES))), str(rng.choice(list(OPTIMIZERS)))
    tied, averaged, by_example = (bool(rng.integers(2)) for _ in range(3))
    optimizer = OPTIMIZERS[optimizer_name]()

    def init(key: Any) -> Any:
        keys = jax.random.split(key, len(names) + 2)
        layers = [_weights(k, width) for k in keys[2:]]
        params = {"embed": jax.random.normal(keys[0], (WORDS, width)), "layers": layers, "scale": jnp.ones(width)}
        if not tied:
            params["head"] = jax.random.normal(keys[1], (width, WORDS)) / 3
        state = {"params": params, "opt": optimizer.init(params), "step": jnp.zeros((), jnp.int32)}
        return state | ({"average": params} if averaged else {})

    def logits_of(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        x, auxiliary, seen = params["embed"][batch["x"]], 0.0, []
        for number, (name, weights) in enumerate(zip(names, params["layers"], strict=True)):
            seen.append(x)
            earlier = seen[number // 2]
            x = LAYERS[name](weights, (x, earlier, params["layers"][0]), jax.random.fold_in(key, number))
            if name == "routed":
                auxiliary += jnp.mean(jax.nn.softmax(x @ weights["router"]) ** 2)
        x = x * params["scale"]
        return x @ (params["embed"].T if tied else params["head"]), auxiliary

    def loss(params: Any, batch: Any, key: Any) -> tuple[Any, Any]:
        logits, auxiliary = logits_of(params, batch, key)
        errors = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return LOSSES[loss_name](errors, batch) + 0.01 * auxiliary, (errors, logits)

    def step(state: Any, batch: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(7), state["step"])
        (value, (errors, logits)), gradients = jax.value_and_grad(loss, has_aux=True)(state["params"], batch, key)
        updates, opt = optimizer.update(gradients, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "right": jnp.mean(logits.argmax(-1) == batch["y"]), "worst": errors.max()}
        metrics |= (
            {"errors": errors, "guess": logits.argmax(-1)} if by_example else {"norm": optax.tree.norm(gradients)}
        )
        new = {"params": params, "opt": opt, "step": state["step"] + 1}
        if averaged:
            new["average"] = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, state["average"], params)
        return new, metrics

    batch = {name: rng.integers(0, WORDS, (rows, length)) for name in ("x", "y")}
    batch["mask"] = rng.integers(0, 2, (rows, length)).astype(float)
    batch["mask"][:, 0] = 1
    words = f"{width}×{rows}×{length} {' '.join(names)}; {loss_name}, {optimizer_name}"
    words += "".join(f", {name}" for name, is_so in (("tied", tied), ("averaged", averaged)) if is_so)
    return TrainStep(words, init, step, batch)


def _weights(key: Any, width: int) -> Any:
    keys = jax.random.split(key, 5)
    square = [jax.random.normal(k, (width, width)) / 3 for k in keys[:3]]
    up, down = (jax.random.normal(k, (width, 2 * width)) / 3 for k in keys[3:])
    names = ("a", "b", "c", "up", "down", "router", "gain", "bias")
    return dict(zip(names, (*square, up, down.T, square[0][:, :2], jnp.ones(width), jnp.zeros(width)), strict=True))


def _norm(w: Any, x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * w["gain"] + w["bias"]


def _attend(w: Any, x: Any, y: Any) -> Any:
    scores = jnp.einsum("btd,bsd->bts", x @ w["a"], y @ w["b"]) / x.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ (y @ w["c"])


def _dropped(w: Any, x: Any, key: Any) -> Any:
    y = jnp.tanh(x @ w["a"])
    return x + jnp.where(jax.random.bernoulli(key, 0.8, y.shape), y / 0.8, 0)


def _looped(w: Any, x: Any) -> Any:
    stacked = jnp.stack([w["a"], w["b"], w["c"]])
    return jax.lax.scan(lambda x, m: (x + jnp.sin(x @ m), None), x, stacked)[0]


def _routed(w: Any, x: Any) -> Any:
    shares = jax.nn.softmax(x @ w["router"])
    experts = jnp.stack([w["a"], w["b"]])
    return x + jnp.einsum("bte,btd,edf->btf", shares, x, experts)


@jax.custom_vjp
def _clipped(x: Any) -> Any:
    return jnp.clip(x, -1, 1)


_clipped.defvjp(lambda x: (_clipped(x), None), lambda _, g: (g,))  # its gradient is passed straight through

#: Layers as functions of their weights, of (the input, an earlier layer's input, the first layer's weights), and a key.
LAYERS: dict[str, Layer] = {
    "dense": lambda w, xs, key: xs[0] + jnp.tanh(xs[0] @ w["a"] + w["bias"]),
    "gated": lambda w, xs, key: xs[0] + (jax.nn.silu(_norm(w, xs[0]) @ w["up"]) * (xs[0] @ w["up"])) @ w["down"],
    "checkpointed": lambda w, xs, key: jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w["up"]) @ w["down"])(w, xs[0]),
    "attention": lambda w, xs, key: xs[0] + _attend(w, _norm(w, xs[0]), _norm(w, xs[0])),
    "cross": lambda w, xs, key: xs[0] + _attend(w, xs[0], xs[1]),
    "skip": lambda w, xs, key: jnp.concatenate([xs[0], xs[1]], -1) @ jnp.concatenate([w["a"], w["b"]]),
    "shared": lambda w, xs, key: xs[0] + jnp.tanh(xs[0] @ xs[2]["a"]),
    "dropout": lambda w, xs, key: _dropped(w, xs[0], key),
    "loop": lambda w, xs, key: _looped(w, xs[0]),
    "mapped": lambda w, xs, key: jax.vmap(lambda x: x + jnp.tanh(x @ w["a"]))(xs[0]),
    "routed": lambda w, xs, key: _routed(w, xs[0]),
    "cumulative": lambda w, xs, key: _norm(w, jnp.cumsum(xs[0] @ w["a"], axis=1)),
    "straight": lambda w, xs, key: xs[0] + _clipped(xs[0] @ w["a"]),
    "stopped": lambda w, xs, key: xs[0] @ w["a"] + jax.lax.stop_gradient(xs[1]),
    "sorted": lambda w, xs, key: jnp.sort(xs[0] @ w["a"], axis=1),
    "branch": lambda w, xs, key: jax.lax.cond(w["bias"][0] >= 0, lambda x: x @ w["a"], lambda x: x @ w["b"], xs[0]),
    "moved": lambda w, xs, key: jnp.flip(jnp.roll(xs[0], 1, axis=1), 1).transpose(1, 0, 2).swapaxes(0, 1) @ w["c"],
}

LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "mean": lambda errors, batch: errors.mean(),
    "sum": lambda errors, batch: errors.sum(),
    "mean of sums": lambda errors, batch: errors.sum(1).mean(),
    "masked mean": lambda errors, batch: (errors * batch["mask"]).sum() / batch["mask"].sum(),
    "mean of masked means": lambda errors, batch: ((errors * batch["mask"]).sum(1) / batch["mask"].sum(1)).mean(),
    "weighted": lambda errors, batch: jnp.vdot(errors, batch["mask"]) / errors.size + 0.1 * errors.mean(),
}

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "clipped adamw": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lamb": lambda: optax.lamb(1e-2),
    "scheduled": lambda: optax.adam(optax.cosine_decay_schedule(1e-2, 10)),
    "finite": lambda: optax.apply_if_finite(optax.adam(1e-2), 3),
}
