"""Transformers of text and speech that are none of the zoo's."""

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from strangers import Program, Tree, stranger, trained

BF16 = jnp.bfloat16


def _tokens(batch: int, seq: int, vocab: int) -> Any:
    def sample(key: jax.Array) -> Tree:
        return {"tokens": jax.random.randint(key, (batch, seq), 0, vocab)}

    return sample


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def _relative_buckets(queries: int, keys: int, num: int, causal: bool) -> np.ndarray:
    """T5's buckets of distances: exact when near, logarithmic when far."""
    distance = np.arange(keys)[None, :] - np.arange(queries)[:, None]
    offset = 0
    if causal:
        distance = np.maximum(-distance, 0)
    else:
        num //= 2
        offset = (distance > 0) * num
        distance = np.abs(distance)
    exact = num // 2
    far = exact + (np.log(np.maximum(distance, 1) / exact) / math.log(128 / exact) * (num - exact)).astype(int)
    return offset + np.where(distance < exact, distance, np.minimum(far, num - 1))


class _BiasedAttention(nn.Module):
    heads: int
    causal: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, biased: bool) -> jax.Array:
        dim = x.shape[-1]
        proj = lambda name: nn.DenseGeneral((self.heads, dim // self.heads), use_bias=False, dtype=BF16, name=name)
        q, k, v = proj("q")(x), proj("k")(memory), proj("v")(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32)
        if biased:
            buckets = _relative_buckets(x.shape[1], memory.shape[1], 32, self.causal)
            bias = nn.Embed(32, self.heads, name="bias")(jnp.asarray(buckets))
            scores = scores + bias.transpose(2, 0, 1)[None]
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(BF16), v)
        return nn.DenseGeneral(dim, axis=(-2, -1), use_bias=False, dtype=BF16, name="o")(mixed)


class _T5Layer(nn.Module):
    heads: int
    hidden: int
    decoder: bool

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array | None) -> jax.Array:
        norm = lambda y: nn.RMSNorm(dtype=BF16)(y)
        y = norm(x)
        x = x + _BiasedAttention(self.heads, self.decoder)(y, y, True)
        if memory is not None:
            x = x + _BiasedAttention(self.heads)(norm(x), memory, False)
        y = norm(x)
        gate = nn.gelu(nn.Dense(self.hidden, use_bias=False, dtype=BF16)(y))
        up = nn.Dense(self.hidden, use_bias=False, dtype=BF16)(y)
        return x + nn.Dense(x.shape[-1], use_bias=False, dtype=BF16)(gate * up)


