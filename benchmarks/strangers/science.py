"""Physics, statistics and what differentiates twice."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger, trained


def _dense(key: jax.Array, *sizes: int) -> Tree:
    ks = jax.random.split(key, len(sizes) - 1)
    return [
        {"w": jax.random.normal(k, (m, n)) / math.sqrt(m), "b": jnp.zeros(n)}
        for k, m, n in zip(ks, sizes[:-1], sizes[1:], strict=True)
    ]


def _run(params: Tree, x: jax.Array, activation: Tree = jnp.tanh) -> jax.Array:
    for layer in params[:-1]:
        x = activation(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


@stranger({"points": 64, "width": 16, "depth": 2}, points=65536, width=256, depth=5)
def physics_informed(points: int, width: int, depth: int) -> Program:
    """Burgers' equation: first and second derivatives of a network at every point, and its values at the border."""

    def init(key: jax.Array) -> Tree:
        return _dense(key, 2, *[width] * depth, 1)

    def residual(params: Tree, point: jax.Array) -> jax.Array:
        u = lambda t, x: _run(params, jnp.stack([t, x]))[0]
        t, x = point
        slope = jax.grad(u, 1)
        return jax.grad(u, 0)(t, x) + u(t, x) * slope(t, x) - 0.01 / math.pi * jax.grad(slope, 1)(t, x)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        inside = jax.vmap(partial(residual, params))(batch["inside"])
        start = _run(params, batch["start"])[:, 0] + jnp.sin(math.pi * batch["start"][:, 1])
        return (inside**2).mean() + (start**2).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        start = jax.random.uniform(b, (points // 4, 2), minval=-1) * jnp.array([0.0, 1.0])
        return {"inside": jax.random.uniform(a, (points, 2), minval=-1), "start": start}

    return trained(init, loss, sample, optax.adam(1e-3))


@stranger(
    {"batch": 8, "side": 16, "width": 8, "modes": 4, "layers": 2}, batch=32, side=128, width=64, modes=24, layers=4
)
def fourier_operator(batch: int, side: int, width: int, modes: int, layers: int) -> Program:
    """A Fourier neural operator: low frequencies multiplied by complex weights, the rest of the work by FFTs."""

    def init(key: jax.Array) -> Tree:
        ks = iter(jax.random.split(key, 3 * layers + 2))
        normal = lambda *shape: jax.random.normal(next(ks), shape) / width
        blocks = [
            {
                "re": normal(2, modes, modes, width, width),
                "im": normal(2, modes, modes, width, width),
                "skip": normal(width, width),
            }
            for _ in range(layers)
        ]
        return {"lift": normal(3, width), "blocks": blocks, "head": _dense(next(ks), width, 128, 1)}

    def spectral(p: Tree, x: jax.Array) -> jax.Array:
        waves, weights = jnp.fft.rfft2(x, axes=(1, 2)), jax.lax.complex(p["re"], p["im"])
        low = jnp.einsum("bxyi,xyio->bxyo", waves[:, :modes, :modes], weights[0])
        high = jnp.einsum("bxyi,xyio->bxyo", waves[:, -modes:, :modes], weights[1])
        mixed = jnp.zeros_like(waves).at[:, :modes, :modes].set(low).at[:, -modes:, :modes].set(high)
        return jnp.fft.irfft2(mixed, (side, side), axes=(1, 2))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["field"] @ params["lift"]
        for p in params["blocks"]:
            x = jax.nn.gelu(spectral(p, x) + x @ p["skip"])
        y = _run(params["head"], x, jax.nn.gelu)[..., 0]
        error = jnp.sqrt(((y - batch["truth"]) ** 2).sum((1, 2)))
        return (error / jnp.sqrt((batch["truth"] ** 2).sum((1, 2)))).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "field": jax.random.normal(a, (batch, side, side, 3)),
            "truth": jax.random.normal(b, (batch, side, side)),
        }

    return trained(init, loss, sample)


@stranger({"batch": 16, "dim": 4, "mixtures": 3, "width": 16}, batch=65536, dim=16, mixtures=20, width=512)
def mixture_density(batch: int, dim: int, mixtures: int, width: int) -> Program:
    """A mixture density network: weights, means and scales of Gaussians, a likelihood by logsumexp."""

    def init(key: jax.Array) -> Tree:
        return _dense(key, dim, width, width, mixtures * (2 * dim + 1))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        out = _run(params, batch["x"], jax.nn.relu)
        weights, rest = out[:, :mixtures], out[:, mixtures:].reshape(-1, mixtures, 2, dim)
        mean, scale = rest[:, :, 0], jax.nn.softplus(rest[:, :, 1]) + 1e-3
        chances = jax.scipy.stats.norm.logpdf(batch["y"][:, None], mean, scale).sum(-1)
        return -jax.nn.logsumexp(jax.nn.log_softmax(weights) + chances, axis=1).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, dim)), "y": jax.random.normal(b, (batch, dim))}

    return trained(init, loss, sample)


