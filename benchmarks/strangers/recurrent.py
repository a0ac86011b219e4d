"""Sequences by recurrences: gated cells, state spaces, linear attention, dilated convolutions."""

import math

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger, trained

BF16 = jnp.bfloat16


def _series(batch: int, seq: int, dim: int, classes: int) -> Tree:
    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, seq, dim)), "y": jax.random.randint(b, (batch, seq), 0, classes)}

    return sample


def _labelled(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


class _Lstm(nn.Module):
    hidden: int
    layers: int
    vocab: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(self.vocab, self.hidden)(tokens)
        for _ in range(self.layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.hidden))(x)
        return nn.Dense(self.vocab)(x)


@stranger(
    {"batch": 8, "seq": 8, "hidden": 32, "layers": 1, "vocab": 64},
    batch=64,
    seq=128,
    hidden=1024,
    layers=2,
    vocab=10000,
)
def lstm_language(batch: int, seq: int, hidden: int, layers: int, vocab: int) -> Program:
    """A language model of two LSTM layers by Flax, with clipped gradients and plain gradient descent."""
    model = _Lstm(hidden, layers, vocab)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return _labelled(model.apply(params, batch["tokens"][:, :-1]), batch["tokens"][:, 1:])

    def sample(key: jax.Array) -> Tree:
        return {"tokens": jax.random.randint(key, (batch, seq + 1), 0, vocab)}

    optimizer = optax.chain(optax.clip_by_global_norm(0.25), optax.sgd(20.0))
    return trained(lambda key: model.init(key, jnp.zeros((1, seq), int)), loss, sample, optimizer)


@stranger({"batch": 8, "seq": 8, "dim": 16, "hidden": 32}, batch=128, seq=200, dim=80, hidden=512)
def gru_speech(batch: int, seq: int, dim: int, hidden: int) -> Program:
    """A GRU of Equinox over frames, each example by `vmap`, with connectionist temporal classification."""
    from functools import partial

    def model_of(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return eqx.nn.GRUCell(dim, hidden, key=a), eqx.nn.Linear(hidden, 32, key=b)

    def one(model: Tree, x: jax.Array) -> jax.Array:
        cell, head = model
        _, states = jax.lax.scan(lambda h, frame: (cell(frame, h),) * 2, jnp.zeros(hidden), x)
        return jax.vmap(head)(states)

    static = eqx.partition(eqx.filter_eval_shape(model_of, jax.random.key(0)), lambda leaf: hasattr(leaf, "shape"))[1]

    def init(key: jax.Array) -> Tree:
        return eqx.partition(model_of(key), eqx.is_array)[0]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        logits = jax.vmap(partial(one, eqx.combine(params, static)))(batch["x"])
        lengths = jnp.arange(seq // 4)[None, :] >= 3 + batch["y"][:, :1] % (seq // 4 - 2)
        labels = 1 + batch["y"][:, : seq // 4] % 31
        return optax.ctc_loss(logits, jnp.zeros(logits.shape[:2]), labels, lengths.astype(float)).mean()

    return trained(init, loss, _series(batch, seq, dim, 32), optax.adam(1e-3))


def _normals(key: jax.Array, count: int) -> Tree:
    ks = iter(jax.random.split(key, count))
    return lambda *shape: jax.random.normal(next(ks), shape) / math.sqrt(shape[-2] if len(shape) > 1 else 1)


@stranger(
    {"batch": 8, "seq": 16, "dim": 32, "states": 4, "layers": 1, "vocab": 64},
    batch=4,
    seq=1024,
    dim=1024,
    states=16,
    layers=4,
    vocab=32000,
)
def selective_state_space(batch: int, seq: int, dim: int, states: int, layers: int, vocab: int) -> Program:
    """Mamba: a short causal convolution, then a recurrence with coefficients of the input, by an associative scan."""

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 2 + 6 * layers)
        blocks = [
            {
                "in": normal(dim, 4 * dim),
                "conv": normal(4, 1, 2 * dim),
                "bc": normal(2 * dim, 2 * states),
                "dt": 0.1 * normal(2 * dim, 1),
                "a": jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (2 * dim, 1))),
                "skip": jnp.ones(2 * dim),
                "out": normal(2 * dim, dim),
            }
            for _ in range(layers)
        ]
        return {"embed": 0.02 * normal(vocab, dim), "blocks": blocks}

    def mix(p: Tree, x: jax.Array) -> jax.Array:
        x, gate = jnp.split(x @ p["in"].astype(BF16), 2, -1)
        x = jax.lax.conv_general_dilated(
            x,
            p["conv"].astype(BF16),
            (1,),
            [(3, 0)],
            feature_group_count=2 * dim,
            dimension_numbers=("NWC", "WIO", "NWC"),
        )
        x = jax.nn.silu(x).astype(jnp.float32)
        step = jax.nn.softplus(x @ p["dt"] + x * 0.01)
        b, c = jnp.split(x @ p["bc"], 2, -1)
        decay = jnp.exp(-step[..., None] * jnp.exp(p["a"]))
        driven = (step * x)[..., None] * b[:, :, None]
        _, h = jax.lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (decay, driven), axis=1)
        y = (h * c[:, :, None]).sum(-1) + p["skip"] * x
        return (y.astype(BF16) * jax.nn.silu(gate)) @ p["out"].astype(BF16)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"].astype(BF16)[batch["tokens"]]
        for p in params["blocks"]:
            x = x + jax.checkpoint(mix)(p, jax.nn.standardize(x))
        logits = x @ params["embed"].astype(BF16).T
        return _labelled(logits[:, :-1], batch["tokens"][:, 1:])

    return trained(init, loss, lambda key: {"tokens": jax.random.randint(key, (batch, seq), 0, vocab)})


