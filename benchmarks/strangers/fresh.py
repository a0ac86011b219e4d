"""Programs that were written after prices were set: none of them was looked at, and no price was mended by one."""

import math

import jax
import jax.numpy as jnp
import optax

from strangers import Program, Tree, stranger, trained

BF16, F32 = jnp.bfloat16, jnp.float32


def _drawn(key: jax.Array, tree: Tree) -> Tree:
    """A normal array, scaled by what it reads, in the place of every shape."""
    shapes, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(key, len(shapes))
    scale = lambda shape: 1 / math.sqrt(math.prod(shape[:-1]) if len(shape) == 4 else shape[0])
    return structure.unflatten(
        [scale(shape) * jax.random.normal(k, shape) for k, shape in zip(keys, shapes, strict=True)]
    )


def _norm(x: jax.Array) -> jax.Array:
    y = x.astype(F32)
    return (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def _attention(p: Tree, x: jax.Array, heads: int, **options: Tree) -> jax.Array:
    q, k, v = jnp.split(x @ p["qkv"], 3, -1)
    cut = lambda t: t.reshape(*t.shape[:2], heads, -1)
    return jax.nn.dot_product_attention(cut(q), cut(k), cut(v), **options).reshape(x.shape) @ p["out"]


def _block(p: Tree, x: jax.Array, heads: int, **options: Tree) -> jax.Array:
    x = x + _attention(p, _norm(x), heads, **options)
    return x + jax.nn.gelu(_norm(x) @ p["up"]) @ p["down"]


def _block_shapes(dim: int) -> Tree:
    return {"qkv": (dim, 3 * dim), "out": (dim, dim), "up": (dim, 4 * dim), "down": (4 * dim, dim)}


def _picked(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits.astype(F32)), tokens[..., None], -1)[..., 0]


@stranger(
    {"points": 64, "levels": 2, "rows": 64, "width": 16}, points=262144, levels=12, rows=524288, width=64, fresh=True
)
def hash_grid(points: int, levels: int, rows: int, width: int) -> Program:
    """An image or volume by a hash grid: eight corners looked up at each level, blended, and a small network."""
    primes = jnp.array([1, 2654435761, 805459861], jnp.uint32)
    corners = jnp.stack(jnp.meshgrid(*[jnp.arange(2)] * 3, indexing="ij"), -1).reshape(8, 3)

    def init(key: jax.Array) -> Tree:
        sizes = {"net": [(2 * levels, width), (width, width), (width, 4)]}
        return {"tables": jnp.full((levels, rows, 2), 1e-4), **_drawn(key, sizes)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        features = []
        for level in range(levels):
            place = batch["x"] * int(16 * 1.4**level)
            low = jnp.floor(place)
            cells = low.astype(jnp.uint32)[:, None] + corners.astype(jnp.uint32)
            hashed = jnp.bitwise_xor(cells[..., 0] * primes[0], cells[..., 1] * primes[1]) ^ (cells[..., 2] * primes[2])
            part = (place - low)[:, None]
            weight = jnp.where(corners == 1, part, 1 - part).prod(-1)
            features.append((params["tables"][level][hashed % rows] * weight[..., None]).sum(1))
        y = jnp.concatenate(features, -1)
        for w in params["net"][:-1]:
            y = jax.nn.relu(y @ w)
        return ((y @ params["net"][-1] - batch["y"]) ** 2).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.uniform(a, (points, 3)), "y": jax.random.normal(b, (points, 4))}

    return trained(init, loss, sample, optax.adam(1e-2, eps=1e-15))


