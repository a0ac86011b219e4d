"""Programs of every kind, each planned and run on eight virtual devices: the results are one device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.runtime.spmd import spmd
from tests.draws import normal
from tests.runtime.test_spmd import compiled

pytestmark = pytest.mark.devices

MESHES = [(8,), (2, 4), (2, 2, 2)]


def r(*shape):
    return normal(*shape, seed=sum(shape))


def chain(c, w, x):
    return jnp.tanh(c @ w + x), c.sum(-1)


def convolve(x, k, stride):
    return jax.lax.conv_general_dilated(x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def loop(w, xs):
    return jax.lax.scan(lambda c, x: chain(c, w, x), jnp.zeros((8, 16)), xs)


def positive(a):
    return a @ a.transpose(0, 2, 1) + 3 * jnp.eye(8)


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID").sum()


def grow(c):
    return jnp.tanh(0.02 * c @ c.T @ c)  # tame, or rounding would grow from trip to trip


PROGRAMS = {
    "cross entropy": lambda x, w, y: -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w), y[:, None], 1)),
    "while": lambda x: jax.lax.while_loop(lambda c: c[1] < 5, lambda c: (grow(c[0]), c[1] + 1), (x, 0)),
    "cond": lambda p, x, w: jax.lax.cond(p > 0, lambda a: jnp.sin(a) @ w, lambda a: (a * 2) @ w, x),
    "switch": lambda i, x: jax.lax.switch(i, [lambda a: a + 1, lambda a: a.T.T * 2, lambda a: jnp.sort(a, 0)], x),
    "scan": loop,
    "gradient of a scan": jax.grad(lambda w, xs: loop(w, xs)[0].sum()),
    "sorting": lambda x: (jnp.sort(x, -1), jax.lax.top_k(x, 4), jnp.argmax(x, 0), jnp.cumsum(x, 1)),
    "fourier": lambda x: jnp.abs(jnp.fft.fft(x)),
    "linear algebra": lambda a, b: (jnp.linalg.solve(positive(a), b), jnp.linalg.cholesky(positive(a))),
    "convolution": lambda x, k: convolve(x, k, 1),
    "gradient of a convolution": jax.grad(lambda k, x: (convolve(x, k, 2) ** 2).sum()),
    "gradient of pooling": jax.grad(pool),
    "gradient of an embedding": jax.grad(lambda t, i: (t[i] ** 2).sum()),
    "attention": lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
    "grouped attention": lambda q, k, v: jax.nn.dot_product_attention(q, k, v),
    "ragged product": jax.lax.ragged_dot,
    "dropout": lambda k, x, w: jnp.where(jax.random.bernoulli(k, 0.5, (16, 32)), x @ w, 0),
    "noise": lambda k, x, w: x @ w + jax.random.normal(k, (16, 32)),
    "vmap": jax.vmap(lambda a, b: (a @ b).sum() + jnp.linalg.norm(b)),
    "reshapes": lambda a, w: a.reshape(8, 16, 2, 8).transpose(0, 2, 1, 3).reshape(16, 128) @ w,
    "cache update": lambda c, u, i: jax.lax.dynamic_update_slice(c, u, (0, i, 0)),
    "associative scan": lambda x: jax.lax.associative_scan(jnp.add, x),
    "layout": lambda x, y: jnp.pad(jnp.concatenate([x, y], 1), ((0, 0), (2, 2)))[:, ::-1],
    "one-hot": lambda i, w: jax.nn.one_hot(i, 64) @ w,
    "scatter": lambda x, i, u: x.at[i].set(u).at[i].add(1.0),
    "number": lambda x: x * 2,
    "checkpoint": jax.grad(jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w) @ w.T).sum())),
    "integers": lambda a, b: jax.lax.dot(a, b, preferred_element_type=jnp.int32),
    "handed through": lambda x, y: (x, y, x),
    "segments": lambda x, i: jax.ops.segment_sum(x, i, 8),
    "quantiles": lambda x: jnp.median(x, 0) + jnp.quantile(x, 0.3, axis=0),
    "gradient of a loop": jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda i, c: grow(c), x).sum()),
    "arrays of no size": jax.grad(lambda w, x: (x @ w).sum() + w.size),
}

SHAPES = {
    "while": ((16, 8),),
    "scan": ((16, 16), (5, 8, 16)),
    "gradient of a scan": ((16, 16), (5, 8, 16)),
    "sorting": ((16, 24),),
    "fourier": ((8, 64),),
    "linear algebra": ((8, 8, 8), (8, 8, 4)),
    "convolution": ((8, 16, 16, 8), (3, 3, 8, 16)),
    "gradient of a convolution": ((3, 3, 8, 16), (8, 16, 16, 8)),
    "gradient of pooling": ((8, 16, 16, 8),),
    "attention": ((8, 16, 8, 4),) * 3,
    "grouped attention": ((8, 16, 8, 4), (8, 16, 2, 4), (8, 16, 2, 4)),
    "vmap": ((8, 4, 16), (8, 16, 4)),
    "reshapes": ((8, 16, 16), (128, 32)),
    "associative scan": ((16, 8),),
    "layout": ((16, 8), (16, 24)),
    "checkpoint": ((8, 16), (16, 8)),
    "handed through": ((8, 8), (4,)),
    "quantiles": ((16, 8),),
    "gradient of a loop": ((16, 8),),
    "arrays of no size": ((16, 0), (8, 16)),
}


def arguments(name):
    if name in SHAPES:
        return tuple(r(*shape) for shape in SHAPES[name])
    return {
        "cross entropy": lambda: (r(16, 32), r(32, 64), jnp.arange(16) % 64),
        "cond": lambda: (jnp.float32(1.0), r(16, 8), r(8, 32)),
        "switch": lambda: (jnp.int32(2), r(16, 8)),
        "gradient of an embedding": lambda: (r(64, 16), jnp.arange(32).reshape(8, 4) % 64),
        "ragged product": lambda: (r(32, 16), r(4, 16, 8), jnp.array([8, 4, 12, 8], jnp.int32)),
        "dropout": lambda: (jax.random.key(3), r(16, 8), r(8, 32)),
        "noise": lambda: (jax.random.PRNGKey(3), r(16, 8), r(8, 32)),
        "cache update": lambda: (r(8, 32, 16), r(8, 1, 16), jnp.int32(3)),
        "one-hot": lambda: (jnp.arange(32), r(64, 16)),
        "scatter": lambda: (r(32, 16), jnp.arange(8) * 3, r(8, 16)),
        "number": lambda: (3.0,),
        "integers": lambda: (jnp.ones((16, 32), jnp.int8), jnp.ones((32, 8), jnp.int8)),
        "segments": lambda: (r(32, 16), jnp.arange(32) % 8),
    }[name]()


@pytest.mark.sweep(12)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_what_one_device_computes(name):
    function, args = PROGRAMS[name], arguments(name)
    shape = MESHES[list(PROGRAMS).index(name) % len(MESHES)]
    mesh = mw.Mesh.abstract(shape, alpha=0.0, beta=(1e-9, 1e-10, 1e-10)[: len(shape)])
    plan = mw.plan(function, *args, mesh=mesh)
    assert plan.unsplittable == ()
    assert sum(c.seconds for c in plan.collectives) == pytest.approx(plan.cost.communication, abs=1e-12)
    got = compiled(spmd(plan, function), *args)(*args)
    for expected, found in zip(jax.tree.leaves(jax.jit(function)(*args)), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-4, atol=2e-4)