@stranger(
    {"batch": 8, "seq": 16, "dim": 32, "heads": 2, "chunk": 8, "layers": 2, "vocab": 64},
    batch=8,
    seq=2048,
    dim=1024,
    heads=8,
    chunk=128,
    layers=4,
    vocab=32000,
)
def linear_attention(batch: int, seq: int, dim: int, heads: int, chunk: int, layers: int, vocab: int) -> Program:
    """RetNet: linear attention with decay, in chunks that hand a state on, in a scan."""

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 2 + 4 * layers)
        blocks = [
            {
                "qkvg": normal(dim, 4 * dim),
                "out": normal(dim, dim),
                "up": normal(dim, 2 * dim),
                "down": normal(2 * dim, dim),
            }
            for _ in range(layers)
        ]
        return {"embed": 0.02 * normal(vocab, dim), "blocks": blocks}

    rate = 1 - 2.0 ** (-5 - jnp.arange(heads))
    places = jnp.arange(chunk)
    inner = jnp.where(places[:, None] >= places, rate[:, None, None] ** (places[:, None] - places).clip(0), 0)

    def retain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        cut = lambda t: t.reshape(batch, seq // chunk, chunk, heads, -1).transpose(1, 0, 3, 2, 4)
        from_start = (rate[:, None] ** (places + 1))[None, :, :, None].astype(BF16)
        to_end = (rate[:, None] ** (chunk - 1 - places))[None, :, :, None].astype(BF16)

        def piece(state: jax.Array, qkv: Tree) -> tuple[jax.Array, jax.Array]:
            q, k, v = qkv
            near = jnp.einsum("bhqd,bhkd->bhqk", q, k) * inner.astype(BF16)
            y = jnp.einsum("bhqk,bhkd->bhqd", near, v) + jnp.einsum(
                "bhqd,bhde->bhqe", q * from_start, state.astype(BF16)
            )
            state = state * (rate**chunk)[None, :, None, None] + jnp.einsum("bhkd,bhke->bhde", k * to_end, v)
            return state, y

        start = jnp.zeros((batch, heads, dim // heads, dim // heads))
        _, y = jax.lax.scan(piece, start, (cut(q), cut(k), cut(v)))
        return y.transpose(1, 0, 3, 2, 4)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        x = params["embed"][batch["tokens"]]
        for p in params["blocks"]:
            q, k, v, g = jnp.split(jax.nn.standardize(x) @ p["qkvg"], 4, -1)
            y = jax.nn.standardize(retain(q, k / math.sqrt(dim // heads), v)).reshape(x.shape)
            x = x + (jax.nn.silu(g) * y) @ p["out"]
            x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
        return _labelled((x @ params["embed"].T)[:, :-1], batch["tokens"][:, 1:])

    return trained(init, loss, lambda key: {"tokens": jax.random.randint(key, (batch, seq), 0, vocab)})


@stranger({"batch": 8, "seq": 32, "channels": 16, "cycles": 1}, batch=8, seq=16384, channels=128, cycles=2)
def dilated_wavenet(batch: int, seq: int, channels: int, cycles: int) -> Program:
    """WaveNet on raw sound: dilated one-dimensional convolutions, gates, 256 levels."""

    class WaveNet(nn.Module):
        @nn.compact
        def __call__(self, levels: jax.Array) -> jax.Array:
            x, total = nn.Embed(256, channels)(levels), 0.0
            for _ in range(cycles):
                for power in range(8):
                    y = nn.Conv(2 * channels, (2,), kernel_dilation=(2**power,), padding="CAUSAL")(x)
                    a, b = jnp.split(y, 2, -1)
                    y = jnp.tanh(a) * jax.nn.sigmoid(b)
                    total = total + nn.Conv(channels, (1,))(y)
                    x = x + nn.Conv(channels, (1,))(y)
            return nn.Dense(256)(nn.relu(nn.Dense(channels)(nn.relu(total))))

    model = WaveNet()

    def loss(params: Tree, batch: Tree) -> jax.Array:
        return _labelled(model.apply(params, batch["sound"][:, :-1]), batch["sound"][:, 1:])

    def sample(key: jax.Array) -> Tree:
        return {"sound": jax.random.randint(key, (batch, seq + 1), 0, 256)}

    return trained(lambda key: model.init(key, jnp.zeros((1, seq), int)), loss, sample, optax.adam(1e-3))


@stranger({"batch": 8, "seq": 16, "dim": 8, "hidden": 16}, batch=256, seq=1000, dim=64, hidden=256)
def long_scan(batch: int, seq: int, dim: int, hidden: int) -> Program:
    """A leaky recurrent network over a thousand steps, written by hand: the loop is all there is."""

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 3)
        return {"in": normal(dim, hidden), "rec": 0.9 * normal(hidden, hidden), "out": normal(hidden, 10)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def cell(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            h = 0.9 * h + 0.1 * jnp.tanh(x @ params["in"] + h @ params["rec"])
            return h, h @ params["out"]

        _, logits = jax.lax.scan(cell, jnp.zeros((batch["x"].shape[0], hidden)), batch["x"].swapaxes(0, 1))
        return _labelled(logits.swapaxes(0, 1), batch["y"])

    return trained(init, loss, _series(batch, seq, dim, 10), optax.rmsprop(1e-3))