@stranger(
    {"batch": 8, "seq": 16, "dim": 32, "layers": 1, "vocab": 64},
    batch=32,
    seq=512,
    dim=768,
    layers=4,
    vocab=30592,
    fresh=True,
)
def distilled_encoder(batch: int, seq: int, dim: int, layers: int, vocab: int) -> Program:
    """A student half as deep learns from a frozen teacher's softened words and hidden states."""

    def init(key: jax.Array) -> Tree:
        shapes = lambda depth: {"embed": (vocab, dim), "blocks": [_block_shapes(dim)] * depth}
        return _drawn(key, shapes(layers))

    def run(params: Tree, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        x = params["embed"][tokens] * math.sqrt(dim)
        for p in params["blocks"]:
            x = _block(p, x, max(dim // 64, 1))
        return x, _norm(x) @ params["embed"].T

    def loss(params: Tree, batch: Tree) -> jax.Array:
        hidden, logits = run(params, batch["tokens"])
        teacher, wise = jax.lax.stop_gradient(run(batch["teacher"], batch["tokens"]))
        soft = jax.nn.softmax(wise.astype(F32) / 2)
        words = -(soft * jax.nn.log_softmax(logits.astype(F32) / 2)).sum(-1).mean()
        return 4 * words + optax.cosine_distance(hidden.astype(F32), teacher.astype(F32)).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        teacher = {"embed": (vocab, dim), "blocks": [_block_shapes(dim)] * (2 * layers)}
        return {"tokens": jax.random.randint(a, (batch, seq), 0, vocab), "teacher": _drawn(b, teacher)}

    return trained(init, loss, sample)


@stranger({"batch": 8, "seq": 6, "dim": 16, "vocab": 64}, batch=64, seq=40, dim=1024, vocab=16384, fresh=True)
def attentive_translator(batch: int, seq: int, dim: int, vocab: int) -> Program:
    """Translation before transformers: a bidirectional GRU reads, a GRU that attends at each step writes."""

    def init(key: jax.Array) -> Tree:
        cell = lambda size: {"x": (size, 3 * dim), "h": (dim, 3 * dim)}
        shapes = {"source": (vocab, dim), "target": (vocab, dim), "forth": cell(dim), "back": cell(dim)}
        shapes |= {"write": cell(3 * dim), "query": (dim, dim), "keys": (2 * dim, dim), "mix": (dim, 1)}
        return _drawn(key, {**shapes, "words": (dim, vocab)})

    def gru(p: Tree, h: jax.Array, x: jax.Array) -> jax.Array:
        a, b = jnp.split(x @ p["x"], 3, -1), jnp.split(h @ p["h"], 3, -1)
        reset, update = jax.nn.sigmoid(a[0] + b[0]), jax.nn.sigmoid(a[1] + b[1])
        return (1 - update) * jnp.tanh(a[2] + reset * b[2]) + update * h

    def loss(params: Tree, batch: Tree) -> jax.Array:
        zero = jnp.zeros((batch["source"].shape[0], dim))
        x = params["source"][batch["source"]].swapaxes(0, 1)
        read = lambda p, reverse: jax.lax.scan(lambda h, x: (gru(p, h, x),) * 2, zero, x, reverse=reverse)[1]
        states = jnp.concatenate([read(params["forth"], False), read(params["back"], True)], -1).swapaxes(0, 1)
        keys = states @ params["keys"]

        def write(h: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            scores = jnp.tanh(keys + (h @ params["query"])[:, None]) @ params["mix"]
            seen = (jax.nn.softmax(scores, 1) * states).sum(1)
            h = gru(params["write"], h, jnp.concatenate([x, seen], -1))
            return h, h

        _, hs = jax.lax.scan(write, zero, params["target"][batch["target"][:, :-1]].swapaxes(0, 1))
        return -_picked((hs @ params["words"]).swapaxes(0, 1), batch["target"][:, 1:]).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        words = lambda k, length: jax.random.randint(k, (batch, length), 0, vocab)
        return {"source": words(a, seq), "target": words(b, seq + 1)}

    return trained(init, loss, sample, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))


@stranger({"batch": 8, "patches": 16, "dim": 32, "depth": 1}, batch=128, patches=196, dim=1024, depth=6, fresh=True)
def masked_autoencoder(batch: int, patches: int, dim: int, depth: int) -> Program:
    """A vision transformer sees a quarter of the patches, shuffled by sorted noise, and a small one paints the rest."""
    kept, small = patches // 4, dim // 2

    def init(key: jax.Array) -> Tree:
        shapes = {"patch": (768, dim), "place": (patches, dim), "blocks": [_block_shapes(dim)] * depth}
        shapes |= {"down": (dim, small), "mask": (1, small), "place2": (patches, small), "paint": (small, 768)}
        return _drawn(key, {**shapes, "decoder": [_block_shapes(small)] * 2})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        image = batch["patches"].astype(BF16)
        order = jnp.argsort(batch["noise"], 1)
        seen = jnp.take_along_axis(image @ params["patch"] + params["place"], order[:, :kept, None], 1)
        for p in params["blocks"]:
            seen = _block(p, seen, max(dim // 64, 1))
        x = _norm(seen) @ params["down"]
        x = jnp.concatenate([x, jnp.broadcast_to(params["mask"], (*x.shape[:1], patches - kept, small))], 1)
        x = jnp.take_along_axis(x, jnp.argsort(order, 1)[..., None], 1) + params["place2"]
        for p in params["decoder"]:
            x = _block(p, x, max(small // 64, 1))
        error = ((_norm(x) @ params["paint"]).astype(F32) - jax.nn.standardize(batch["patches"])) ** 2
        return (error.mean(-1) * (jnp.argsort(order, 1) >= kept)).sum() / (patches - kept)

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "patches": jax.random.normal(a, (batch, patches, 768)),
            "noise": jax.random.uniform(b, (batch, patches)),
        }

    return trained(init, loss, sample, optax.adamw(1e-4, b2=0.95))


@stranger({"batch": 8, "side": 16, "width": 8}, batch=128, side=64, width=64, fresh=True)
def image_vae(batch: int, side: int, width: int) -> Program:
    """A variational autoencoder: strided convolutions down, transposed ones up, a drawn code, two losses."""
    widths = [width, 2 * width, 4 * width]
    flat = (side // 8) ** 2 * 4 * width
    dims = ("NHWC", "HWIO", "NHWC")

    def init(key: jax.Array) -> Tree:
        down = [(4, 4, i, o) for i, o in zip([3, *widths], widths, strict=False)]
        up = [(4, 4, o, i) for i, o in zip([3, *widths], widths, strict=False)][::-1]
        return _drawn(key, {"down": down, "up": up, "code": (flat, 256), "back": (128, flat)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = batch["image"]
        for w in params["down"]:
            x = jax.nn.silu(jax.lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=dims))
        mean, log_scale = jnp.split(x.reshape(x.shape[0], -1) @ params["code"], 2, -1)
        code = mean + jnp.exp(log_scale) * batch["noise"]
        y = jax.nn.silu(code @ params["back"]).reshape(x.shape)
        for number, w in enumerate(params["up"]):
            y = jax.lax.conv_transpose(y, w, (2, 2), "SAME", dimension_numbers=dims)
            y = jax.nn.silu(y) if number < 2 else y
        divergence = 0.5 * (jnp.exp(2 * log_scale) + mean**2 - 1 - 2 * log_scale).sum(-1)
        return ((y - batch["image"]) ** 2).sum((1, 2, 3)).mean() + divergence.mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"image": jax.random.normal(a, (batch, side, side, 3)), "noise": jax.random.normal(b, (batch, 128))}

    return trained(init, loss, sample, optax.adam(1e-3))


@stranger({"batch": 8, "dim": 16, "rounds": 4}, batch=8192, dim=1024, rounds=24, fresh=True)
def deep_equilibrium(batch: int, dim: int, rounds: int) -> Program:
    """A layer repeated until it settles; its gradient solves a second fixed point instead of going back."""

    def cell(params: Tree, z: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(z @ params["w"] + x + params["b"])

    def repeated(function: Tree, start: jax.Array) -> jax.Array:
        far = lambda state: (state[2] < rounds) & (jnp.abs(state[1] - state[0]).max() > -1.0)
        again = lambda state: (state[1], function(state[1]), state[2] + 1)
        return jax.lax.while_loop(far, again, (start, function(start), 1))[1]

    @jax.custom_vjp
    def settled(params: Tree, x: jax.Array) -> jax.Array:
        return repeated(lambda z: cell(params, z, x), jnp.zeros_like(x))

    def forth(params: Tree, x: jax.Array) -> tuple[jax.Array, Tree]:
        z = settled(params, x)
        return z, (params, x, z)

    def back(saved: Tree, slope: jax.Array) -> tuple[Tree, jax.Array]:
        params, x, z = saved
        _, by_state = jax.vjp(lambda z: cell(params, z, x), z)
        u = repeated(lambda u: slope + by_state(u)[0], slope)
        return jax.vjp(lambda params, x: cell(params, z, x), params, x)[1](u)

    settled.defvjp(forth, back)

    def init(key: jax.Array) -> Tree:
        shapes = {"in": (dim // 2, dim), "cell": {"w": (dim, dim), "b": (dim,)}, "out": (dim, 10)}
        return jax.tree.map(lambda w: 0.5 * w, _drawn(key, shapes))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        z = settled(params["cell"], batch["x"] @ params["in"])
        return optax.softmax_cross_entropy_with_integer_labels(z @ params["out"], batch["y"]).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {"x": jax.random.normal(a, (batch, dim // 2)), "y": jax.random.randint(b, (batch,), 0, 10)}

    return trained(init, loss, sample)


@stranger({"batch": 8, "columns": 4, "dim": 16, "layers": 1}, batch=8192, columns=32, dim=192, layers=3, fresh=True)
def tabular_transformer(batch: int, columns: int, dim: int, layers: int) -> Program:
    """Tables: every column a token, numbers scaled into vectors and categories looked up, attention over columns."""

    def init(key: jax.Array) -> Tree:
        shapes = {"scale": (columns, dim), "shift": (columns, dim), "kinds": (columns * 100, dim), "first": (1, dim)}
        return _drawn(key, {**shapes, "blocks": [_block_shapes(dim)] * layers, "out": (dim, 2)})

    def loss(params: Tree, batch: Tree) -> jax.Array:
        numbers = batch["numbers"][..., None] * params["scale"] + params["shift"]
        kinds = params["kinds"][batch["kinds"] + 100 * jnp.arange(columns)]
        first = jnp.broadcast_to(params["first"], (numbers.shape[0], 1, dim))
        x = jnp.concatenate([first, numbers, kinds], 1)
        for p in params["blocks"]:
            x = _block(p, x, 8)
        return optax.softmax_cross_entropy_with_integer_labels(_norm(x[:, 0]) @ params["out"], batch["y"]).mean()

    def sample(key: jax.Array) -> Tree:
        a, b, c = jax.random.split(key, 3)
        return {
            "numbers": jax.random.normal(a, (batch, columns)),
            "kinds": jax.random.randint(b, (batch, columns), 0, 100),
            "y": jax.random.randint(c, (batch,), 0, 2),
        }

    return trained(init, loss, sample)


@stranger({"batch": 16, "vocab": 64, "dim": 8, "drawn": 4}, batch=131072, vocab=1000000, dim=128, drawn=10, fresh=True)
def skip_gram(batch: int, vocab: int, dim: int, drawn: int) -> Program:
    """Word vectors: a word against one neighbour and ten drawn at random, two large tables, plain descent."""

    def init(key: jax.Array) -> Tree:
        return {"words": 0.01 * jax.random.normal(key, (vocab, dim)), "near": jnp.zeros((vocab, dim))}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        word, near = params["words"][batch["word"]], params["near"][batch["near"]]
        others = params["near"][batch["others"]]
        right = jax.nn.log_sigmoid((word * near).sum(-1))
        wrong = jax.nn.log_sigmoid(-jnp.einsum("bd,bkd->bk", word, others)).sum(-1)
        return -(right + wrong).mean()

    def sample(key: jax.Array) -> Tree:
        often = lambda k, *shape: (vocab * jax.random.uniform(k, shape) ** 3).astype(int)
        a, b, c = jax.random.split(key, 3)
        return {"word": often(a, batch), "near": often(b, batch), "others": often(c, batch, drawn)}

    return trained(init, loss, sample, optax.sgd(0.5))


@stranger({"batch": 8, "side": 16, "width": 8}, batch=16, side=512, width=64, fresh=True)
def segmentation(batch: int, side: int, width: int) -> Program:
    """Streets by pixel: convolutions down, windows with holes, an upsampled map beside early features, Dice's loss."""
    dims = ("NHWC", "HWIO", "NHWC")

    def init(key: jax.Array) -> Tree:
        shapes = {"stem": (3, 3, 3, width), "one": (3, 3, width, 2 * width), "two": (3, 3, 2 * width, 4 * width)}
        wide = [(3, 3, 4 * width, 4 * width)] * 3
        return _drawn(
            key, {**shapes, "wide": wide, "fuse": (1, 1, 14 * width, 4 * width), "out": (1, 1, 4 * width, 19)}
        )

    def conv(x: jax.Array, w: jax.Array, stride: int = 1, holes: int = 1) -> jax.Array:
        x = jax.lax.conv_general_dilated(
            x, w.astype(BF16), (stride,) * 2, "SAME", rhs_dilation=(holes,) * 2, dimension_numbers=dims
        )
        return jax.nn.relu(jax.nn.standardize(x, axis=(0, 1, 2)))

    def loss(params: Tree, batch: Tree) -> jax.Array:
        x = conv(batch["image"].astype(BF16), params["stem"], 2)
        early = conv(x, params["one"], 2)
        x = conv(early, params["two"], 2)
        wide = [conv(x, w, 1, holes) for w, holes in zip(params["wide"], (1, 2, 4), strict=True)]
        x = jnp.concatenate(wide, -1)
        x = jax.image.resize(x, (*early.shape[:3], x.shape[-1]), "bilinear")
        x = conv(jnp.concatenate([x, early], -1), params["fuse"])
        logits = jax.lax.conv_general_dilated(x, params["out"].astype(BF16), (1, 1), "SAME", dimension_numbers=dims)
        chances = jax.nn.softmax(logits.astype(F32))
        truth = jax.nn.one_hot(batch["label"], 19)
        common = 2 * (chances * truth).sum((1, 2)) + 1
        dice = 1 - (common / ((chances + truth).sum((1, 2)) + 1)).mean()
        return dice - (truth * jnp.log(chances + 1e-6)).sum(-1).mean()

    def sample(key: jax.Array) -> Tree:
        a, b = jax.random.split(key)
        return {
            "image": jax.random.normal(a, (batch, side, side, 3)),
            "label": jax.random.randint(b, (batch, side // 4, side // 4), 0, 19),
        }

    return trained(init, loss, sample, optax.sgd(0.01, 0.9, nesterov=True))


@stranger(
    {"groups": 2, "size": 4, "seq": 16, "dim": 32, "layers": 2, "vocab": 64},
    groups=4,
    size=8,
    seq=512,
    dim=1024,
    layers=8,
    vocab=32768,
    fresh=True,
)
def group_policy(groups: int, size: int, seq: int, dim: int, layers: int, vocab: int) -> Program:
    """Reinforcement of a language model: answers compared within groups, clipped ratios, near a frozen copy of it."""

    def run(params: Tree, tokens: jax.Array) -> jax.Array:
        params = jax.tree.map(lambda w: w.astype(BF16), params)

        @jax.checkpoint
        def layer(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
            return _block(p, x, max(dim // 64, 1), is_causal=True, implementation="xla"), None

        x, _ = jax.lax.scan(layer, params["embed"][tokens] * math.sqrt(dim), params["blocks"])
        return _picked((_norm(x) @ params["embed"].T)[:, :-1], tokens[:, 1:])

    def weights(key: jax.Array) -> Tree:
        blocks = [_drawn(k, _block_shapes(dim)) for k in jax.random.split(key, layers)]
        return {**_drawn(key, {"embed": (vocab, dim)}), "blocks": jax.tree.map(lambda *w: jnp.stack(w), *blocks)}

    def loss(params: Tree, batch: Tree) -> jax.Array:
        now, old = run(params, batch["tokens"]), batch["old"]
        frozen = jax.lax.stop_gradient(run(batch["frozen"], batch["tokens"]))
        reward = batch["reward"].reshape(groups, size)
        gain = ((reward - reward.mean(1, keepdims=True)) / (reward.std(1, keepdims=True) + 1e-4)).reshape(-1, 1)
        ratio = jnp.exp(now - old)
        policy = jnp.minimum(ratio * gain, ratio.clip(0.8, 1.2) * gain)
        near = jnp.exp(frozen - now) - (frozen - now) - 1
        return ((0.04 * near - policy) * batch["mask"]).sum() / batch["mask"].sum()

    def sample(key: jax.Array) -> Tree:
        a, b, c, d = jax.random.split(key, 4)
        count = groups * size
        return {
            "tokens": jax.random.randint(a, (count, seq), 0, vocab),
            "old": jnp.full((count, seq - 1), -10.0),
            "mask": jax.random.bernoulli(b, 0.7, (count, seq - 1)).astype(F32),
            "reward": jax.random.normal(c, (count,)),
            "frozen": weights(d),
        }

    return trained(weights, loss, sample, optax.adamw(1e-6))
