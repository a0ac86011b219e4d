"""Small programs as people write them: what each of them needs is drawn up when it is asked for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.experimental import io_callback, pallas
from jax.experimental.sparse import BCOO

from tests.draws import normal

PROGRAMS = {}


def program(function):
    """Registers what makes a function and its arguments."""
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def r(*shape, seed=0):
    return normal(*shape, seed=seed + sum(shape))


def simple(name, function, *args):
    PROGRAMS[name] = lambda: (function, *(arg() if callable(arg) else arg for arg in args))


def m(*shape, seed=0):
    """A matrix, made when it is needed."""
    return lambda: r(*shape, seed=seed)


# --- indexing -------------------------------------------------------------------------------------------------------
simple("a row by a traced integer", lambda w, i: w[i], m(8, 8), 3)
simple("rows in a loop", lambda w: lax.fori_loop(0, 8, lambda k, c: c + w[k] * w[k, 0], jnp.zeros(8)), m(8, 8))
simple("negative and clamped", lambda w, i: (w[-1], w[i - 20], w.at[i].get(mode="fill")), m(8, 8), 3)
simple("masks", lambda x: jnp.where(x > 0, x, 0).sum() + (x > 0).sum() + jnp.count_nonzero(x), m(8, 8))
simple("nonzero of a size", lambda x: jnp.nonzero(x > 0, size=8)[0], m(8, 8))
simple("take and put", lambda x, i: jnp.take(x, i, axis=1).at[:, 0].set(1.0), m(8, 8), jnp.array([3, 1, 2, 1]))
simple("histogram", lambda x: jnp.histogram(x, bins=8)[0], m(64))
simple("searchsorted", lambda x: jnp.searchsorted(jnp.sort(x), jnp.linspace(-1, 1, 8)), m(64))
simple("unique of a size", lambda x: jnp.unique(x, size=4), jnp.array([3, 1, 3, 2, 1, 1, 1, 2]))
simple(
    "segments", lambda x, i: (jax.ops.segment_sum(x, i, 4), jax.ops.segment_max(x, i, 4)), m(8, 8), jnp.arange(8) % 4
)
simple("triangles", lambda x: jnp.tril(x) + jnp.triu(x, 1).T + jnp.diag(jnp.diag(x)), m(8, 8))
simple("rolls and flips", lambda x: jnp.roll(x, 3, 0) + jnp.flip(x, 1) + jnp.rot90(x), m(8, 8))

# --- arithmetic -----------------------------------------------------------------------------------------------------
simple("complex numbers", lambda x: jnp.abs((x + 1j * x.T) @ jnp.conj(x)) + jnp.angle(x + 0j), m(8, 8))
simple("whole numbers", lambda x: (x.astype(jnp.int32) // 3 % 5) << 1, m(8, 8))
simple("bits", lambda x: (x & 7) | (~x ^ 3) | lax.population_count(x), jnp.arange(64).reshape(8, 8))
simple("truth", lambda x: (jnp.any(x > 1, 0), jnp.all(x > -9, 1), jnp.isnan(x), jnp.logical_xor(x > 0, x < 1)), m(8, 8))
simple("einsum", lambda a, b: jnp.einsum("abcd,cdef,ag->bfge", a, b, a[:, :, 0, 0]), m(2, 4, 2, 4), m(2, 4, 4, 2))
simple("narrow floats", lambda x: (x.astype(jnp.float8_e4m3fn).astype(jnp.float32) @ x).astype(jnp.float16), m(8, 8))
simple(
    "bfloat16",
    lambda x, w: jnp.tanh(x @ w).astype(jnp.float32).mean(),
    lambda: r(8, 8).astype("bfloat16"),
    lambda: r(8, 8).astype("bfloat16"),
)
simple(
    "statistics", lambda x: (jnp.var(x, 0), jnp.median(x), jnp.percentile(x, 30), jnp.cov(x), jnp.nanmean(x)), m(8, 8)
)
simple(
    "polynomials",
    lambda x: jnp.polyval(jnp.array([1.0, -2.0, 3.0]), x) + jnp.convolve(x[0], x[1], mode="same"),
    m(8, 8),
)
simple(
    "special functions",
    lambda x: jax.scipy.special.logsumexp(x, 0) + jax.scipy.stats.norm.logpdf(x) + lax.erf(x),
    m(8, 8),
)
simple(
    "interpolation",
    lambda x: jnp.interp(x, jnp.arange(8.0), jnp.arange(8.0) ** 2) + jax.image.resize(x, (8, 8), "linear"),
    m(8, 8),
)
simple("cumulative", lambda x: (jnp.cumsum(x, 0), jnp.cumprod(x, 1), lax.cummax(x, 0), lax.cumlogsumexp(x, 1)), m(8, 8))

# --- linear algebra and transforms ----------------------------------------------------------------------------------
simple(
    "decompositions", lambda x: (jnp.linalg.qr(x)[1] ** 2, jnp.linalg.svd(x)[1], jnp.linalg.eigh(x + x.T)[0]), m(8, 8)
)
simple(
    "inverse",
    lambda x: (jnp.linalg.inv(x @ x.T + 8 * jnp.eye(8)), jnp.linalg.det(x), jnp.linalg.slogdet(x)[1]),
    m(8, 8),
)
simple("least squares", lambda a, b: jnp.linalg.lstsq(a, b)[0], m(16, 4), m(16, 2))
simple("matrix functions", lambda x: jax.scipy.linalg.expm(x / 8) + jnp.linalg.matrix_power(x / 8, 3), m(8, 8))
simple(
    "triangular solve",
    lambda a, b: jax.scipy.linalg.solve_triangular(jnp.tril(a) + 8 * jnp.eye(8), b),
    m(8, 8),
    m(8, 4),
)
simple(
    "conjugate gradients",
    lambda a, b: jax.scipy.sparse.linalg.cg(lambda v: a @ a.T @ v + 9 * v, b, maxiter=4)[0],
    m(8, 8),
    m(8),
)
simple("fourier", lambda x: (jnp.fft.rfft2(x).real, jnp.fft.ifft(x).imag, jnp.fft.fftshift(x)), m(8, 8))
simple("sparse", lambda x, w: BCOO.fromdense(x, nse=64) @ w, m(8, 8), m(8, 8))

# --- control flow ---------------------------------------------------------------------------------------------------
simple(
    "a while loop",
    lambda x: lax.while_loop(lambda c: c[1] < 4, lambda c: (jnp.sin(c[0] @ c[0]), c[1] + 1), (x, 0)),
    m(8, 8),
)
simple("a bounded while loop", lambda x: lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: c / 2, x), m(8, 8))
simple("branches", lambda i, x: lax.switch(i, [jnp.sin, lambda a: a @ a, lambda a: a[::-1]], x), 2, m(8, 8))
simple("a branch on data", lambda x: lax.cond(x.sum() > 0, lambda a: (a, 1.0), lambda a: (-a, 2.0), x), m(8, 8))
simple("map", lambda x, w: lax.map(lambda row: jnp.tanh(row @ w), x), m(8, 8), m(8, 8))
simple("batched map", lambda x: lax.map(lambda row: row * 2, x, batch_size=3), m(8, 8))
simple("associative scan", lambda x: lax.associative_scan(lambda a, b: a * b + b, x, reverse=True), m(8, 8))
simple("a custom reduction", lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.hypot(a, b), (0,)), m(8, 8))
simple("a custom sort", lambda x, y: lax.sort((x, y, y), dimension=1, num_keys=2), m(8, 8), m(8, 8))
simple(
    "top k", lambda x: (lax.top_k(x, 3), lax.approx_max_k(x, 2)[0].shape, jnp.argsort(x, 0, descending=True)), m(8, 8)
)
simple("windows", lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 3), (1, 1), "SAME"), m(8, 8))
simple(
    "nested loops",
    lambda x: lax.fori_loop(0, 3, lambda i, c: lax.scan(lambda d, r: (d + r * i, d), c, x)[0], x[0]),
    m(8, 8),
)
simple("vectorized", jnp.vectorize(lambda a, b: a @ b + 1.0, signature="(n),(n)->()"), m(4, 8), m(4, 8))
simple("a scan of nothing", lambda x: lax.scan(lambda c, _: (c * 2, None), x, None, length=0)[0], m(8, 8))


@program
def gradient_of_an_rnn_without_a_batch():
    def loss(w, xs):
        def cell(h, x):
            h = jnp.tanh(w["h"] @ h + w["x"] @ x + w["b"])
            return h, h

        return (lax.scan(cell, jnp.zeros(8), xs)[1] ** 2).mean()

    return jax.value_and_grad(loss), {"h": r(8, 8), "x": r(8, 4), "b": r(8)}, r(6, 4)


@program
def deep_nesting():
    def function(x):
        def nested(depth, value):
            if depth == 0:
                return jnp.sin(value)
            return jax.jit(lambda v: lax.scan(lambda c, _: (nested(depth - 1, c), None), v, None, length=1)[0])(value)

        return nested(8, x)

    return function, r(8, 8)


# --- derivatives ----------------------------------------------------------------------------------------------------
@program
def custom_vjp_with_what_is_not_differentiated():
    @partial(jax.custom_vjp, nondiff_argnums=(0, 2))
    def apply(function, x, scale):
        return function(x) * scale

    apply.defvjp(lambda f, x, s: (apply(f, x, s), x), lambda f, s, x, g: (g * s,))
    return lambda x: (apply(jnp.sin, x, 2.0), jax.grad(lambda y: apply(jnp.sin, y, 3.0).sum())(x)), r(8, 8)


@program
def custom_jvp():
    @jax.custom_jvp
    def safe(x):
        return jnp.where(x > 0, jnp.log(jnp.abs(x)), 0.0)

    safe.defjvps(lambda t, out, x: t / (1 + jnp.abs(x)))
    return lambda x: (safe(x), jax.jvp(safe, (x,), (x,))[1], jax.grad(lambda y: safe(y).sum())(x)), r(8, 8)


@program
def checkpoint_policies():
    @partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
    def layer(x, w):
        return jnp.tanh(x @ w)

    def loss(ws, x):
        return lax.scan(lambda c, w: (layer(c, w), None), x, ws)[0].sum()

    return jax.grad(loss), r(3, 8, 8), r(8, 8)


simple(
    "second derivatives",
    lambda x, v: jax.jvp(jax.grad(lambda y: jnp.sin(y @ y).sum()), (x,), (v,))[1],
    m(8, 8),
    m(8, 8),
)
simple("jacobians", jax.jacfwd(lambda x: jnp.tanh(x @ x.T).sum(0)), m(4, 4))
simple("a hessian", jax.hessian(lambda x: jnp.sum(jnp.cos(x) ** 3)), m(4))
simple("gradients by example", jax.vmap(jax.grad(lambda w, x: jnp.tanh(x @ w).sum()), (None, 0)), m(8, 4), m(8, 8))
simple("stopped gradients", jax.grad(lambda x: (lax.stop_gradient(x) * jnp.sin(x)).sum()), m(8, 8))


# --- inputs and outputs ---------------------------------------------------------------------------------------------
simple("numbers alone", lambda a, b: a * 2 + b, 3, 2.5)
simple("nothing at all among the results", lambda x: {"a": None, "b": [x * 2, ()], "c": {}}, m(8, 8))
simple("arrays without elements", lambda x, y: (x.sum(), jnp.concatenate([x, y @ y.T], 0)), m(0, 8), m(8, 8))
simple(
    "one array twice",
    lambda x, y: x @ y + x,
    (lambda x: lambda: x)(np.ones((8, 8), np.float32)),
    (lambda x: lambda: x)(np.ones((8, 8), np.float32)),
)
simple("constants of the host", lambda x: x @ np.arange(64.0, dtype=np.float32).reshape(8, 8) + np.float32(2), m(8, 8))
simple("a constant result", lambda x: (x.sum(), jnp.arange(8), 3.0), m(8, 8))
simple("handed through", lambda x: {"same": x, "twice": (x, x)}, m(8, 8))
simple(
    "python state",
    lambda s: {"step": s["step"] + 1, "w": s["w"] * s["rate"], "rate": s["rate"]},
    lambda: {"step": 0, "w": r(8, 8), "rate": 0.5},
)
simple(
    "random keys",
    lambda k: (jax.random.normal(k, (8, 8)), jax.random.split(k)[0], jax.random.permutation(k, 8)),
    lambda: jax.random.key(1),
)
simple(
    "old random keys",
    lambda k: jax.random.categorical(jax.random.fold_in(k, 3), jnp.ones((8, 8))),
    lambda: jax.random.PRNGKey(1),
)
simple("random choices", lambda k, x: jax.random.choice(k, x, (4,), replace=False), lambda: jax.random.key(1), m(8, 8))


@program
def debugging():
    def function(x):
        jax.debug.print("sum {}", x.sum())
        y = jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((8, 8), jnp.float32), x)
        return jnp.sin(y) @ x

    return function, r(8, 8)


@program
def a_callback_with_effects():
    seen = []
    return lambda x: io_callback(
        lambda a: seen.append(1) or np.asarray(a), jax.ShapeDtypeStruct((), jnp.float32), x.sum()
    ), r(8, 8)


@program
def a_kernel():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    rows, made = pallas.BlockSpec((2, 8), lambda i: (i, 0)), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    double = pallas.pallas_call(kernel, made, grid=(4,), in_specs=[rows], out_specs=rows, interpret=True)
    return lambda x, w: double(x @ w) + 1.0, r(8, 8), r(8, 8)


# --- optimisers -----------------------------------------------------------------------------------------------------
OPTIMISERS = {
    "adamw with a schedule": lambda: optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "lion": lambda: optax.lion(1e-3),
    "momentum and clipping": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9, nesterov=True)
    ),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "masked": lambda: optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "by part": lambda: optax.multi_transform({"a": optax.adam(1e-2), "z": optax.set_to_zero()}, {"w": "a", "b": "z"}),
    "adam in bfloat16": lambda: optax.adam(1e-2, mu_dtype=jnp.bfloat16),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "lookahead of norms": lambda: optax.chain(
        optax.scale_by_trust_ratio(), optax.ema(0.9), optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.scale(-1e-2)
    ),
}


def optimised(make):
    tx = make()
    params = {"w": r(8, 8), "b": jnp.zeros(8)}

    def step(state, batch):
        params, opt = state
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["w"] + p["b"]) - 1) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), loss

    return step, (params, tx.init(params)), r(8, 8)


for name, make in OPTIMISERS.items():
    PROGRAMS[name] = partial(optimised, make)


@program
def preconditioned():
    def step(state, batch):
        w, left, right = state
        g = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        left, right = left + g @ g.T, right + g.T @ g
        values, vectors = jnp.linalg.eigh(left + 1e-3 * jnp.eye(8))
        return (w - (vectors * values**-0.25) @ vectors.T @ g, left, right), jnp.linalg.norm(g)

    return step, (r(8, 8), jnp.zeros((8, 8)), jnp.zeros((8, 8))), r(8, 8)


# --- frameworks -----------------------------------------------------------------------------------------------------
@program
def an_embedding_of_equinox():
    import equinox as eqx

    table = eqx.nn.Embedding(8, 4, key=jax.random.key(0))
    return lambda t, i: jax.vmap(t)(i), table, jnp.arange(8)


@program
def a_recurrent_cell_of_equinox():
    import equinox as eqx

    class Net(eqx.Module):
        cell: eqx.nn.GRUCell
        out: eqx.nn.Linear

        def __call__(self, xs):
            h, _ = lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(8), xs)
            return self.out(h)

    keys = jax.random.split(jax.random.key(0))
    net = Net(eqx.nn.GRUCell(4, 8, key=keys[0]), eqx.nn.Linear(8, 1, key=keys[1]))

    def step(net, xs):
        loss, grads = eqx.filter_value_and_grad(lambda n, x: jnp.mean(jax.vmap(n)(x) ** 2))(net, xs)
        return eqx.apply_updates(net, jax.tree.map(lambda g: -0.1 * g, grads)), loss

    return eqx.filter_jit(step), net, r(4, 5, 4)


@program
def a_recurrent_net_of_linen():
    import flax.linen as nn

    model = nn.RNN(nn.LSTMCell(8))
    x = r(4, 5, 4)
    variables = model.init(jax.random.key(0), x)
    return jax.grad(lambda v, x: model.apply(v, x).sum()), variables, x


@program
def a_scanned_net_of_linen_with_dropout():
    import flax.linen as nn

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            h = nn.Dense(8)(nn.LayerNorm()(x))
            return x + nn.Dropout(0.5, deterministic=False)(nn.gelu(h)), None

    stack = nn.scan(Block, {"params": 0}, split_rngs={"params": True, "dropout": True}, length=3)()
    variables = stack.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, r(8, 8), None)

    def loss(v, x, key):
        return stack.apply(v, x, None, rngs={"dropout": key})[0].sum()

    return jax.value_and_grad(loss), variables, r(8, 8), jax.random.key(2)


@program
def a_net_of_nnx():
    from flax import nnx

    graphdef, state = nnx.split(
        nnx.Sequential(nnx.Linear(8, 16, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(16, 1, rngs=nnx.Rngs(1)))
    )

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda s: jnp.mean(nnx.merge(graphdef, s)(x) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    return step, state, r(8, 8)


@program
def a_net_of_haiku_with_state():
    import haiku as hk

    def forward(x):
        y = hk.BatchNorm(True, True, 0.9)(hk.Linear(8)(x), is_training=True)
        return hk.dynamic_unroll(hk.VanillaRNN(8), y[:, None], hk.VanillaRNN(8).initial_state(1))[0].sum()

    model = hk.transform_with_state(forward)
    params, state = model.init(jax.random.key(0), r(8, 4))
    return lambda p, s, x: jax.value_and_grad(lambda q: model.apply(q, s, None, x)[0])(p), params, state, r(8, 4)
