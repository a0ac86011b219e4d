"""Optimizers that are more than elementwise, each on a small decoder."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger

BF16 = jnp.bfloat16
TINY = {"batch": 8, "seq": 8, "layers": 1, "dim": 32, "vocab": 64}


def _init(key: jax.Array, layers: int, dim: int, vocab: int) -> Tree:
    ks = iter(jax.random.split(key, 4 * layers + 1))
    normal = lambda *shape: jax.random.normal(next(ks), shape) / math.sqrt(shape[0])
    blocks = [
        {"qkv": normal(dim, 3 * dim), "out": normal(dim, dim), "up": normal(dim, 4 * dim), "down": normal(4 * dim, dim)}
        for _ in range(layers)
    ]
    return {"embed": 0.02 * normal(vocab, dim), "blocks": blocks}


def _loss(params: Tree, tokens: jax.Array) -> jax.Array:
    params = jax.tree.map(lambda w: w.astype(BF16), params)
    x = params["embed"][tokens]
    for p in params["blocks"]:
        q, k, v = jnp.split(
            (jax.nn.standardize(x) @ p["qkv"]).reshape(*x.shape[:2], -1, 3 * min(64, x.shape[-1])), 3, -1
        )
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"]
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
    logits = (x @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()


def _sample(batch: int, seq: int, vocab: int) -> Tree:
    return lambda key: {"tokens": jax.random.randint(key, (batch, seq), 0, vocab)}


def _orthogonal(g: jax.Array) -> jax.Array:
    """Newton–Schulz iterations of Muon."""
    x = g.astype(BF16) / (jnp.linalg.norm(g) + 1e-7).astype(BF16)
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.T if g.shape[0] > g.shape[1] else x).astype(jnp.float32)


@stranger(TINY, batch=8, seq=512, layers=4, dim=1536, vocab=32000)
def muon(batch: int, seq: int, layers: int, dim: int, vocab: int) -> Program:
    """Muon: momenta of matrices made orthogonal, the embedding by AdamW."""
    tx = optax.adamw(3e-4)

    def init(key: jax.Array) -> Tree:
        params = _init(key, layers, dim, vocab)
        return {
            "params": params,
            "adam": tx.init(params["embed"]),
            "momenta": jax.tree.map(jnp.zeros_like, params["blocks"]),
        }

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        params = state["params"]
        value, slopes = jax.value_and_grad(_loss)(params, batch["tokens"])
        momenta = jax.tree.map(lambda m, g: 0.95 * m + g, state["momenta"], slopes["blocks"])
        turned = jax.tree.map(lambda m, g: _orthogonal(0.95 * m + g), momenta, slopes["blocks"])
        blocks = jax.tree.map(
            lambda p, u: p - 0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * u, params["blocks"], turned
        )
        updates, adam = tx.update(slopes["embed"], state["adam"], params["embed"])
        embed = optax.apply_updates(params["embed"], updates)
        return {"params": {"embed": embed, "blocks": blocks}, "adam": adam, "momenta": momenta}, value

    return Program(init, _sample(batch, seq, vocab), step)


@stranger({**TINY, "every": 16}, batch=8, seq=512, layers=2, dim=768, vocab=32000, every=256)
def shampoo(batch: int, seq: int, layers: int, dim: int, vocab: int, every: int) -> Program:
    """Shampoo in blocks: statistics of both sides, their inverse fourth roots by coupled Newton iterations."""

    def cut(w: jax.Array) -> jax.Array:
        m, n = w.shape
        return w.reshape(m // every, every, n // every, every).swapaxes(1, 2).reshape(-1, every, every)

    def joined(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        m, n = shape
        return blocks.reshape(m // every, n // every, every, every).swapaxes(1, 2).reshape(m, n)

    def root(statistics: jax.Array) -> jax.Array:
        """A^(-1/4) of each matrix."""
        one = jnp.eye(every)
        a = statistics + 1e-6 * jnp.trace(statistics, axis1=1, axis2=2)[:, None, None] * one + 1e-12 * one
        scale = 5 / (2 * jnp.linalg.norm(a, axis=(1, 2), keepdims=True))

        def improve(_: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            m, h = pair
            t = (5 * one - m) / 4
            return jnp.linalg.matrix_power(t, 4) @ m, h @ t

        return jax.lax.fori_loop(0, 10, improve, (a * scale, jnp.broadcast_to(one, a.shape) * scale**0.25))[1]

    def init(key: jax.Array) -> Tree:
        params = _init(key, layers, dim, vocab)
        still = jax.tree.map(lambda w: jnp.zeros_like(cut(w)), params["blocks"])
        return {"params": params, "left": still, "right": jax.tree.map(jnp.copy, still)}

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        params = state["params"]
        value, slopes = jax.value_and_grad(_loss)(params, batch["tokens"])
        pieces = jax.tree.map(cut, slopes["blocks"])
        left = jax.tree.map(lambda s, g: 0.99 * s + g @ g.swapaxes(1, 2), state["left"], pieces)
        right = jax.tree.map(lambda s, g: 0.99 * s + g.swapaxes(1, 2) @ g, state["right"], pieces)
        steps = jax.tree.map(lambda l, g, r: root(l) @ g @ root(r), left, pieces, right)
        blocks = jax.tree.map(lambda p, u: p - 0.001 * joined(u, p.shape), params["blocks"], steps)
        embed = params["embed"] - 0.01 * jnp.sign(slopes["embed"])
        return {"params": {"embed": embed, "blocks": blocks}, "left": left, "right": right}, value

    return Program(init, _sample(batch, seq, vocab), step)


@stranger({**TINY, "parts": 2}, batch=32, seq=512, layers=4, dim=1024, vocab=32000, parts=4)
def accumulated_sharpness(batch: int, seq: int, layers: int, dim: int, vocab: int, parts: int) -> Program:
    """Sharpness-aware minimisation over gradients accumulated in a scan: every gradient is taken twice."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, 0.9))

    def init(key: jax.Array) -> Tree:
        params = _init(key, layers, dim, vocab)
        return {"params": params, "optimizer": tx.init(params)}

    def slopes_of(params: Tree, tokens: jax.Array) -> tuple[jax.Array, Tree]:
        def part(total: Tree, some: jax.Array) -> tuple[Tree, jax.Array]:
            value, slopes = jax.value_and_grad(_loss)(params, some)
            return jax.tree.map(jnp.add, total, slopes), value

        zeros = jax.tree.map(jnp.zeros_like, params)
        total, values = jax.lax.scan(part, zeros, tokens.reshape(parts, -1, tokens.shape[1]))
        return values.mean(), jax.tree.map(lambda g: g / parts, total)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        params = state["params"]
        value, slopes = slopes_of(params, batch["tokens"])
        size = 0.05 / (optax.global_norm(slopes) + 1e-12)
        _, slopes = slopes_of(jax.tree.map(lambda p, g: p + size * g, params, slopes), batch["tokens"])
        updates, moments = tx.update(slopes, state["optimizer"], params)
        return {"params": optax.apply_updates(params, updates), "optimizer": moments}, value

    return Program(init, _sample(batch, seq, vocab), step)


