"""Functions that try to make microbatches differ from the whole batch, for `test_microbatch_attacks.py`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

B = 8  # as many examples as some parameters have entries, so that sizes alone say nothing


def draw(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


P = {
    "w": draw(6, 6, seed=1),
    "v": draw(6, seed=2),
    "table": draw(10, 6, seed=3),
    "each": draw(B, seed=4),
    "square": draw(B, B, seed=5),
    "n": np.int32(3),
    "inf": np.float32(np.inf),
}
X = draw(B, 6, seed=6)
SPECIAL = X.copy()
SPECIAL[1, 2], SPECIAL[5, 0], SPECIAL[6, 1], SPECIAL[2, 3] = np.nan, np.inf, -np.inf, -0.0
BATCH = {
    "x": X,
    "i": np.array([3, 9, 0, 0, 7, 3, 2, 9], np.int32),
    "k": np.arange(B * 6, dtype=np.int32).reshape(B, 6) % 7 + 100,
    "u": (np.arange(B * 6).reshape(B, 6) * 37 % 251).astype(np.uint8),
    "m": np.arange(B * 6).reshape(B, 6) % 3 == 0,
    "z": SPECIAL,
    "image": draw(B, 4, 4, 2, seed=7),
    "h": np.array([6e4, -6e4] * (B // 2), np.float16),
    "key": jax.random.split(jax.random.key(7), B),
}


def loops(body, init, xs=None, length=None):
    return lax.scan(body, init, xs, length=length)[0]


def branching(p, b):
    return b["x"].sum() * (2.0 if b["x"].shape[0] > 4 else 3.0)


def unrolled(p, b):
    x = b["x"]
    for _ in range(x.shape[0] // 2):
        x = jnp.sin(x)
    return x.sum()


def asserted(p, b):
    assert b["x"].shape == (B, 6), "the function knows its batch"
    return (b["x"] @ p["w"]).sum()


def batch_norm(p, b):
    h = b["x"] @ p["w"]
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)


@jax.custom_vjp
def scaled(x, w):
    return x @ w


scaled.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, jnp.sign(saved[0].T @ g)))


@jax.custom_jvp
def by_size(x):
    return x * x.shape[0]


by_size.defjvp(lambda primals, tangents: (by_size(primals[0]), tangents[0] * primals[0].shape[0]))

ints = jnp.int32
POSITIONS = {
    "set the first": lambda p, b: b["x"].at[0].set(0.0),
    "set the last": lambda p, b: b["x"].at[-1].set(1.0).sum(),
    "set several": lambda p, b: b["x"].at[jnp.array([1, 6])].set(1.0),
    "set a range": lambda p, b: b["x"].at[2:5].set(1.0),
    "set a corner": lambda p, b: b["x"].at[0, 0].set(5.0),
    "set at the batch's own": lambda p, b: b["x"].at[b["i"]].set(0.0),
    "add to the first": lambda p, b: b["x"].at[0].add(1.0).sum(0),
    "multiply the second": lambda p, b: b["x"].at[1].mul(3.0),
    "max of the third": lambda p, b: b["x"].at[2].max(0.5),
    "min of the fourth": lambda p, b: b["x"].at[3].min(-0.5),
    "update a row": lambda p, b: lax.dynamic_update_slice(b["x"], p["v"][None], (3, 0)),
    "update at a computed row": lambda p, b: lax.dynamic_update_slice(b["x"], p["v"][None], (p["n"], 0)),
    "update beyond the end": lambda p, b: lax.dynamic_update_slice(b["x"], p["v"][None], (99, 0)),
    "slice at a computed row": lambda p, b: lax.dynamic_slice(b["x"], (p["n"], 0), (2, 6)),
    "one example": lambda p, b: b["x"][3],
    "one computed example": lambda p, b: b["x"][p["n"]],
    "every other example": lambda p, b: b["x"][::2].sum(0),
    "half of the examples": lambda p, b: b["x"][: B // 2].sum(),
    "half of the examples by size": lambda p, b: b["x"][: b["x"].shape[0] // 2].sum(),
    "picked examples": lambda p, b: b["x"][jnp.array([0, 1, 2, 3, 4, 5, 6, 7])],
    "labels at positions": lambda p, b: b["x"][jnp.arange(B), b["i"] % 6].sum(),
    "looked up in the batch": lambda p, b: b["x"][b["i"] % B],
    "reversed": lambda p, b: b["x"][::-1] * b["x"],
    "sorted": lambda p, b: jnp.sort(b["x"], axis=0),
    "argsort": lambda p, b: jnp.argsort(b["x"][:, 0]),
    "argmax": lambda p, b: jnp.argmax(b["x"], axis=0),
    "argmin of all": lambda p, b: jnp.argmin(b["x"]),
    "top": lambda p, b: lax.top_k(b["x"].T, 2),
    "cumulative sum": lambda p, b: jnp.cumsum(b["x"], axis=0),
    "cumulative product of sums": lambda p, b: jnp.cumprod(b["x"].sum(1)).sum(),
    "cumulative maximum": lambda p, b: lax.cummax(b["x"], axis=0),
    "rolled": lambda p, b: jnp.roll(b["x"], 1, axis=0) * b["x"],
    "next example": lambda p, b: (b["x"][1:] - b["x"][:-1]).sum(),
    "joined with itself": lambda p, b: jnp.concatenate([b["x"], -b["x"]]).max(0),
    "a class token in the batch": lambda p, b: jnp.concatenate([p["v"][None], b["x"]]) @ p["w"],
    "padded": lambda p, b: jnp.pad(b["x"], ((1, 0), (0, 0))).reshape(-1)[:: B + 1],
    "tiled": lambda p, b: jnp.tile(b["x"], (2, 1)),
    "repeated": lambda p, b: jnp.repeat(b["x"], 2, axis=0) * jnp.arange(2.0 * B)[:, None],
    "weights by position": lambda p, b: (b["x"].sum(1) * jnp.arange(B)).sum(),
    "weights by position, counted": lambda p, b: b["x"] * (jnp.arange(b["x"].shape[0])[:, None] + 1.0),
    "a mask by position": lambda p, b: jnp.where(jnp.arange(B)[:, None] < 3, b["x"], 0.0).sum(0),
    "a long chain from positions": lambda p, b: (
        b["x"] * jnp.sin(jnp.cos(lax.broadcasted_iota("f4", (B, 6), 0) * 3.0) + 1.0)
    ),
    "positions in groups": lambda p, b: b["x"] * (jnp.arange(B).reshape(2, 4) * 2.0).reshape(B, 1),
    "one-hot positions": lambda p, b: jnp.eye(B) @ b["x"],
    "lower triangle": lambda p, b: jnp.tril(p["square"]) @ b["x"],
    "position in a merged dim": lambda p, b: (b["x"].reshape(-1) * jnp.arange(B * 6.0)).sum(),
    "other grouping": lambda p, b: b["x"].reshape(6, B).sum(1),
    "grouped by halves": lambda p, b: b["x"].reshape(2, B // 2, 6).max(1),
    "grouped by neighbours": lambda p, b: b["x"].reshape(B // 2, 2, 6).prod(1),
    "transposed and merged": lambda p, b: (b["x"].T.reshape(-1) * jnp.arange(B * 6.0)).sum(),
    "parameters for each place": lambda p, b: ((b["x"] @ p["v"]) * p["each"] ** 2).sum(),
    "a square parameter": lambda p, b: p["square"] + b["x"].sum(1),
    "a square parameter across": lambda p, b: p["square"] * b["x"].sum(1)[:, None],
    "a window over examples": lambda p, b: lax.reduce_window(b["x"], -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"),
    "windows of pairs": lambda p, b: lax.reduce_window(b["x"], 0.0, lax.add, (2, 1), (2, 1), "VALID"),
    "Fourier over examples": lambda p, b: jnp.abs(jnp.fft.fft(b["x"], axis=0)),
    "all pairs": lambda p, b: (b["x"] @ b["x"].T).max(),
    "diagonal": lambda p, b: jnp.diagonal(p["square"]) * b["x"][:, 0],
    "trace of a product": lambda p, b: jnp.trace(b["x"][:, :6].T @ b["x"]),
    "examples as features of a convolution": lambda p, b: lax.conv_general_dilated(
        b["x"].T[None], draw(3, B, 2, seed=9), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "examples as pixels of a convolution": lambda p, b: lax.conv_general_dilated(
        b["x"][None], draw(3, 6, 2, seed=9), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "examples as groups of a convolution": lambda p, b: lax.conv_general_dilated(
        b["x"].T[None],
        draw(3, 1, B, seed=9),
        (1,),
        "SAME",
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=B,
    ),
}
PARAMETERS = {
    "power by size": lambda p, b: b["x"] ** b["x"].shape[0],
    "loop by size": lambda p, b: lax.fori_loop(0, b["x"].shape[0], lambda i, c: jnp.sin(c) + i, b["x"]),
    "loop by size, of a parameter": lambda p, b: (
        b["x"] * lax.fori_loop(0, b["x"].shape[0], lambda i, c: c * 1.5, p["v"])
    ),
    "scan length by size": lambda p, b: loops(lambda c, _: (c * 1.1, None), b["x"], length=b["x"].shape[0]),
    "a branch by size": branching,
    "unrolled by size": unrolled,
    "knows its size": asserted,
    "reshaped to a constant": lambda p, b: b["x"].reshape(B, 3, 2).sum(1),
    "divided by a size": lambda p, b: b["x"].sum() / b["x"].shape[0] ** 2,
    "exponent of half": lambda p, b: (b["x"] ** (b["x"].shape[0] // 2)).sum(0),
    "clipped by size": lambda p, b: jnp.clip(b["k"], 0, 13 * b["x"].shape[0]),
    "shifted by size": lambda p, b: b["k"] << b["x"].shape[0],
    "window by size": lambda p, b: lax.reduce_window(b["x"], 0.0, lax.add, (1, b["x"].shape[0] // 2), (1, 1), "VALID"),
    "top by size": lambda p, b: lax.top_k(b["x"], b["x"].shape[0] // 2),
    "rolled by size": lambda p, b: jnp.roll(b["x"], b["x"].shape[0] // 4, axis=1),
    "rounded by size": lambda p, b: jnp.round(b["x"], b["x"].shape[0] // 4),
    "dtype by size": lambda p, b: b["x"].astype("f4" if b["x"].shape[0] > 4 else "bfloat16") * 1.0,
    "array of the size": lambda p, b: jnp.linspace(0.0, 1.0, b["x"].shape[0]) @ b["x"],
    "constant array by size": lambda p, b: b["x"] * np.arange(b["x"].shape[0], dtype="f4")[:, None],
    "split keys by size": lambda p, b: (
        b["x"] * jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(0), b["x"].shape[0]))[:, None]
    ),
    "custom derivative by size": lambda p, b: jax.grad(lambda x: by_size(x).sum())(b["x"]),
}
SCATTERS = {
    "add to a parameter": lambda p, b: p["table"].at[b["i"]].add(b["x"]),
    "subtract from a parameter": lambda p, b: p["table"].at[b["i"]].subtract(b["x"]),
    "multiply a parameter": lambda p, b: p["table"].at[b["i"]].mul(b["x"]),
    "multiply one place": lambda p, b: p["v"].at[2].mul(b["x"].sum()),
    "maximum with a parameter": lambda p, b: p["table"].at[b["i"]].max(b["x"]),
    "minimum with a parameter": lambda p, b: p["table"].at[b["i"]].min(b["z"]),
    "set in a parameter": lambda p, b: p["table"].at[b["i"]].set(b["x"]),
    "add to ones": lambda p, b: jnp.ones((10, 6)).at[b["i"]].add(b["x"]),
    "add to zeros": lambda p, b: jnp.zeros((10, 6)).at[b["i"]].add(b["x"]),
    "add to the batch": lambda p, b: b["x"].at[b["i"] % B].add(b["x"]),
    "count": lambda p, b: jnp.zeros(10, ints).at[b["i"]].add(1),
    "bin count": lambda p, b: jnp.bincount(b["i"], length=10),
    "segment sums": lambda p, b: jax.ops.segment_sum(b["x"], b["i"], 10),
    "segment maxima": lambda p, b: jax.ops.segment_max(b["x"], b["i"], 10),
    "segment products": lambda p, b: jax.ops.segment_prod(b["x"], b["i"], 10),
    "set in every example": lambda p, b: b["x"].at[:, 2].set(0.0),
    "set in each example its own": lambda p, b: jax.vmap(lambda x, i: x.at[i].set(9.0))(b["x"], b["i"] % 6),
    "set a parameter's value": lambda p, b: b["x"].at[:, 1].set(p["each"]),
    "update a column": lambda p, b: lax.dynamic_update_slice(b["x"], p["each"][:, None], (0, p["n"])),
    "slice a column": lambda p, b: lax.dynamic_slice(b["x"], (5, p["n"]), (B, 2)),
    "picked columns": lambda p, b: b["x"][:, jnp.array([4, 0, 0])],
    "slope of a look-up": lambda p, b: jax.grad(lambda t: (t[b["i"]] * b["x"]).sum())(p["table"]),
    "slope of a look-up that is scaled": lambda p, b: jax.grad(lambda t: jnp.exp(t)[b["i"]].sum())(p["table"]),
}
CONVERSIONS = {
    "to integers": lambda p, b: b["x"].sum().astype(ints),
    "to integers in a checkpoint": lambda p, b: jax.checkpoint(lambda x: (x * 3.3).sum(0).astype(ints))(b["x"]),
    "to integers in a loop": lambda p, b: loops(
        lambda c, w: (c + (b["x"] @ w).sum().astype(ints), None), jnp.int32(0), p["w"]
    ),
    "to integers and stacked": lambda p, b: lax.scan(lambda c, w: (c, (b["x"] @ w).sum().astype(ints)), 0.0, p["w"])[1],
    "wide sums of narrow products": lambda p, b: jax.checkpoint(lambda u: u.sum(0, dtype="u1").astype(ints))(b["u"]),
    "wrapping sums": lambda p, b: b["u"].sum(0, dtype="u1"),
    "wrapping products": lambda p, b: jnp.prod(b["k"], axis=0),
    "wrapping products of bytes": lambda p, b: jnp.prod(b["u"] | 1, axis=0, dtype="u1"),
    "narrowed": lambda p, b: jax.checkpoint(lambda k: k.sum(0).astype("i1"))(b["k"]),
    "divided integers": lambda p, b: jax.checkpoint(lambda k: k.sum(0) // 7)(b["k"]),
    "divided integers by lax": lambda p, b: jax.checkpoint(lambda k: lax.div(k.sum(0), 7))(b["k"]),
    "remainders": lambda p, b: jax.checkpoint(lambda k: k.sum(0) % 7)(b["k"]),
    "integers to floats": lambda p, b: jax.checkpoint(lambda k: (k * 10**7).sum(0).astype("f4"))(b["k"]),
    "to float8": lambda p, b: jax.checkpoint(lambda x: x.sum(0).astype("float8_e4m3fn"))(b["x"]).astype("f4"),
    "float8 sums": lambda p, b: lax.reduce(
        b["x"].astype("float8_e5m2"), jnp.array(0, "float8_e5m2"), lax.add, (0,)
    ).astype("f4"),
    "floats to booleans": lambda p, b: jax.checkpoint(lambda x: x.sum(0).astype(bool))(b["x"]),
    "complex to real": lambda p, b: jax.checkpoint(lambda x: jnp.abs((x * 1j).sum(0)))(b["x"]),
    "rounded sums": lambda p, b: jax.checkpoint(lambda x: jnp.round(x.sum(0)))(b["x"]),
    "multiplied by infinity": lambda p, b: jax.checkpoint(lambda x: x.sum(0) * p["inf"])(b["x"]),
    "divided by nothing": lambda p, b: jax.checkpoint(lambda x: x.sum(0) / (p["inf"] * 0 + p["n"] - 3))(b["x"]),
    "divided by literal nothing": lambda p, b: jax.checkpoint(lambda x: x.sum(0) / 0.0)(b["x"]),
    "bitwise and": lambda p, b: lax.reduce_and(b["k"], (0,)),
    "bitwise or": lambda p, b: lax.reduce_or(b["k"], (0,)),
    "bitwise xor": lambda p, b: lax.reduce_xor(b["k"], (0,)),
    "products of bits": lambda p, b: (b["m"].astype("i1").T @ b["m"].astype("i1")).astype(ints),
    "sums that overflow in parts": lambda p, b: b["h"].sum(dtype="f2"),
    "products that overflow in parts": lambda p, b: b["h"] @ jnp.ones(B, "f2"),
    "sums that overflow in a checkpoint": lambda p, b: jax.checkpoint(lambda h: lax.reduce_sum(h, (0,)))(b["h"]),
    "halves of sums in a checkpoint": lambda p, b: jax.checkpoint(lambda h: h.astype("f4").sum().astype("f2"))(b["h"]),
    "float products that overflow": lambda p, b: jnp.prod(jnp.where(b["h"] > 0, 1e30, 1e-30)),
    "half sums": lambda p, b: b["x"].astype("f2").sum(0, dtype="f2").astype("f4").round(1),
}
NESTED = {
    "position in a checkpoint": lambda p, b: jax.checkpoint(lambda x: x.at[0].set(0.0) ** 2)(b["x"]),
    "position weights in a checkpoint": lambda p, b: jax.checkpoint(lambda x: (x * jnp.arange(B)[:, None]).sum(0))(
        b["x"]
    ),
    "position weights in a loop": lambda p, b: loops(
        lambda c, w: (c + (b["x"] @ w) * jnp.arange(B), None), jnp.zeros(B), p["w"]
    ),
    "a parameter for each place in a loop": lambda p, b: loops(
        lambda c, w: (c + (b["x"] @ w) * p["each"], None), jnp.zeros(B), p["w"]
    ),
    "a stacked parameter for each place": lambda p, b: loops(
        lambda c, e: (c * e + b["x"][:, 0], None), jnp.ones(B), p["square"]
    ),
    "a carried parameter for each place": lambda p, b: lax.scan(
        lambda c, w: ((c[0] + c[1] * (b["x"] @ w), c[1] * 1.5), None), (jnp.zeros(B), p["each"]), p["w"]
    )[0],
    "a carry that begins with a parameter": lambda p, b: loops(
        lambda c, w: (jnp.sin(c) + b["x"] @ w, None), p["each"], p["w"]
    ),
    "a carry that forgets": lambda p, b: loops(lambda c, w: (jnp.where(w[0] > 0, c, 1.0), None), b["x"], p["w"]),
    "a sum that is replaced": lambda p, b: lax.scan(lambda c, w: ((b["x"].sum(), c[0]), None), (0.0, 0.0), jnp.ones(1))[
        0
    ],
    "a sum that is reset": lambda p, b: lax.scan(
        lambda c, w: ((c[1], w), c[0] + (b["x"] * w).sum()), (0.0, 0.0), p["v"]
    ),
    "sums in a loop": lambda p, b: loops(lambda c, w: (c + (b["x"] @ w).sum(), None), 0.0, p["w"]),
    "sums in a loop that begins at one": lambda p, b: loops(lambda c, w: (c + (b["x"] @ w).sum(), None), 1.0, p["w"]),
    "sums squared in a loop": lambda p, b: loops(lambda c, w: (c + (b["x"] @ w).sum() ** 2, None), 0.0, p["w"]),
    "sums halved in a loop": lambda p, b: loops(lambda c, w: (0.5 * c + (b["x"] @ w).sum(), None), 0.0, p["w"]),
    "sums and a constant in a loop": lambda p, b: loops(lambda c, w: (c + (b["x"] @ w).sum() + 1.0, None), 0.0, p["w"]),
    "maxima in a loop": lambda p, b: loops(lambda c, w: (jnp.maximum(c, (b["x"] @ w).max()), None), -jnp.inf, p["w"]),
    "maxima stacked in a loop": lambda p, b: lax.scan(lambda c, w: (c, (b["z"] @ w).max()), 0.0, p["w"])[1],
    "a loop over examples": lambda p, b: loops(lambda c, x: (jnp.tanh(c @ p["w"] + x), None), p["v"], b["x"]),
    "a map over examples": lambda p, b: lax.map(lambda x: x @ p["w"], b["x"]),
    "examples one by one": lambda p, b: lax.fori_loop(0, B, lambda i, c: c + b["x"][i] * i, p["v"]),
    "a branch": lambda p, b: lax.cond(p["n"] > 2, lambda x: x * 2, lambda x: x.at[0].set(0.0), b["x"]),
    "a branch by a sum": lambda p, b: lax.cond(b["x"].sum() > 0, lambda v: v * 2, lambda v: v, p["v"]),
    "a branch over examples by a sum": lambda p, b: lax.cond(b["x"].sum() > 0, jnp.sin, jnp.cos, b["x"]),
    "a while": lambda p, b: lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (b["x"], 0))[0],
    "a while until all": lambda p, b: lax.while_loop(lambda x: jnp.any(x < 9), lambda x: x * x + 1, b["x"]),
    "a derivative of its own": lambda p, b: jax.grad(lambda w: scaled(b["x"], w).sum())(p["w"]),
    "a derivative of its own in a loop": lambda p, b: jax.grad(
        lambda w: loops(lambda c, _: (jnp.tanh(scaled(c, w)), None), b["x"], length=2).sum()
    )(p["w"]),
    "a vmapped look-up": lambda p, b: jax.vmap(lambda i: lax.dynamic_slice(p["v"], (i,), (3,)))(b["i"]),
    "nested checkpoints": lambda p, b: jax.grad(
        lambda w: jax.checkpoint(lambda x: jax.checkpoint(lambda y: jnp.sin(y @ w))(x).sum())(b["x"])
    )(p["w"]),
    "batch norm in a checkpoint": lambda p, b: jax.checkpoint(batch_norm)(p, b),
    "jitted": lambda p, b: jax.jit(lambda x: x.at[0].multiply(2.0))(b["x"]),
    "solved": lambda p, b: jnp.linalg.solve(p["w"] @ p["w"].T + 9 * jnp.eye(6), b["x"].T),
    "solved by the batch": lambda p, b: jnp.linalg.solve(b["x"].T @ b["x"] + jnp.eye(6), p["v"]),
    "decomposed": lambda p, b: jnp.abs(jnp.linalg.qr(b["x"])[1]),
    "inverse of each": lambda p, b: jnp.linalg.inv(b["image"][:, :2, :2, 0] + 5 * jnp.eye(2)),
}
WHOLE_BATCH = {
    "batch norm": batch_norm,
    "softmax over examples": lambda p, b: jax.nn.softmax(b["x"] @ p["w"], axis=0),
    "normalised": lambda p, b: b["x"] / jnp.linalg.norm(b["x"]),
    "centred": lambda p, b: (b["x"] - b["x"].mean(0)) ** 2,
    "variance": lambda p, b: jnp.var(b["x"] @ p["w"], axis=0),
    "contrastive": lambda p, b: jax.nn.log_softmax(b["x"] @ b["x"].T).trace(),
    "median": lambda p, b: jnp.median(b["x"], axis=0),
    "unmasked mean": lambda p, b: jnp.where(b["m"], b["x"], 0).sum() / b["m"].sum(),
    "slope of an unmasked mean": lambda p, b: jax.grad(lambda w: jnp.where(b["m"], b["x"] @ w, 0).sum() / b["m"].sum())(
        p["w"]
    ),
    "logsumexp": lambda p, b: jax.nn.logsumexp(b["x"], axis=0),
    "ranks": lambda p, b: (b["x"][:, :1] > b["x"][:, 0]).sum(1),
}
NOT_FINITE = {
    "largest": lambda p, b: b["z"].max(0),
    "smallest": lambda p, b: b["z"].min(0),
    "sums": lambda p, b: b["z"].sum(0),
    "products": lambda p, b: b["z"].prod(0),
    "any": lambda p, b: jnp.any(b["z"] > 2, axis=0),
    "all finite": lambda p, b: jnp.all(jnp.isfinite(b["z"])),
    "largest of all": lambda p, b: jnp.nanmax(b["z"]),
    "signs": lambda p, b: jnp.signbit(jnp.nan_to_num(b["z"] * -1.0)),
    "sign of zeros": lambda p, b: 1.0 / jnp.where(b["z"] > 0, -0.0, 0.0),
    "means": lambda p, b: jnp.nanmean(b["z"], axis=0),
    "largest of halves": lambda p, b: b["z"].astype("bfloat16").max(0).astype("f4"),
    "largest complex": lambda p, b: jnp.max(b["x"] + 1j * b["z"], axis=0),
    "maximum of nothing": lambda p, b: jnp.max(b["x"], axis=0, where=b["x"] > 99, initial=-1.0),
}
RANDOM = {
    "noise on parameters": lambda p, b: b["x"] @ (p["w"] + jax.random.normal(jax.random.key(1), (6, 6))),
    "a permutation": lambda p, b: b["x"][jax.random.permutation(jax.random.key(1), B)],
    "a permutation of parameters": lambda p, b: b["x"] * jax.random.permutation(jax.random.key(1), p["each"])[:, None],
    "keys for examples": lambda p, b: jax.vmap(lambda k, x: jax.random.uniform(k) * x)(
        jax.random.split(jax.random.key(2), B), b["x"]
    ),
    "keys in the batch": lambda p, b: jax.vmap(lambda k, x: jax.random.normal(k, (6,)) * x)(b["key"], b["x"]),
    "a gamma for each example": lambda p, b: jax.random.gamma(jax.random.key(1), jnp.abs(b["x"])),
    "noise that is counted": lambda p, b: [
        (noise * b["x"]).sum() / noise.sum() for noise in [jax.random.uniform(jax.random.key(4), (B, 6))]
    ],
    "noise that is drawn again": lambda p, b: [
        (b["x"] * jax.random.uniform(jax.random.key(4), (B, 6))).sum(0),
        jax.random.uniform(jax.random.key(4), (B, 6)).sum(0),
    ],
    "noise along both dims": lambda p, b: [
        part
        for noise in [jax.random.uniform(jax.random.key(4), (B, B))]
        for part in (noise * b["x"][:, :1], noise * b["x"][:, 0])
    ],
    "sorted noise": lambda p, b: b["x"] * jnp.sort(jax.random.uniform(jax.random.key(4), (B, 1)), axis=0),
    "bits of examples' own": lambda p, b: jax.vmap(lambda i: jax.random.bits(jax.random.key(i)))(b["i"]),
    "a parameter of the noise's size": lambda p, b: b["x"].sum(1) + jax.random.normal(jax.random.key(3), (B,)).sum(),
}
GROUPS = {
    "positions": POSITIONS,
    "parameters": PARAMETERS,
    "scatters": SCATTERS,
    "conversions": CONVERSIONS,
    "nested": NESTED,
    "whole batch": WHOLE_BATCH,
    "not finite": NOT_FINITE,
    "random": RANDOM,
}
ATTACKS = [(group, name) for group, attacks in GROUPS.items() for name in attacks]
# All others must be cut. These mix examples, know their positions, or compute with sums that only all parts tell.
REFUSED = {
    "positions": [*list(POSITIONS)[: list(POSITIONS).index("repeated")], "other grouping", "transposed and merged"]
    + ["grouped by halves"]
    + ["a window over examples", "Fourier over examples", "all pairs"]
    + [f"examples as {what} of a convolution" for what in ("pixels", "groups")],
    "scatters": [f"{what} a parameter" for what in ("add to", "subtract from", "multiply", "set in")]
    + ["add to ones", "add to the batch", "segment products"],
    "conversions": [
        *list(CONVERSIONS)[1:5],
        *list(CONVERSIONS)[list(CONVERSIONS).index("narrowed") : list(CONVERSIONS).index("bitwise and")],
        *(
            "bitwise and",
            "bitwise or",
            "bitwise xor",
            "float products that overflow",
            "sums that overflow in a checkpoint",
        ),
        "halves of sums in a checkpoint",
    ],
    "nested": ["position in a checkpoint", "a sum that is replaced", "a sum that is reset", "maxima in a loop"]
    + [name for name in NESTED if name.startswith("sums") and name != "sums in a loop"]
    + ["a loop over examples", "a map over examples", "examples one by one", "a branch", "a while", "decomposed"]
    + ["a branch over examples by a sum", "a while until all", "a derivative of its own in a loop", "jitted"]
    + ["batch norm in a checkpoint"],
    "whole batch": ["batch norm", "softmax over examples", "variance", "contrastive", "median", "ranks"],
    "not finite": ["products", "largest complex"],
    "random": ["a permutation", "a gamma for each example"],
}
