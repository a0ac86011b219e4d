"""Programs written last, with what prices had never met: they were measured once, after they had been planned."""

import math

import jax
import jax.numpy as jnp
import optax
from jax import lax

from strangers import Program, Tree, stranger, trained

BF16, F32 = jnp.bfloat16, jnp.float32


def _drawn(key: jax.Array, tree: Tree) -> Tree:
    """A normal array, scaled by what it reads, in the place of every shape."""
    shapes, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(shapes))
    return structure.unflatten(
        [jax.random.normal(k, shape) / math.sqrt(shape[-2]) for k, shape in zip(keys, shapes, strict=True)]
    )


def _classes(*shape: int, dim: int, classes: int) -> Tree:
    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (*shape, dim)), "y": jax.random.randint(b, shape, 0, classes)}

    return sample


def _labelled(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels).mean()


@stranger({"batch": 8, "seq": 16, "dim": 16, "layers": 1}, batch=8, seq=4096, dim=1024, layers=4, fresh=True)
def minimal_gru(batch: int, seq: int, dim: int, layers: int) -> Program:
    """Gates that see the input alone, so that the recurrence of each layer is an associative scan."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"layers": [{"gate": (dim, dim), "value": (dim, dim)}] * layers, "out": (dim, 32)})

    def layer(x: jax.Array, p: Tree) -> jax.Array:
        gate, value = jax.nn.sigmoid(x @ p["gate"]), x @ p["value"]
        joined = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
        return x + lax.associative_scan(joined, (1 - gate, gate * value), axis=1)[1]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for p in params["layers"]:
            x = layer(x, p)
        return _labelled(x @ params["out"], batch["y"])

    return trained(init, loss, _classes(batch, seq, dim=dim, classes=32))


@stranger({"batch": 16, "width": 16, "most": 3}, batch=16384, width=512, most=12, fresh=True)
def pondering(batch: int, width: int, most: int) -> Program:
    """Steps until every example has halted, at most a dozen, and then one step with gradients from there."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"in": (width, width), "step": (width, width), "halt": (width, 1), "out": (width, 10)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        def advance(h: jax.Array) -> jax.Array:
            return jnp.tanh(h @ params["step"] + batch["x"] @ params["in"])

        def goes_on(state: Tree) -> jax.Array:
            return (state[0] < most) & jnp.any(state[2] < 1)

        def again(state: Tree) -> Tree:
            h = advance(state[1])
            return state[0] + 1, h, state[2] + jax.nn.sigmoid(h @ params["halt"])

        start = (0, jnp.zeros_like(batch["x"]), jnp.zeros((batch["x"].shape[0], 1)))
        _, h, _ = lax.stop_gradient(lax.while_loop(goes_on, again, start))
        return _labelled(advance(h) @ params["out"], batch["y"])

    return trained(init, loss, _classes(batch, dim=width, classes=10))


