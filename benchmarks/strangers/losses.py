"""Losses of other kinds: reinforcement, preferences, contrasts, adapters, quantised weights."""

import math
from functools import partial

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from flax import nnx

from strangers import Program, Tree, stranger, trained

BF16 = jnp.bfloat16


def _normals(key: jax.Array, count: int) -> Tree:
    ks = iter(jax.random.split(key, count))
    return lambda *shape: jax.random.normal(next(ks), shape) / math.sqrt(shape[-2] if len(shape) > 1 else 1)


@stranger({"envs": 8, "length": 8, "width": 16}, envs=256, length=128, width=512)
def ppo(envs: int, length: int, width: int) -> Program:
    """Proximal policy optimisation: advantages by a reversed scan, then four shuffled minibatches in a scan."""

    def network(x: jax.Array) -> Tree:
        body = hk.Sequential([hk.Linear(width), jnp.tanh, hk.Linear(width), jnp.tanh])
        hidden = body(x)
        return hk.Linear(18)(hidden), hk.Linear(1)(hidden)[..., 0]

    model = hk.without_apply_rng(hk.transform(network))
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4))

    def init(key: jax.Array) -> Tree:
        params = model.init(key, jnp.zeros((1, 64)))
        return {"params": params, "optimizer": tx.init(params)}

    def loss(params: Tree, rows: Tree) -> jax.Array:
        logits, value = model.apply(params, rows["x"])
        chances = jax.nn.log_softmax(logits)
        chosen = jnp.take_along_axis(chances, rows["action"][:, None], 1)[:, 0]
        ratio = jnp.exp(chosen - rows["chance"])
        gain = (rows["gain"] - rows["gain"].mean()) / (rows["gain"].std() + 1e-8)
        policy = -jnp.minimum(ratio * gain, ratio.clip(0.8, 1.2) * gain).mean()
        entropy = -(jnp.exp(chances) * chances).sum(-1).mean()
        return policy + 0.5 * ((value - rows["return"]) ** 2).mean() - 0.01 * entropy

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        _, values = model.apply(state["params"], batch["x"])

        def back(carry: Tree, at: Tree) -> Tree:
            gain, following = carry
            reward, value, end = at
            gain = reward + 0.99 * following * (1 - end) - value + 0.99 * 0.95 * (1 - end) * gain
            return (gain, value), gain

        start = jnp.zeros(envs), values[-1]
        _, gains = jax.lax.scan(back, start, (batch["reward"], values, batch["end"]), reverse=True)
        rows = {
            "x": batch["x"],
            "action": batch["action"],
            "chance": batch["chance"],
            "gain": gains,
            "return": gains + values,
        }
        order = jax.random.permutation(jax.random.wrap_key_data(batch["key"]), envs * length)
        rows = jax.tree.map(lambda t: t.reshape(envs * length, *t.shape[2:])[order].reshape(4, -1, *t.shape[2:]), rows)

        def update(state: Tree, rows: Tree) -> tuple[Tree, jax.Array]:
            value, slopes = jax.value_and_grad(loss)(state["params"], rows)
            updates, moments = tx.update(slopes, state["optimizer"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

        state, losses = jax.lax.scan(update, state, rows)
        return state, losses.mean()

    def sample(key: jax.Array) -> Tree:
        a, b, c, d = jax.random.split(key, 4)
        shape = length, envs
        return {
            "x": jax.random.normal(a, (*shape, 64)),
            "action": jax.random.randint(b, shape, 0, 18),
            "chance": jnp.full(shape, -2.9),
            "reward": jax.random.normal(c, shape),
            "end": jax.random.bernoulli(d, 0.01, shape).astype(float),
            "key": jax.random.key_data(d),
        }

    return Program(init, sample, step)


@stranger({"batch": 16, "width": 16}, batch=32768, width=512)
def soft_actor_critic(batch: int, width: int) -> Program:
    """Soft actor-critic: twin critics and their slow copies, a Gaussian policy, a learnt temperature."""
    tx = optax.adam(3e-4)

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 9)
        net = lambda m, n: [normal(m, width), normal(width, width), normal(width, n)]
        params = {"actor": net(32, 16), "critics": [net(40, 1), net(40, 1)], "heat": jnp.zeros(())}
        return {"params": params, "slow": jax.tree.map(jnp.copy, params["critics"]), "optimizer": tx.init(params)}

    def run(p: Tree, x: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.nn.relu(x @ p[0]) @ p[1]) @ p[2]

    def act(p: Tree, x: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        mean, spread = jnp.split(run(p, x), 2, -1)
        spread = spread.clip(-5, 2)
        action = jnp.tanh(mean + jnp.exp(spread) * noise)
        return action, (-0.5 * noise**2 - spread - jnp.log(1 - action**2 + 1e-6)).sum(-1)

    def judge(critics: Tree, x: jax.Array, action: jax.Array) -> jax.Array:
        return jnp.stack([run(p, jnp.concatenate([x, action], 1))[:, 0] for p in critics])

    def loss(params: Tree, slow: Tree, batch: Tree) -> jax.Array:
        fixed, heat = jax.lax.stop_gradient(params), jnp.exp(params["heat"])
        following, chance = act(fixed["actor"], batch["next"], batch["noise"][0])
        target = batch["reward"] + 0.99 * (
            judge(slow, batch["next"], following).min(0) - jnp.exp(fixed["heat"]) * chance
        )
        critics = ((judge(params["critics"], batch["x"], batch["action"]) - target) ** 2).mean()
        action, chance = act(params["actor"], batch["x"], batch["noise"][1])
        actor = (jnp.exp(fixed["heat"]) * chance - judge(fixed["critics"], batch["x"], action).min(0)).mean()
        return critics + actor - (heat * jax.lax.stop_gradient(chance - 8.0)).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        value, slopes = jax.value_and_grad(loss)(state["params"], state["slow"], batch)
        updates, moments = tx.update(slopes, state["optimizer"])
        params = optax.apply_updates(state["params"], updates)
        slow = optax.incremental_update(params["critics"], state["slow"], 0.005)
        return {"params": params, "slow": slow, "optimizer": moments}, value

    def sample(key: jax.Array) -> Tree:
        ks = jax.random.split(key, 5)
        normal = lambda k, *shape: jax.random.normal(k, shape)
        return {
            "x": normal(ks[0], batch, 32),
            "next": normal(ks[1], batch, 32),
            "noise": normal(ks[2], 2, batch, 8),
            "action": jnp.tanh(normal(ks[3], batch, 8)),
            "reward": normal(ks[4], batch),
        }

    return Program(init, sample, step)


class _Tower(nnx.Module):
    def __init__(self, vocab: int, dim: int, heads: int, layers: int, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, dim, dtype=BF16, rngs=rngs)
        self.blocks = nnx.List([_Block(dim, heads, rngs) for _ in range(layers)])
        self.out = nnx.Linear(dim, dim, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.out(x.mean(1)).astype(jnp.float32)
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


class _Block(nnx.Module):
    def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(dim, dtype=BF16, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(heads, dim, dtype=BF16, decode=False, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(dim, 4 * dim, dtype=BF16, rngs=rngs),
            nnx.Linear(4 * dim, dim, dtype=BF16, rngs=rngs),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.norm1(x))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


@stranger(
    {"batch": 16, "seq": 8, "dim": 32, "heads": 2, "layers": 1, "vocab": 64},
    batch=1024,
    seq=77,
    dim=512,
    heads=8,
    layers=4,
    vocab=49408,
)
def contrastive_pairs(batch: int, seq: int, dim: int, heads: int, layers: int, vocab: int) -> Program:
    """CLIP between two texts, by Flax's NNX: every pair of the batch compared, a learnt temperature."""

    def build(key: jax.Array) -> Tree:
        return [_Tower(vocab, dim, heads, layers, nnx.Rngs(k)) for k in jax.random.split(key)]

    graph = nnx.split(nnx.eval_shape(lambda: build(jax.random.key(0))))[0]

    def init(key: jax.Array) -> Tree:
        return {"towers": nnx.split(build(key))[1], "heat": jnp.array(math.log(10.0))}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        left, right = nnx.merge(graph, params["towers"])
        scores = left(batch["left"]) @ right(batch["right"]).T * jnp.exp(params["heat"])
        labels = jnp.arange(scores.shape[0])
        both = [optax.softmax_cross_entropy_with_integer_labels(s, labels).mean() for s in (scores, scores.T)]
        return (both[0] + both[1]) / 2

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "left": jax.random.randint(a, (batch, seq), 0, vocab),
            "right": jax.random.randint(b, (batch, seq), 0, vocab),
        }

    return trained(init, loss, sample)


def _decoder(key: jax.Array, layers: int, dim: int, vocab: int, dtype: Tree) -> Tree:
    normal = _normals(key, 4 * layers + 1)
    blocks = [
        {"qkv": normal(dim, 3 * dim), "out": normal(dim, dim), "up": normal(dim, 4 * dim), "down": normal(4 * dim, dim)}
        for _ in range(layers)
    ]
    return jax.tree.map(lambda w: w.astype(dtype), {"embed": 0.02 * normal(vocab, dim), "blocks": blocks})


def _logits(params: Tree, tokens: jax.Array, heads: int, product: Tree) -> jax.Array:
    x = params["embed"][tokens].astype(BF16)
    for number, p in enumerate(params["blocks"]):
        y = product(jax.nn.standardize(x), p["qkv"], (number, "qkv"))
        q, k, v = jnp.split(y.reshape(*y.shape[:2], heads, -1), 3, -1)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + product(y.reshape(x.shape), p["out"], (number, "out"))
        y = jax.nn.gelu(product(jax.nn.standardize(x), p["up"], (number, "up")))
        x = x + product(y, p["down"], (number, "down"))
    return jax.nn.standardize(x) @ params["embed"].astype(BF16).T


def _token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), tokens[:, 1:])


def _tokens(batch: int, seq: int, vocab: int) -> Tree:
    return lambda key: {"tokens": jax.random.randint(key, (batch, seq), 0, vocab)}


@stranger(
    {"batch": 8, "seq": 8, "layers": 1, "dim": 32, "heads": 2, "vocab": 64, "rank": 2},
    batch=8,
    seq=512,
    layers=6,
    dim=2048,
    heads=16,
    vocab=32000,
    rank=16,
)
def low_rank_adapters(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int, rank: int) -> Program:
    """LoRA: a frozen decoder in bfloat16 in the state, small factors beside its products, gradients of these alone."""
    tx = optax.adamw(1e-4)

    def init(key: jax.Array) -> Tree:
        base = _decoder(key, layers, dim, vocab, BF16)
        factors = [
            {
                name: (jax.random.normal(key, (w.shape[0], rank)) / rank, jnp.zeros((rank, w.shape[1])))
                for name, w in block.items()
            }
            for block in base["blocks"]
        ]
        return {"base": base, "factors": factors, "optimizer": tx.init(factors)}

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        def loss(factors: Tree) -> jax.Array:
            def product(x: jax.Array, w: jax.Array, place: tuple[int, str]) -> jax.Array:
                a, b = factors[place[0]][place[1]]
                return x @ w + 2.0 * (x @ a.astype(BF16)) @ b.astype(BF16)

            return _token_loss(_logits(state["base"], batch["tokens"], heads, product), batch["tokens"]).mean()

        value, slopes = jax.value_and_grad(loss)(state["factors"])
        updates, moments = tx.update(slopes, state["optimizer"], state["factors"])
        return {**state, "factors": optax.apply_updates(state["factors"], updates), "optimizer": moments}, value

    return Program(init, _tokens(batch, seq, vocab), step)


@stranger(
    {"batch": 8, "seq": 8, "layers": 1, "dim": 32, "heads": 2, "vocab": 64},
    batch=8,
    seq=512,
    layers=4,
    dim=2048,
    heads=16,
    vocab=32000,
)
def quantised_training(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int) -> Program:
    """Training aware of quantisation: weights and activations rounded to 8 bits, gradients straight through."""

    def rounded(x: jax.Array, axis: int) -> jax.Array:
        scale = jnp.abs(x).max(axis, keepdims=True) / 127 + 1e-8
        return x + jax.lax.stop_gradient(jnp.round(x / scale).clip(-127, 127) * scale - x)

    def product(x: jax.Array, w: jax.Array, _: tuple[int, str]) -> jax.Array:
        return rounded(x, -1) @ rounded(w, 0).astype(BF16)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return _token_loss(_logits(params, batch["tokens"], heads, product), batch["tokens"]).mean()

    return trained(lambda key: _decoder(key, layers, dim, vocab, jnp.float32), loss, _tokens(batch, seq, vocab))


@stranger(
    {"batch": 8, "seq": 8, "layers": 1, "dim": 32, "heads": 2, "vocab": 64},
    batch=4,
    seq=512,
    layers=4,
    dim=2048,
    heads=16,
    vocab=32000,
)
def direct_preference(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int) -> Program:
    """Direct preference optimisation: a policy against a frozen reference on pairs of answers, masked prompts."""
    tx = optax.adamw(1e-6)
    plain = lambda x, w, _: x @ w.astype(BF16)

    def init(key: jax.Array) -> Tree:
        params = _decoder(key, layers, dim, vocab, jnp.float32)
        frozen = jax.tree.map(lambda w: w.astype(BF16), params)
        return {"params": params, "reference": frozen, "optimizer": tx.init(params)}

    def chances(params: Tree, tokens: jax.Array, prompt: jax.Array) -> jax.Array:
        losses = _token_loss(_logits(params, tokens, heads, plain), tokens)
        return -(losses * (jnp.arange(seq - 1)[None, :] >= prompt[:, None])).sum(1)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        both, prompt = jnp.concatenate([batch["better"], batch["worse"]]), jnp.tile(batch["prompt"], 2)
        reference = chances(state["reference"], both, prompt)

        def loss(params: Tree) -> jax.Array:
            better, worse = jnp.split(chances(params, both, prompt) - reference, 2)
            return -jax.nn.log_sigmoid(0.1 * (better - worse)).mean()

        value, slopes = jax.value_and_grad(loss)(state["params"])
        updates, moments = tx.update(slopes, state["optimizer"], state["params"])
        return {**state, "params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        return {
            "better": jax.random.randint(a, (batch, seq), 0, vocab),
            "prompt": jax.random.randint(c, (batch,), 0, seq // 2),
            "worse": jax.random.randint(b, (batch, seq), 0, vocab),
        }

    return Program(init, sample, step)


@stranger({"batch": 8, "side": 8, "width": 16, "dim": 16}, batch=256, side=64, width=64, dim=256)
def bootstrap_views(batch: int, side: int, width: int, dim: int) -> Program:
    """BYOL: two views drawn inside the step by flips and crops, a slow copy of the network, no negatives."""
    tx = optax.sgd(0.03, 0.9)

    def encode(p: Tree, x: jax.Array) -> jax.Array:
        for w in p["convs"]:
            x = jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu((x - x.mean((0, 1, 2))) * jax.lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
        return jax.nn.relu(x.mean((1, 2)) @ p["one"]) @ p["two"]

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 7)
        convs = [normal(3, 3, 3, width) / 3, normal(3, 3, width, 2 * width) / 3, normal(3, 3, 2 * width, 4 * width) / 3]
        net = {"convs": convs, "one": normal(4 * width, 4 * dim), "two": normal(4 * dim, dim)}
        params = {"net": net, "predict": [normal(dim, 4 * dim), normal(4 * dim, dim)]}
        return {"params": params, "slow": jax.tree.map(jnp.copy, net), "optimizer": tx.init(params)}

    def view(key: jax.Array, images: jax.Array) -> jax.Array:
        def one(key: jax.Array, image: jax.Array) -> jax.Array:
            a, b, c = jax.random.split(key, 3)
            image = jnp.where(jax.random.bernoulli(a), image[:, ::-1], image)
            padded = jnp.pad(image, ((4, 4), (4, 4), (0, 0)), mode="reflect" if side > 8 else "edge")
            place = jax.random.randint(b, (2,), 0, 9)
            cropped = jax.lax.dynamic_slice(padded, (place[0], place[1], 0), image.shape)
            return cropped * jax.random.uniform(c, (), minval=0.6, maxval=1.4)

        return jax.vmap(one)(jax.random.split(key, images.shape[0]), images)

    @partial(jax.jit, donate_argnums=0)
    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        keys = jax.random.split(jax.random.wrap_key_data(batch["key"]))
        views = [view(key, batch["image"]) for key in keys]
        unit = lambda v: v / (jnp.linalg.norm(v, axis=-1, keepdims=True) + 1e-6)
        targets = [unit(encode(state["slow"], v)) for v in views]

        def loss(params: Tree) -> jax.Array:
            total = 0.0
            for v, target in zip(views, targets[::-1], strict=True):
                guess = jax.nn.relu(encode(params["net"], v) @ params["predict"][0]) @ params["predict"][1]
                total = total + (2 - 2 * (unit(guess) * target).sum(-1)).mean()
            return total

        value, slopes = jax.value_and_grad(loss)(state["params"])
        updates, moments = tx.update(slopes, state["optimizer"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        slow = optax.incremental_update(params["net"], state["slow"], 0.01)
        return {"params": params, "slow": slow, "optimizer": moments}, value

    def sample(key: jax.Array) -> Tree:
        return {"image": jax.random.normal(key, (batch, side, side, 3)), "key": jax.random.key_data(key)}

    return Program(init, sample, step)