@stranger(TINY, batch=16, seq=512, layers=4, dim=1024, vocab=50257)
def mixed_precision_scaling(batch: int, seq: int, layers: int, dim: int, vocab: int) -> Program:
    """A loss that is scaled, gradients checked for infinities, the update skipped where there are any."""
    tx = optax.adamw(3e-4)

    def init(key: jax.Array) -> Tree:
        params = _init(key, layers, dim, vocab)
        return {"params": params, "optimizer": tx.init(params), "scale": jnp.array(2.0**15), "good": jnp.array(0)}

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        params, scale = state["params"], state["scale"]
        value, slopes = jax.value_and_grad(lambda p: scale * _loss(p, batch["tokens"]))(params)
        slopes = jax.tree.map(lambda g: g / scale, slopes)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(slopes)]))
        updates, moments = tx.update(slopes, state["optimizer"], params)
        fresh = {"params": optax.apply_updates(params, updates), "optimizer": moments}
        kept = {"params": params, "optimizer": state["optimizer"]}
        chosen = jax.tree.map(partial(jnp.where, finite), fresh, kept)
        good = jnp.where(finite, state["good"] + 1, 0)
        grown = jnp.where(finite, jnp.where(good % 2000 == 1999, 2 * scale, scale), scale / 2)
        return {**chosen, "scale": grown, "good": good}, value / scale

    return Program(init, _sample(batch, seq, vocab), step)


@stranger({**TINY, "inner": 2}, batch=16, seq=512, layers=2, dim=1024, vocab=32000, inner=3)
def lookahead_schedule_free(batch: int, seq: int, layers: int, dim: int, vocab: int, inner: int) -> Program:
    """Several steps of a schedule-free AdamW in a scan, then a slow copy that moves half of the way."""
    tx = optax.contrib.schedule_free_adamw(1e-3)

    def init(key: jax.Array) -> Tree:
        params = _init(key, layers, dim, vocab)
        return {"params": params, "slow": jax.tree.map(jnp.copy, params), "optimizer": tx.init(params)}

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        def one(carry: Tree, _: None) -> tuple[Tree, jax.Array]:
            params, moments = carry
            value, slopes = jax.value_and_grad(_loss)(params, batch["tokens"])
            updates, moments = tx.update(slopes, moments, params)
            return (optax.apply_updates(params, updates), moments), value

        (fast, moments), values = jax.lax.scan(one, (state["params"], state["optimizer"]), None, inner)
        slow = optax.incremental_update(fast, state["slow"], 0.5)
        return {"params": slow, "slow": jax.tree.map(jnp.copy, slow), "optimizer": moments}, values.mean()

    return Program(init, _sample(batch, seq, vocab), step)
