"""Programs that take the place of those that were looked at: neither measured nor planned before they were added."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from strangers import Program, Tree, stranger, trained

BF16, F32 = jnp.bfloat16, jnp.float32


def _drawn(key: jax.Array, tree: Tree) -> Tree:
    """A normal array, scaled by the dim that is summed, in the place of every shape."""
    shapes, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(shapes))
    return structure.unflatten(
        [jax.random.normal(k, shape) / math.sqrt(math.prod(shape[:-1])) for k, shape in zip(keys, shapes, strict=True)]
    )


@stranger({"batch": 8, "words": 4, "vocab": 32, "dim": 16}, batch=8192, words=32, vocab=262144, dim=256, fresh=True)
def two_towers(batch: int, words: int, vocab: int, dim: int) -> Program:
    """Retrieval: bags of words through one table, a tower each for queries and documents, all others as negatives."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"table": (vocab, dim), "query": (dim, dim), "document": (dim, dim)})

    def tower(params: Tree, name: str, words: jax.Array) -> jax.Array:
        x = jnp.tanh(params["table"][words].mean(1)) @ params[name]
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        scores = 20 * tower(params, "query", batch["query"]) @ tower(params, "document", batch["document"]).T
        return optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores))).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {name: jax.random.randint(k, (batch, words), 0, vocab) for name, k in (("query", a), ("document", b))}

    return trained(init, loss, sample, optax.adagrad(0.1))


@stranger({"batch": 4, "side": 8, "channels": 8, "steps": 3}, batch=32, side=64, channels=64, steps=32, fresh=True)
def cellular_automaton(batch: int, side: int, channels: int, steps: int) -> Program:
    """Cells that see their neighbours by fixed filters and change by a small network, many times, remade backwards."""
    filters = jnp.array([[[0, 0, 0], [0, 1, 0], [0, 0, 0]], [[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]]], F32)

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"up": (2 * channels, 4 * channels), "down": (4 * channels, channels)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        kernel = jnp.tile(filters.transpose(1, 2, 0)[:, :, None], (1, 1, 1, channels))

        @jax.checkpoint
        def grow(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            dims = ("NHWC", "HWIO", "NHWC")
            seen = lax.conv_general_dilated(
                x, kernel, (1, 1), "SAME", dimension_numbers=dims, feature_group_count=channels
            )
            alive = lax.reduce_window(x[..., :1], -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME") > 0.1
            return (x + jax.nn.relu(seen @ params["up"]) @ params["down"]) * alive, None

        grown, _ = lax.scan(grow, batch["seed"], None, length=steps)
        return ((grown[..., :4] - batch["picture"]) ** 2).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        sides = (batch, side, side)
        return {"seed": jax.random.uniform(a, (*sides, channels)), "picture": jax.random.uniform(b, (*sides, 4))}

    return trained(init, loss, sample)


@stranger({"batch": 8, "seq": 6, "state": 4, "seen": 2}, batch=4096, seq=200, state=16, seen=4, fresh=True)
def kalman_filter(batch: int, seq: int, state: int, seen: int) -> Program:
    """Thousands of small filters over time: a linear system that is learnt, with a solve for every step and example."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"move": (state, state), "see": (state, seen)}) | {"noise": jnp.zeros(state)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        see, noise = params["see"], jnp.diag(jnp.exp(params["noise"]))

        def step(belief: Tree, seen_now: jax.Array) -> tuple[Tree, jax.Array]:
            mean, spread = belief
            mean, spread = mean @ params["move"], params["move"].T @ spread @ params["move"] + noise
            doubt = see.T @ spread @ see + jnp.eye(seen)
            gain = jnp.linalg.solve(doubt, (spread @ see).swapaxes(-1, -2)).swapaxes(-1, -2)
            surprise = seen_now - mean @ see
            mean, spread = mean + (gain @ surprise[..., None])[..., 0], spread - gain @ see.T @ spread
            return (mean, spread), (surprise**2).sum(-1) + jnp.linalg.slogdet(doubt)[1]

        start = (jnp.zeros((batch.shape[0], state)), jnp.broadcast_to(jnp.eye(state), (batch.shape[0], state, state)))
        return lax.scan(step, start, batch.swapaxes(0, 1))[1].mean()

    return trained(init, loss, lambda key: jax.random.normal(key, (batch, seq, seen)), optax.adam(1e-3))


@stranger({"batch": 8, "parts": 8, "wholes": 4, "dim": 8}, batch=128, parts=1152, wholes=32, dim=16, fresh=True)
def capsules(batch: int, parts: int, wholes: int, dim: int) -> Program:
    """Parts vote for wholes by matrices of their own; votes that agree are weighed more, in three rounds."""

    def init(key: jax.Array) -> Tree:
        return {"votes": 0.1 * jax.random.normal(key, (parts, wholes, dim, dim))}

    def squashed(x: jax.Array) -> jax.Array:
        square = (x * x).sum(-1, keepdims=True)
        return x * square / (1 + square) / jnp.sqrt(square + 1e-6)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        votes = jnp.einsum("bpd,pwde->bpwe", batch["x"].astype(BF16), params["votes"].astype(BF16)).astype(F32)
        logits = jnp.zeros(votes.shape[:3])
        for _ in range(3):
            whole = squashed(jnp.einsum("bpw,bpwe->bwe", jax.nn.softmax(logits, -1), votes))
            logits = logits + jnp.einsum("bpwe,bwe->bpw", votes, whole)
        length = jnp.linalg.norm(whole + 1e-6, axis=-1)
        wanted = jax.nn.one_hot(batch["y"], wholes)
        missed, wrong = jax.nn.relu(0.9 - length) ** 2, jax.nn.relu(length - 0.1) ** 2
        return (wanted * missed + 0.5 * (1 - wanted) * wrong).sum(-1).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, parts, dim)), "y": jax.random.randint(b, (batch,), 0, wholes)}

    return trained(init, loss, sample)