@stranger({"batch": 8, "dim": 8, "rounds": 3}, batch=4096, dim=32, rounds=50, fresh=True)
def optimal_transport(batch: int, dim: int, rounds: int) -> Program:
    """Sinkhorn's distance between two clouds, in a loop of logsumexps, moves one towards the other."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"up": (dim, 8 * dim), "down": (8 * dim, dim)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = jax.nn.gelu(batch["x"] @ params["up"]) @ params["down"]
        cost = ((x**2).sum(-1)[:, None] + (batch["z"] ** 2).sum(-1) - 2 * x @ batch["z"].T) / dim

        def smoothed(potentials: Tree, _: None) -> tuple[Tree, None]:
            _, g = potentials
            f = -jax.nn.logsumexp((g - cost) / 0.1, axis=1) * 0.1
            return (f, -jax.nn.logsumexp((f[:, None] - cost) / 0.1, axis=0) * 0.1), None

        zeros = jnp.zeros(batch["x"].shape[0])
        (f, g), _ = lax.stop_gradient(lax.scan(smoothed, (zeros, zeros), None, length=rounds))
        plan = jnp.exp((lax.stop_gradient(f)[:, None] + g - lax.stop_gradient(cost)) / 0.1)
        return (plan * cost).sum() / batch["x"].shape[0]

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, dim)), "z": jax.random.normal(b, (batch, dim))}

    return trained(init, loss, sample, optax.adam(1e-3))


@stranger({"batch": 8, "dim": 8, "width": 16}, batch=256, dim=64, width=512, fresh=True)
def gaussian_process(batch: int, dim: int, width: int) -> Program:
    """Deep kernel learning: features of a network, a kernel matrix for each task, its Cholesky factor, a likelihood."""
    points = 4 * dim

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"up": (dim, width), "down": (width, 32)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        z = jnp.tanh(batch["x"] @ params["up"]) @ params["down"]
        square = (z**2).sum(-1)
        kernel = jnp.exp(-0.5 * (square[:, :, None] + square[:, None] - 2 * z @ z.swapaxes(1, 2)))
        factor = jnp.linalg.cholesky(kernel + 0.1 * jnp.eye(points))
        solved = lax.linalg.triangular_solve(factor, batch["y"], left_side=True, lower=True)
        return (0.5 * (solved**2).sum((1, 2)) + jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum(1)).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, points, dim)), "y": jax.random.normal(b, (batch, points, 1))}

    return trained(init, loss, sample, optax.adam(1e-3))


@stranger({"batch": 8, "seq": 16, "dim": 16, "codes": 8}, batch=32, seq=1024, dim=512, codes=1024, fresh=True)
def residual_codes(batch: int, seq: int, dim: int, codes: int) -> Program:
    """Sound as codes: four codebooks, each for what the last one left, straight-through gradients, averages of use."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"in": (dim, dim), "out": (dim, dim), "codes": [(codes, dim)] * 4})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        z = jax.nn.gelu(batch["x"] @ params["in"])
        rest, total, apart = z, jnp.zeros_like(z), 0.0
        for table in params["codes"]:
            near = jnp.argmin((table**2).sum(-1) - 2 * rest @ table.T, -1)
            chosen = table[near]
            apart = apart + ((chosen - lax.stop_gradient(rest)) ** 2).mean()
            total, rest = total + chosen, rest - lax.stop_gradient(chosen)
        decoded = (z + lax.stop_gradient(total - z)) @ params["out"]
        return ((decoded - batch["x"]) ** 2).mean() + apart

    return trained(init, loss, _classes(batch, seq, dim=dim, classes=2), optax.adam(1e-3))


@stranger({"batch": 8, "side": 8, "width": 8}, batch=32, side=64, width=64, fresh=True)
def shifted_windows(batch: int, side: int, width: int) -> Program:
    """Local attention by shifts: each pixel attends to its 49 neighbours, rolled into place one after the other."""
    offsets = [(i, j) for i in range(-3, 4) for j in range(-3, 4)]

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"in": (3, width), "qkv": (width, 3 * width), "out": (width, 10)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"] @ params["in"]
        q, k, v = jnp.split(x @ params["qkv"], 3, -1)
        near = [(jnp.roll(k, shift, (1, 2)), jnp.roll(v, shift, (1, 2))) for shift in offsets]
        scores = jnp.stack([(q * one).sum(-1) for one, _ in near], -1) / math.sqrt(width)
        weights = jax.nn.softmax(scores)
        x = x + sum(weights[..., n, None] * one for n, (_, one) in enumerate(near))
        return _labelled(x.mean((1, 2)) @ params["out"], batch["y"][:, 0, 0])

    return trained(init, loss, _classes(batch, side, side, dim=3, classes=10))