class _T5(nn.Module):
    layers: int
    dim: int
    heads: int
    vocab: int

    @nn.compact
    def __call__(self, source: jax.Array, target: jax.Array) -> jax.Array:
        embed = nn.Embed(self.vocab, self.dim, dtype=BF16)
        x, y = embed(source), embed(target)
        for _ in range(self.layers):
            x = _T5Layer(self.heads, self.dim * 5 // 2, False)(x, None)
        for _ in range(self.layers):
            y = _T5Layer(self.heads, self.dim * 5 // 2, True)(y, x)
        return embed.attend(nn.RMSNorm(dtype=BF16)(y) / math.sqrt(self.dim))


@stranger(
    {"batch": 8, "seq": 16, "layers": 1, "dim": 64, "heads": 4, "vocab": 128},
    batch=8,
    seq=512,
    layers=4,
    dim=1024,
    heads=16,
    vocab=32128,
)
def t5_relative(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int) -> Program:
    """T5 v1.1 with written-out attention in float32, a learnt bias of distances, Adafactor."""
    model = _T5(layers, dim, heads, vocab)

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "source": jax.random.randint(a, (batch, seq), 0, vocab),
            "target": jax.random.randint(b, (batch, seq // 2 + 1), 0, vocab),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = model.apply(params, batch["source"], batch["target"][:, :-1])
        return _cross_entropy(logits, batch["target"][:, 1:])

    def init(key: jax.Array) -> Tree:
        return model.init(key, jnp.zeros((1, seq), int), jnp.zeros((1, seq // 2), int))

    return trained(init, loss, sample, optax.adafactor(1e-3))


def _alibi_layer(p: Tree, x: jax.Array, heads: int) -> jax.Array:
    batch, seq, dim = x.shape
    norm = lambda y, scale: (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-5) * scale
    y = norm(x.astype(jnp.float32), p["norm1"]).astype(BF16)
    q, k, v = jnp.split((y @ p["qkv"].astype(BF16)).reshape(batch, seq, heads, -1), 3, axis=-1)
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
    distance = jnp.arange(seq)[None, :] - jnp.arange(seq)[:, None]
    bias = jnp.where(distance <= 0, slopes[:, None, None] * distance, -jnp.inf)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(scores + bias, axis=-1).astype(BF16)
    x = x + (jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, dim) @ p["out"].astype(BF16))
    y = norm(x.astype(jnp.float32), p["norm2"]).astype(BF16)
    return x + jax.nn.gelu(y @ p["up"].astype(BF16)) @ p["down"].astype(BF16)


@stranger(
    {"batch": 8, "seq": 16, "layers": 1, "dim": 64, "heads": 4, "vocab": 128},
    batch=4,
    seq=1024,
    layers=4,
    dim=2048,
    heads=16,
    vocab=50432,
)
def alibi_decoder(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int) -> Program:
    """BLOOM's and MPT's bias of distances, in plain JAX, with AdamW and clipped gradients."""

    def init(key: jax.Array) -> Tree:
        def normal(*shape: int) -> jax.Array:
            nonlocal key
            key, sub = jax.random.split(key)
            return 0.02 * jax.random.normal(sub, shape)

        blocks = [
            {
                "norm1": jnp.ones(dim),
                "norm2": jnp.ones(dim),
                "qkv": normal(dim, 3 * dim),
                "out": normal(dim, dim),
                "up": normal(dim, 4 * dim),
                "down": normal(4 * dim, dim),
            }
            for _ in range(layers)
        ]
        return {"embed": normal(vocab, dim), "blocks": blocks}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"].astype(BF16)[batch["tokens"]]
        for block in params["blocks"]:
            x = _alibi_layer(block, x, heads)
        logits = x @ params["embed"].astype(BF16).T
        return _cross_entropy(logits[:, :-1], batch["tokens"][:, 1:])

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 1000)))
    return trained(init, loss, _tokens(batch, seq, vocab), optimizer)


@stranger(
    {"batch": 8, "seq": 16, "layers": 2, "dim": 64, "heads": 4, "vocab": 128, "chunk": 8},
    batch=4,
    seq=4096,
    layers=6,
    dim=2048,
    heads=16,
    vocab=32000,
    chunk=512,
)
def scanned_llama(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int, chunk: int) -> Program:
    """Layers in a scan under full checkpoints, fused attention, rotary positions, a loss in chunks of the sequence."""

    def init(key: jax.Array) -> Tree:
        ks = iter(jax.random.split(key, 9))
        normal = lambda *shape: 0.02 * jax.random.normal(next(ks), shape)
        return {
            "embed": normal(vocab, dim),
            "head": normal(dim, vocab),
            "norm": jnp.ones(dim),
            "layers": {
                "qkv": normal(layers, dim, 3, heads, dim // heads),
                "o": normal(layers, dim, dim),
                "gate": normal(layers, dim, 8 * dim // 3),
                "up": normal(layers, dim, 8 * dim // 3),
                "down": normal(layers, 8 * dim // 3, dim),
                "n1": jnp.ones((layers, dim)),
                "n2": jnp.ones((layers, dim)),
            },
        }

    def rms(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.astype(jnp.float32)
        return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6) * scale).astype(BF16)

    def rotate(x: jax.Array) -> jax.Array:
        half = x.shape[-1] // 2
        angle = jnp.arange(seq)[:, None] * 10000.0 ** (-jnp.arange(half) / half)
        cos, sin = jnp.cos(angle)[:, None].astype(BF16), jnp.sin(angle)[:, None].astype(BF16)
        a, b = x[..., :half], x[..., half:]
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        p = jax.tree.map(lambda w: w.astype(BF16), p)
        q, k, v = jnp.moveaxis(jnp.einsum("bsd,dnhk->bsnhk", rms(x, p["n1"]), p["qkv"]), 2, 0)
        mixed = jax.nn.dot_product_attention(rotate(q), rotate(k), v, is_causal=True, implementation=_fused())
        x = x + mixed.reshape(x.shape) @ p["o"]
        y = rms(x, p["n2"])
        return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"], None

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"].astype(BF16)[batch["tokens"]]
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        x = rms(x, params["norm"]).reshape(x.shape[0], -1, chunk, dim).swapaxes(0, 1)
        labels = jnp.roll(batch["tokens"], -1, 1).reshape(x.shape[1], -1, chunk).swapaxes(0, 1)

        @jax.checkpoint
        def part(total: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return total + _cross_entropy(xs[0] @ params["head"].astype(BF16), xs[1]), None

        return jax.lax.scan(part, jnp.zeros(()), (x, labels))[0] / x.shape[0]

    return trained(init, loss, _tokens(batch, seq, vocab))


def _fused() -> str | None:
    return "cudnn" if jax.default_backend() == "gpu" else None


class _Speech(nn.Module):
    layers: int
    dim: int
    heads: int
    vocab: int

    @nn.compact
    def __call__(self, sound: jax.Array, text: jax.Array) -> jax.Array:
        x = nn.gelu(nn.Conv(self.dim, (3,), dtype=BF16)(sound))
        x = nn.gelu(nn.Conv(self.dim, (3,), strides=(2,), dtype=BF16)(x))
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:]).astype(BF16)
        embed = nn.Embed(self.vocab, self.dim, dtype=BF16)
        y = embed(text) + self.param("places", nn.initializers.normal(0.02), (text.shape[1], self.dim)).astype(BF16)
        attend = lambda: nn.MultiHeadDotProductAttention(self.heads, dtype=BF16)
        feed = lambda z: nn.Dense(self.dim, dtype=BF16)(nn.gelu(nn.Dense(4 * self.dim, dtype=BF16)(z)))
        for _ in range(self.layers):
            x = x + attend()(nn.LayerNorm(dtype=BF16)(x))
            x = x + feed(nn.LayerNorm(dtype=BF16)(x))
        mask = nn.make_causal_mask(text)
        for _ in range(self.layers):
            y = y + attend()(nn.LayerNorm(dtype=BF16)(y), mask=mask)
            y = y + attend()(nn.LayerNorm(dtype=BF16)(y), x)
            y = y + feed(nn.LayerNorm(dtype=BF16)(y))
        return embed.attend(nn.LayerNorm(dtype=BF16)(y))


@stranger(
    {"batch": 8, "frames": 32, "text": 8, "layers": 1, "dim": 64, "heads": 4, "vocab": 128},
    batch=8,
    frames=3000,
    text=224,
    layers=4,
    dim=768,
    heads=12,
    vocab=51865,
)
def speech_to_text(batch: int, frames: int, text: int, layers: int, dim: int, heads: int, vocab: int) -> Program:
    """Whisper: convolutions over a spectrogram, an encoder, a decoder with cross-attention, by Flax."""
    model = _Speech(layers, dim, heads, vocab)

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "sound": jax.random.normal(a, (batch, frames, 80)).astype(BF16),
            "text": jax.random.randint(b, (batch, text + 1), 0, vocab),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return _cross_entropy(model.apply(params, batch["sound"], batch["text"][:, :-1]), batch["text"][:, 1:])

    def init(key: jax.Array) -> Tree:
        return model.init(key, jnp.zeros((1, frames, 80)), jnp.zeros((1, text), int))

    return trained(init, loss, sample)


@stranger(
    {"batch": 8, "seq": 16, "layers": 1, "dim": 64, "heads": 4, "vocab": 128, "masked": 4},
    batch=32,
    seq=512,
    layers=4,
    dim=768,
    heads=12,
    vocab=30522,
    masked=80,
)
def ragged_bert(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int, masked: int) -> Program:
    """Masked language modelling on padded sentences: a mask of lengths, gathered places, a tied head, dropout."""

    class Bert(nn.Module):
        @nn.compact
        def __call__(self, tokens: jax.Array, lengths: jax.Array, places: jax.Array) -> jax.Array:
            embed = nn.Embed(vocab, dim, dtype=BF16)
            x = nn.LayerNorm(dtype=BF16)(embed(tokens) + nn.Embed(seq, dim, dtype=BF16)(jnp.arange(seq))[None])
            valid = jnp.arange(seq)[None, :] < lengths[:, None]
            mask = nn.make_attention_mask(valid, valid)
            for _ in range(layers):
                y = nn.SelfAttention(heads, dtype=BF16, dropout_rate=0.1, deterministic=False)(x, mask=mask)
                x = nn.LayerNorm(dtype=BF16)(x + nn.Dropout(0.1, deterministic=False)(y))
                y = nn.Dense(dim, dtype=BF16)(nn.gelu(nn.Dense(4 * dim, dtype=BF16)(x), approximate=False))
                x = nn.LayerNorm(dtype=BF16)(x + nn.Dropout(0.1, deterministic=False)(y))
            picked = jnp.take_along_axis(x, places[..., None], axis=1)
            return embed.attend(nn.LayerNorm(dtype=BF16)(nn.gelu(nn.Dense(dim, dtype=BF16)(picked))))

    model = Bert()

    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        return {
            "tokens": jax.random.randint(a, (batch, seq), 0, vocab),
            "key": jax.random.key_data(c),
            "lengths": jax.random.randint(b, (batch,), seq // 4, seq + 1),
            "places": jax.random.randint(c, (batch, masked), 0, seq // 4),
            "labels": jax.random.randint(a, (batch, masked), 0, vocab),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        rngs = {"dropout": jax.random.wrap_key_data(batch["key"])}
        logits = model.apply(params, batch["tokens"], batch["lengths"], batch["places"], rngs=rngs)
        return _cross_entropy(logits, batch["labels"])

    def init(key: jax.Array) -> Tree:
        inputs = jnp.zeros((1, seq), int), jnp.ones((1,), int), jnp.zeros((1, masked), int)
        return model.init({"params": key, "dropout": key}, *inputs)

    return trained(init, loss, sample, optax.lamb(1e-3))


@stranger(
    {"batch": 8, "seq": 32, "layers": 1, "dim": 64, "heads": 4, "vocab": 128, "window": 8},
    batch=2,
    seq=8192,
    layers=4,
    dim=1024,
    heads=16,
    vocab=32000,
    window=512,
)
def sliding_window(batch: int, seq: int, layers: int, dim: int, heads: int, vocab: int, window: int) -> Program:
    """Longformer's local attention in blocks: each block of queries sees its own block of keys and the one before."""

    def init(key: jax.Array) -> Tree:
        ks = iter(jax.random.split(key, 2 + 4 * layers))
        normal = lambda *shape: 0.02 * jax.random.normal(next(ks), shape)
        blocks = [
            {
                "qkv": normal(dim, 3 * dim),
                "out": normal(dim, dim),
                "up": normal(dim, 4 * dim),
                "down": normal(4 * dim, dim),
            }
            for _ in range(layers)
        ]
        return {"embed": normal(vocab, dim), "head": normal(dim, vocab), "blocks": blocks}

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        cut = lambda t: t.reshape(batch, seq // window, window, heads, dim // heads)
        with_previous = lambda t: jnp.concatenate([jnp.pad(t, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))[:, :-1], t], 2)
        q, k, v = cut(q), with_previous(cut(k)), with_previous(cut(v))
        scores = jnp.einsum("bnqhd,bnkhd->bnhqk", q, k).astype(jnp.float32) / math.sqrt(dim // heads)
        here, there = jnp.arange(window)[:, None] + window, jnp.arange(2 * window)[None, :]
        near = (there <= here) & (there > here - window)
        weights = jax.nn.softmax(jnp.where(near, scores, -1e30), -1).astype(BF16)
        return jnp.einsum("bnhqk,bnkhd->bnqhd", weights, v).reshape(batch, seq, dim)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        x = params["embed"][batch["tokens"]]
        for p in params["blocks"]:
            y = jax.nn.standardize(x)
            x = x + attention(*jnp.split(y @ p["qkv"], 3, -1)) @ p["out"]
            x = x + jax.nn.relu(jax.nn.standardize(x) @ p["up"]) ** 2 @ p["down"]
        return _cross_entropy((x @ params["head"])[:, :-1], batch["tokens"][:, 1:])

    return trained(init, loss, _tokens(batch, seq, vocab), optax.lion(1e-4))
