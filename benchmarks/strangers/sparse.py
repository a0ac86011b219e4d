"""What looks up, routes, scatters and sorts."""

import itertools
import math

import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger, trained

BF16 = jnp.bfloat16


def _normals(key: jax.Array, count: int) -> Tree:
    ks = iter(jax.random.split(key, count))
    return lambda *shape: jax.random.normal(next(ks), shape) / math.sqrt(shape[-2] if len(shape) > 1 else 1)


def _regression(tokens: int, dim: int) -> Tree:
    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (tokens, dim)).astype(BF16), "y": jax.random.normal(b, (tokens, dim))}

    return sample


@stranger(
    {"tokens": 32, "dim": 16, "hidden": 32, "experts": 4, "layers": 1},
    tokens=8192,
    dim=1024,
    hidden=2048,
    experts=8,
    layers=2,
)
def dropless_experts(tokens: int, dim: int, hidden: int, experts: int, layers: int) -> Program:
    """Two experts of eight for every token, none dropped: tokens sorted by expert, products by `ragged_dot`."""

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 3 * layers)
        return [
            {"router": normal(dim, experts), "up": normal(experts, dim, hidden), "down": normal(experts, hidden, dim)}
            for _ in range(layers)
        ]

    def layer(p: Tree, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax((x @ p["router"].astype(BF16)).astype(jnp.float32)), 2)
        order = jnp.argsort(chosen.reshape(-1))
        rows, sizes = x[order // 2], jnp.bincount(chosen.reshape(-1), length=experts)
        y = jax.nn.silu(jax.lax.ragged_dot(rows, p["up"].astype(BF16), sizes))
        y = jax.lax.ragged_dot(y, p["down"].astype(BF16), sizes)
        y = y * weights.reshape(-1)[order][:, None].astype(BF16)
        return jnp.zeros_like(x).at[order // 2].add(y)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for p in params:
            x = x + layer(p, jax.nn.standardize(x))
        return ((x.astype(jnp.float32) - batch["y"]) ** 2).mean()

    return trained(init, loss, _regression(tokens, dim))


@stranger(
    {"groups": 8, "size": 8, "dim": 16, "hidden": 32, "experts": 4},
    groups=16,
    size=512,
    dim=1024,
    hidden=4096,
    experts=16,
)
def capacity_experts(groups: int, size: int, dim: int, hidden: int, experts: int) -> Program:
    """Switch routing with a capacity: one-hot tensors dispatch and combine, a loss balances."""
    capacity = 2 * size // experts

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 3)
        return {
            "router": normal(dim, experts),
            "up": normal(experts, dim, hidden),
            "down": normal(experts, hidden, dim),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"].reshape(groups, size, dim)
        chances = jax.nn.softmax((x @ params["router"].astype(BF16)).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(chances, -1), experts)
        place = (jnp.cumsum(chosen, 1) * chosen).sum(-1) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place.astype(int), capacity)[:, :, None]
        combine = dispatch * (chances * chosen).sum(-1)[..., None, None]
        y = jnp.einsum("gsec,gsd->egcd", dispatch.astype(BF16), x)
        y = jax.nn.gelu(jnp.einsum("egcd,edh->egch", y, params["up"].astype(BF16)))
        y = jnp.einsum("egch,ehd->egcd", y, params["down"].astype(BF16))
        y = x + jnp.einsum("gsec,egcd->gsd", combine.astype(BF16), y)
        balance = experts * (chosen.mean((0, 1)) * chances.mean((0, 1))).sum()
        return ((y.reshape(-1, dim) - batch["y"]) ** 2).mean() + 0.01 * balance

    return trained(init, loss, _regression(groups * size, dim))


@stranger(
    {"batch": 16, "rows": 64, "tables": 4, "dim": 8, "bag": 3}, batch=16384, rows=500000, tables=26, dim=64, bag=4
)
def dlrm(batch: int, rows: int, tables: int, dim: int, bag: int) -> Program:
    """Recommendations: bags of sparse features looked up and summed, all pairs of features, Adagrad on the tables."""

    def init(key: jax.Array) -> Tree:
        normal, pairs = _normals(key, 8), (tables + 1) * tables // 2
        bottom = [normal(13, 512), normal(512, 256), normal(256, dim)]
        return {
            "tables": 0.01 * normal(tables, rows, dim),
            "bottom": bottom,
            "top": [normal(dim + pairs, 1024), normal(1024, 512), normal(512, 1)],
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["dense"]
        for w in params["bottom"]:
            x = jax.nn.relu(x @ w)
        looked = jax.vmap(lambda table, ids: table[ids].sum(1), (0, 1), 1)(params["tables"], batch["sparse"])
        features = jnp.concatenate([x[:, None], looked], 1)
        pairs = jnp.einsum("bid,bjd->bij", features, features)
        i, j = jnp.triu_indices(tables + 1, 1)
        x = jnp.concatenate([x, pairs[:, i, j]], 1)
        for w in params["top"][:-1]:
            x = jax.nn.relu(x @ w)
        return optax.sigmoid_binary_cross_entropy((x @ params["top"][-1])[:, 0], batch["click"]).mean()

    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        skewed = (rows * jax.random.uniform(a, (batch, tables, bag)) ** 3).astype(int)
        return {
            "dense": jax.random.normal(b, (batch, 13)),
            "sparse": skewed,
            "click": jax.random.bernoulli(c, 0.2, (batch,)).astype(float),
        }

    return trained(init, loss, sample, optax.adagrad(0.01))


def _graph(nodes: int, edges: int, dim: int, classes: int) -> Tree:
    def sample(key: jax.Array) -> Tree:
        a, b, c, d = jax.random.split(key, 4)
        return {
            "x": jax.random.normal(a, (nodes, dim)),
            "from": jax.random.randint(b, (edges,), 0, nodes),
            "to": jnp.sort((nodes * jax.random.uniform(c, (edges,)) ** 2).astype(int)),
            "label": jax.random.randint(d, (nodes,), 0, classes),
        }

    return sample


@stranger(
    {"nodes": 32, "edges": 128, "dim": 16, "hidden": 16, "layers": 2},
    nodes=100000,
    edges=1600000,
    dim=128,
    hidden=128,
    layers=3,
)
def graph_convolution(nodes: int, edges: int, dim: int, hidden: int, layers: int) -> Program:
    """A graph convolution: features gathered along edges, added by segments, scaled by degrees."""

    def init(key: jax.Array) -> Tree:
        sizes = [dim, *[hidden] * layers]
        normal = _normals(key, layers + 1)
        return {
            "layers": [normal(m, n) for m, n in itertools.pairwise(sizes)],
            "head": normal(hidden, 40),
        }

    def loss(params: Tree, batch: Tree) -> jax.Array:
        degree = jax.ops.segment_sum(jnp.ones(edges), batch["to"], nodes)
        scale = jax.lax.rsqrt(degree + 1)[:, None]
        x = batch["x"]
        for w in params["layers"]:
            y = (x @ w) * scale
            x = jax.nn.relu(scale * (y + jax.ops.segment_sum(y[batch["from"]], batch["to"], nodes)))
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["label"]).mean()

    return trained(init, loss, _graph(nodes, edges, dim, 40), optax.adam(1e-2))


@stranger({"nodes": 32, "edges": 128, "dim": 16, "heads": 2}, nodes=50000, edges=800000, dim=128, heads=8)
def graph_attention(nodes: int, edges: int, dim: int, heads: int) -> Program:
    """Graph attention: a softmax over the edges of each node by segment maxima and sums, twice."""

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 7)
        layers = [
            {"w": normal(dim, heads, dim // heads), "l": normal(heads, dim // heads), "r": normal(heads, dim // heads)}
            for _ in range(2)
        ]
        return {"layers": layers, "head": normal(dim, 40)}

    def attend(p: Tree, x: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        h = jnp.einsum("nd,dhk->nhk", x, p["w"])
        score = jax.nn.leaky_relu((h * p["l"]).sum(-1)[start] + (h * p["r"]).sum(-1)[end], 0.2)
        top = jax.ops.segment_max(jax.lax.stop_gradient(score), end, nodes)
        raised = jnp.exp(score - top[end])
        total = jax.ops.segment_sum(raised, end, nodes)
        mixed = jax.ops.segment_sum(h[start] * (raised / (total[end] + 1e-9))[..., None], end, nodes)
        return jax.nn.elu(mixed.reshape(nodes, -1))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for p in params["layers"]:
            x = x + attend(p, x, batch["from"], batch["to"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], batch["label"]).mean()

    return trained(init, loss, _graph(nodes, edges, dim, 40), optax.adam(5e-3))


@stranger({"molecules": 8, "atoms": 4, "neighbours": 3, "dim": 16}, molecules=512, atoms=24, neighbours=12, dim=256)
def message_passing_forces(molecules: int, atoms: int, neighbours: int, dim: int) -> Program:
    """SchNet: energies of molecules by messages between atoms, and forces, the gradient by positions, in the loss."""
    count = molecules * atoms

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 14)
        layers = [
            {"filter1": normal(32, dim), "filter2": normal(dim, dim), "w": normal(dim, dim), "out": normal(dim, dim)}
            for _ in range(3)
        ]
        return {"embed": normal(20, dim), "layers": layers, "read": normal(dim, 1)}

    def energy(params: Tree, places: jax.Array, batch: Tree) -> jax.Array:
        start, end = batch["from"], batch["to"]
        distance = jnp.sqrt(((places[start] - places[end]) ** 2).sum(-1) + 1e-6)
        waves = jnp.exp(-10 * (distance[:, None] - jnp.linspace(0, 3, 32)) ** 2)
        x = params["embed"][batch["kind"]]
        for p in params["layers"]:
            filters = jax.nn.softplus(waves @ p["filter1"]) @ p["filter2"]
            x = x + jax.nn.softplus(jax.ops.segment_sum((x @ p["w"])[start] * filters, end, count)) @ p["out"]
        return jax.ops.segment_sum((x @ params["read"])[:, 0], jnp.repeat(jnp.arange(molecules), atoms), molecules)

    def loss(params: Tree, batch: Tree) -> jax.Array:
        energies, back = jax.vjp(lambda places: energy(params, places, batch), batch["places"])
        (slopes,) = back(jnp.ones(molecules))
        return ((energies - batch["energy"]) ** 2).mean() + ((slopes + batch["force"]) ** 2).mean()

    def sample(key: jax.Array) -> Tree:
        a, b, c, d, e = jax.random.split(key, 5)
        end = jnp.repeat(jnp.arange(count), neighbours)
        start = end // atoms * atoms + jax.random.randint(a, end.shape, 0, atoms)
        return {
            "from": start,
            "to": end,
            "kind": jax.random.randint(b, (count,), 0, 20),
            "places": jax.random.normal(c, (count, 3)),
            "energy": jax.random.normal(d, (molecules,)),
            "force": jax.random.normal(e, (count, 3)),
        }

    return trained(init, loss, sample, optax.amsgrad(1e-3))


@stranger({"batch": 8, "items": 16, "dim": 16, "kept": 4}, batch=4096, items=256, dim=256, kept=32)
def sorted_ranking(batch: int, items: int, dim: int, kept: int) -> Program:
    """Learning to rank: lists sorted by score, discounted gains, the top scores softened, a sampled loss."""

    def init(key: jax.Array) -> Tree:
        normal = _normals(key, 3)
        return [normal(dim, 2 * dim), normal(2 * dim, dim), normal(dim, 1)]

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["x"]
        for w in params[:-1]:
            x = jax.nn.gelu(x @ w)
        scores = (x @ params[-1])[..., 0]
        order = jnp.argsort(-scores, axis=1)
        gains = jnp.take_along_axis(batch["gain"], order, 1) / jnp.log2(jnp.arange(items) + 2)
        ranked = -jnp.sort(-scores, axis=1)
        likelihood = ranked - jax.lax.cumlogsumexp(ranked, axis=1, reverse=True)
        best, where = jax.lax.top_k(scores, kept)
        picked = jnp.take_along_axis(batch["gain"], where, 1)
        listwise = (jax.nn.softmax(picked) * jax.nn.log_softmax(best)).sum(1)
        return -(gains * likelihood).sum(1).mean() - listwise.mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "x": jax.random.normal(a, (batch, items, dim)),
            "gain": jax.random.randint(b, (batch, items), 0, 5).astype(float),
        }

    return trained(init, loss, sample)