@stranger({"nodes": 32, "edges": 128, "dim": 8, "rounds": 2}, nodes=200000, edges=2000000, dim=64, rounds=4, fresh=True)
def largest_of_neighbours(nodes: int, edges: int, dim: int, rounds: int) -> Program:
    """A graph network that takes the maximum over neighbours, as algorithmic reasoning does, its weights shared."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"in": (dim, dim), "message": (dim, dim), "update": (2 * dim, dim), "out": (dim, 8)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        h = jax.nn.relu(batch["x"] @ params["in"])
        for _ in range(rounds):
            sent = jax.nn.relu(h @ params["message"])[batch["from"]]
            top = jnp.maximum(jax.ops.segment_max(sent, batch["to"], nodes), 0.0)
            h = jax.nn.relu(jnp.concatenate([h, top], -1) @ params["update"])
        return _labelled(h @ params["out"], batch["y"])

    def sample(key: jax.Array) -> Tree:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "x": jax.random.normal(a, (nodes, dim)),
            "from": jax.random.randint(b, (edges,), 0, nodes),
            "to": jax.random.randint(c, (edges,), 0, nodes),
            "y": jax.random.randint(d, (nodes,), 0, 8),
        }

    return trained(init, loss, sample)


@stranger({"batch": 8, "seq": 32, "dim": 16, "layers": 1}, batch=16, seq=4096, dim=512, layers=4, fresh=True)
def long_convolution(batch: int, seq: int, dim: int, layers: int) -> Program:
    """Hyena: filters as long as the sequence, made by a small network, applied by Fourier transforms between gates."""

    def init(key: jax.Array) -> Tree:
        one = {"in": (dim, 3 * dim), "filter1": (16, 64), "filter2": (64, dim), "out": (dim, dim)}
        return _drawn(key, {"embed": (256, dim), "layers": [one] * layers})

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        place = jnp.linspace(0, 1, seq)[:, None] * jnp.arange(1, 17)
        window = jnp.exp(-4 * jnp.linspace(0, 1, seq))[:, None]
        taps = jnp.sin(jnp.sin(place) @ p["filter1"]) @ p["filter2"] * window
        u, gate, value = jnp.split((x @ p["in"]).astype(F32), 3, -1)
        waves = jnp.fft.rfft(u * value, 2 * seq, axis=1) * jnp.fft.rfft(taps, 2 * seq, axis=0)
        return x + (gate * jnp.fft.irfft(waves, 2 * seq, axis=1)[:, :seq]).astype(x.dtype) @ p["out"]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = params["embed"][batch["tokens"][:, :-1]]
        for p in params["layers"]:
            x = jax.checkpoint(layer)(p, jax.nn.standardize(x))
        return _labelled(x @ params["embed"].T, batch["tokens"][:, 1:])

    return trained(init, loss, lambda key: {"tokens": jax.random.randint(key, (batch, seq + 1), 0, 256)})


@stranger(
    {"batch": 8, "seq": 8, "dim": 16, "vocab": 64, "layers": 1},
    batch=8,
    seq=1024,
    dim=1024,
    vocab=32000,
    layers=4,
    fresh=True,
)
def multi_token(batch: int, seq: int, dim: int, vocab: int, layers: int) -> Program:
    """Four next tokens at once from one trunk, the logits in chunks of rows that are computed again backward."""

    def init(key: jax.Array) -> Tree:
        block = {"mix": (seq, seq), "up": (dim, 4 * dim), "down": (4 * dim, dim)}
        return _drawn(key, {"embed": (vocab, dim), "blocks": [block] * layers, "heads": [(dim, dim)] * 4})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        tokens, causal = batch["tokens"], jnp.tril(jnp.ones((seq, seq), BF16))
        x = params["embed"][tokens[:, :seq]]
        for p in params["blocks"]:
            x = x + jnp.einsum("st,btd->bsd", p["mix"] * causal, jax.nn.standardize(x))
            x = x + jax.nn.silu(jax.nn.standardize(x) @ p["up"]) @ p["down"]

        @jax.checkpoint
        def of_rows(total: jax.Array, rows: Tree) -> tuple[jax.Array, None]:
            x, labels = rows
            return total + _labelled(x @ params["embed"].T, labels), None

        total = jnp.zeros(())
        for ahead, head in enumerate(params["heads"], 1):
            rows = (x @ head).swapaxes(0, 1).reshape(8, -1, dim), tokens[:, ahead : seq + ahead].T.reshape(8, -1)
            total = lax.scan(of_rows, total, rows)[0]
        return total / 32

    return trained(init, loss, lambda key: {"tokens": jax.random.randint(key, (batch, seq + 4), 0, vocab)})


@stranger({"batch": 8, "length": 8, "items": 64, "dim": 16}, batch=1024, length=128, items=200000, dim=128, fresh=True)
def next_basket(batch: int, length: int, items: int, dim: int) -> Program:
    """Sessions of a shop: how long each is decides how many steps a loop takes; sampled softmax over many items."""

    def init(key: jax.Array) -> Tree:
        return _drawn(key, {"items": (items, dim), "x": (dim, dim), "h": (dim, dim), "out": (dim, dim)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        seen = params["items"][batch["clicked"]]

        def advance(step: jax.Array, h: jax.Array) -> jax.Array:
            new = jnp.tanh(lax.stop_gradient(seen)[:, step] @ params["x"] + h @ params["h"])
            return jnp.where((step < batch["lengths"])[:, None], new, h)

        start = jnp.zeros((batch["lengths"].shape[0], dim))
        h = lax.stop_gradient(lax.fori_loop(0, batch["lengths"].max(), advance, start))
        query = (h + seen.mean(1)) @ params["out"]
        right = (query * params["items"][batch["next"]]).sum(-1)
        wrong = query @ params["items"][batch["drawn"]].T
        return -(right - jax.nn.logsumexp(jnp.concatenate([right[:, None], wrong], 1), 1)).mean()

    def sample(key: jax.Array) -> Tree:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "clicked": jax.random.randint(a, (batch, length), 0, items),
            "lengths": jax.random.randint(b, (batch,), 1, length + 1),
            "next": jax.random.randint(c, (batch,), 0, items),
            "drawn": jax.random.randint(d, (1024,), 0, items),
        }

    return trained(init, loss, sample, optax.adagrad(0.1))