@stranger({"members": 8, "batch": 16, "dim": 8, "width": 16}, members=16, batch=8192, dim=64, width=512)
def vmapped_ensemble(members: int, batch: int, dim: int, width: int) -> Program:
    """An ensemble: initialisation, loss and optimizer vmapped over its members, each with its own examples."""
    tx = optax.adam(1e-3)

    def init(key: jax.Array) -> Tree:
        params = jax.vmap(lambda k: _dense(k, dim, width, width, width, 2))(jax.random.split(key, members))
        return {"params": params, "optimizer": jax.vmap(tx.init)(params)}

    def loss(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        mean, log_scale = jnp.split(_run(params, x, jax.nn.silu), 2, -1)
        return (0.5 * jnp.exp(-2 * log_scale) * (y - mean) ** 2 + log_scale).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        def one(params: Tree, moments: Tree, x: jax.Array, y: jax.Array) -> Tree:
            value, slopes = jax.value_and_grad(loss)(params, x, y)
            updates, moments = tx.update(slopes, moments)
            return optax.apply_updates(params, updates), moments, value

        params, moments, values = jax.vmap(one)(state["params"], state["optimizer"], batch["x"], batch["y"])
        return {"params": params, "optimizer": moments}, values.mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (members, batch, dim)), "y": jax.random.normal(b, (members, batch, 1))}

    return Program(init, sample, step)


@stranger({"batch": 8, "dim": 8, "width": 16, "steps": 4}, batch=4096, dim=64, width=512, steps=32)
def neural_ode(batch: int, dim: int, width: int, steps: int) -> Program:
    """A neural differential equation by Runge–Kutta's fourth order in a `fori_loop` over checkpointed steps."""

    def init(key: jax.Array) -> Tree:
        return _dense(key, dim + 1, width, width, dim)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        size = 1.0 / steps

        def field(t: jax.Array, x: jax.Array) -> jax.Array:
            return _run(params, jnp.concatenate([x, jnp.full((x.shape[0], 1), t)], 1))

        @jax.checkpoint
        def advance(number: jax.Array, x: jax.Array) -> jax.Array:
            t = number * size
            a = field(t, x)
            b = field(t + size / 2, x + size / 2 * a)
            c = field(t + size / 2, x + size / 2 * b)
            return x + size / 6 * (a + 2 * b + 2 * c + field(t + size, x + size * c))

        return ((jax.lax.fori_loop(0, steps, advance, batch["x"]) - batch["y"]) ** 2).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, dim)), "y": jax.random.normal(b, (batch, dim))}

    return trained(init, loss, sample)


@stranger({"tasks": 8, "shots": 4, "width": 16, "inner": 2}, tasks=512, shots=32, width=256, inner=5)
def meta_learning(tasks: int, shots: int, width: int, inner: int) -> Program:
    """MAML on sine waves: the gradient through five steps of gradient descent, over tasks by `vmap`."""

    def init(key: jax.Array) -> Tree:
        return _dense(key, 1, width, width, 1)

    def error(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
        return ((_run(params, x, jax.nn.relu) - y) ** 2).mean()

    def adapted(params: Tree, x: jax.Array, y: jax.Array) -> Tree:
        for _ in range(inner):
            slopes = jax.grad(error)(params, x, y)
            params = jax.tree.map(lambda p, g: p - 0.01 * g, params, slopes)
        return params

    def loss(params: Tree, batch: Tree) -> jax.Array:
        one = lambda x, y: error(adapted(params, x[:shots], y[:shots]), x[shots:], y[shots:])
        return jax.vmap(one)(batch["x"], batch["y"]).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        x = jax.random.uniform(a, (tasks, 2 * shots, 1), minval=-5, maxval=5)
        return {"x": x, "y": jnp.sin(x + jax.random.uniform(b, (tasks, 1, 1)))}

    return trained(init, loss, sample, optax.adam(1e-3))


@stranger({"batch": 8, "points": 8, "width": 16, "near": 3}, batch=16, points=1024, width=64, near=20)
def point_cloud(batch: int, points: int, width: int, near: int) -> Program:
    """A dynamic graph network on clouds of points: nearest neighbours by distances and `top_k`, maxima over edges."""

    def init(key: jax.Array) -> Tree:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "one": _dense(a, 6, width, width),
            "two": _dense(b, 2 * width, width, 2 * width),
            "three": _dense(c, 3 * width, 512),
            "head": _dense(d, 512, 256, 40),
        }

    def edges(params: Tree, x: jax.Array) -> jax.Array:
        distance = (
            ((x[:, :, None] - x[:, None]) ** 2).sum(-1)
            if x.shape[-1] == 3
            else -2 * x @ x.swapaxes(1, 2) + ((x**2).sum(-1)[:, None] + (x**2).sum(-1)[:, :, None])
        )
        _, where = jax.lax.top_k(-distance, near)
        other = jax.vmap(lambda cloud, ids: cloud[ids])(x, where)
        here = jnp.broadcast_to(x[:, :, None], other.shape)
        return _run(params, jnp.concatenate([here, other - here], -1), jax.nn.relu).max(2)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        one = edges(params["one"], batch["points"])
        two = edges(params["two"], one)
        whole = _run(params["three"], jnp.concatenate([one, two], -1)).max(1)
        logits = _run(params["head"], whole, jax.nn.relu)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"points": jax.random.normal(a, (batch, points, 3)), "label": jax.random.randint(b, (batch,), 0, 40)}

    return trained(init, loss, sample, optax.sgd(0.1, 0.9))
