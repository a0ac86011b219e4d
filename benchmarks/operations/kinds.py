"""Operations by kind: their sizes, and what is computed."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from operations import BF16, F32, Case
from operations.convolutions import convolutions, transposed


def _drawn(count: int, rows: int, how: str) -> np.ndarray:
    random = np.random.default_rng(0)
    if how == "equal":
        return np.zeros(count, np.int32)
    power = {"uniform": 1, "sorted": 1, "square": 2, "cube": 3}[how]
    found = (rows * random.random(count) ** power).astype(np.int32)
    return np.sort(found) if how == "sorted" else found


def scatters() -> Iterator[Case]:
    """Rows added into a table at indices that repeat more or less; a maximum; rows looked up."""
    sizes = [
        (2**20, 1, 100_000),
        (2**20, 64, 100_000),
        (2**18, 256, 100_000),
        (2**14, 1024, 32_000),
        (2**20, 64, 1_000),
    ]
    for count, width, rows in sizes:
        for dtype in (F32, BF16):
            for how in ("uniform", "sorted", "cube") if dtype == F32 else ("uniform",):
                size = {"count": count, "width": width, "rows": rows, "dtype": dtype, "how": how}
                add = lambda u, i, rows=rows: jnp.zeros((rows, u.shape[1]), u.dtype).at[i].add(u)
                yield Case("scatter", size, add, (((count, width), dtype),), _drawn(count, rows, how))
    equal = {"count": 2**14, "width": 1024, "rows": 32_000, "how": "equal"}
    for dtype in (F32, BF16):
        add = lambda u, i: jnp.zeros((32_000, u.shape[1]), u.dtype).at[i].add(u)
        yield Case("scatter", {**equal, "dtype": dtype}, add, (((2**14, 1024), dtype),), _drawn(2**14, 1, "equal"))
    top = lambda u, i: jax.ops.segment_max(u, i, 100_000)
    size = {"count": 2**20, "width": 8, "rows": 100_000, "dtype": F32, "how": "max"}
    yield Case("scatter", size, top, (((2**20, 8), F32),), _drawn(2**20, 100_000, "uniform"))
    for count, width, rows in (
        (2**20, 64, 100_000),
        (2**20, 128, 5_000_000),
        (2**20, 1, 100_000),
        (2**14, 4096, 32_000),
    ):
        size = {"count": count, "width": width, "rows": rows, "dtype": F32, "how": "uniform"}
        yield Case("gather", size, lambda t, i: t[i], (((rows, width), F32),), _drawn(count, rows, "uniform"))


def edges() -> Iterator[Case]:
    """Messages along the edges of a graph: attention over those that end at a node, by maxima and sums of segments."""
    for count, nodes, heads, dim in ((800_000, 50_000, 8, 16), (800_000, 50_000, 1, 128), (200_000, 10_000, 4, 32)):

        def attend(h: Any, score: Any, ends: Any, nodes: int = nodes) -> Any:
            start, end = ends
            top = jax.ops.segment_max(jax.lax.stop_gradient(score), end, nodes)
            raised = jnp.exp(score - top[end])
            total = jax.ops.segment_sum(raised, end, nodes)
            return jax.ops.segment_sum(h[start] * (raised / (total[end] + 1e-9))[..., None], end, nodes)

        shapes = (((nodes, heads, dim), F32), ((count, heads), F32))
        size = {"edges": count, "nodes": nodes, "heads": heads, "dim": dim}
        ends = np.stack([_drawn(count, nodes, "uniform"), _drawn(count, nodes, "uniform")[::-1]])
        yield Case("edges", {**size, "pass": "forward"}, attend, shapes, ends)
        back = lambda h, s, e, f=attend: jax.grad(lambda h, s: (f(h, s, e) ** 2).sum(), (0, 1))(h, s)
        yield Case("edges", {**size, "pass": "gradient"}, back, shapes, ends)


def orders() -> Iterator[Case]:
    """Sorts with and without values, the largest, and running sums along either dim."""
    for shape in ((4096, 256), (64, 16384), (1, 2**20), (16, 1024, 1024)):
        x = (shape, F32)
        yield Case("sort", {"shape": shape, "what": "sort"}, lambda x: jnp.sort(x, -1), (x,))
        yield Case("sort", {"shape": shape, "what": "argsort"}, lambda x: jnp.argsort(x, -1), (x,))
        yield Case("sort", {"shape": shape, "what": "top 20"}, lambda x: jax.lax.top_k(x, 20), (x,))
    for shape, axis in (((4096, 2048), 1), ((4096, 2048), 0), ((64, 131072), 1), ((2**20, 8), 0), ((2**23,), 0)):
        for name in ("cumsum", "cumlogsumexp"):
            function = lambda x, axis=axis, name=name: getattr(jax.lax, name)(x, axis)
            yield Case("cumulative", {"shape": shape, "axis": axis, "what": name}, function, ((shape, F32),))


def transforms() -> Iterator[Case]:
    """Real Fourier transforms over one and two dims, there and back."""
    for shape, dims in (((2048, 4096), 1), ((32, 64, 128, 128), 2), ((256, 512, 512), 2)):
        axes = tuple(range(-dims, 0))
        there = lambda x, axes=axes: jnp.fft.rfftn(x, axes=axes)
        yield Case("fft", {"shape": shape, "dims": dims, "way": "there"}, there, ((shape, F32),))
        both = lambda x, axes=axes: jnp.fft.irfftn(jnp.fft.rfftn(x, axes=axes), axes=axes)
        yield Case("fft", {"shape": shape, "dims": dims, "way": "both"}, both, ((shape, F32),))
    middle = lambda x: jnp.fft.rfft2(x, axes=(1, 2))
    yield Case(
        "fft", {"shape": (32, 128, 128, 64), "dims": "middle", "way": "there"}, middle, (((32, 128, 128, 64), F32),)
    )


def experts() -> Iterator[Case]:
    """`ragged_dot` and both gradients, beside one product of as many rows."""
    for rows, inner, columns, count in ((8192, 1024, 2048, 8), (8192, 1024, 2048, 32), (16384, 4096, 1536, 8)):
        sizes = np.full(count, rows // count, np.int32)
        x, w, d = ((rows, inner), BF16), ((count, inner, columns), BF16), ((rows, columns), BF16)
        size = {"rows": rows, "inner": inner, "columns": columns, "experts": count}
        yield Case("ragged", {**size, "pass": "forward"}, jax.lax.ragged_dot, (x, w), sizes)
        left = lambda x, w, d, g: jax.vjp(lambda x: jax.lax.ragged_dot(x, w, g), x)[1](d)[0]
        yield Case("ragged", {**size, "pass": "rows"}, left, (x, w, d), sizes)
        right = lambda x, w, d, g: jax.vjp(lambda w: jax.lax.ragged_dot(x, w, g), w)[1](d)[0]
        yield Case("ragged", {**size, "pass": "weights"}, right, (x, w, d), sizes)
        yield Case("ragged", {**size, "pass": "one product"}, lambda x, w: x @ w[0], (x, w))


def loops() -> Iterator[Case]:
    """Scans whose steps are some small kernels: a chain of products, and of products with what lies between."""
    for steps, count, batch, width in (
        (500, 1, 64, 256),
        (500, 4, 64, 256),
        (200, 16, 64, 256),
        (500, 2, 256, 256),
        (500, 2, 256, 1024),
        (50, 2, 4096, 512),
    ):
        for between in (False, True):

            def body(x: Any, w: Any, count: int = count, between: bool = between) -> Any:
                for _ in range(count):
                    x = x @ w
                    x = jnp.tanh(x) + 0.1 if between else x
                return x

            def run(x: Any, w: Any, steps: int = steps, body: Any = body) -> Any:
                return jax.lax.scan(lambda x, _: (body(x, w), x[0]), x, None, steps)

            size = {"steps": steps, "products": count, "batch": batch, "width": width, "between": between}
            shapes = (((batch, width), F32), ((width, width), F32))
            yield Case("loop", size, run, shapes)
            if between:  # XLA does not know how often this one runs
                until = lambda x, w, steps=steps, body=body: jax.lax.while_loop(
                    lambda s: (s[0] < steps) & (s[1][0, 0] < 1e9), lambda s: (s[0] + 1, body(s[1], w)), (0, x)
                )[1]
                yield Case("loop", {**size, "what": "while"}, until, shapes)
                back = lambda x, w, f=run: jax.grad(lambda x, w: f(x, w)[0].sum(), (0, 1))(x, w)
                yield Case("loop", {**size, "pass": "gradient"}, back, shapes)
    for steps, shape in ((2000, (64, 256)), (500, (64, 65_536)), (2000, (8, 16))):
        decayed = lambda x, a, steps=steps: jax.lax.scan(
            lambda h, u: (0.9 * h + jnp.tanh(u) * a, h.sum()), jnp.zeros_like(a), x
        )
        arrays = (((steps, *shape), F32), (shape, F32))
        size = {"steps": steps, "shape": shape, "what": "elementwise"}
        yield Case("loop", {**size, "pass": "forward"}, decayed, arrays)
        back = lambda x, a, f=decayed: jax.grad(lambda x, a: f(x, a)[1].sum(), (0, 1))(x, a)
        yield Case("loop", {**size, "pass": "gradient"}, back, arrays)
    for shape in ((8, 2048, 2048), (8, 4096, 16, 64)):
        joined = lambda a, b: jax.lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a, b), axis=1)
        size = {"shape": shape, "what": "associative scan"}
        yield Case("loop", {**size, "pass": "forward"}, joined, ((shape, F32), (shape, F32)))
        back = lambda a, b, f=joined: jax.grad(lambda a, b: f(a, b)[1].sum(), (0, 1))(a, b)
        yield Case("loop", {**size, "pass": "gradient"}, back, ((shape, F32), (shape, F32)))


def streams() -> Iterator[Case]:
    """Reductions, norms, softmax, transposes and random numbers: bytes, and how fast they move."""
    for shape, axes in (
        ((8192, 4096), (1,)),
        ((8192, 4096), (0,)),
        ((128, 56, 56, 256), (0, 1, 2)),
        ((128, 56, 56, 256), (1, 2)),
        ((2**26,), (0,)),
        ((64, 512, 1024), (1,)),
        ((2**20, 16), (1,)),
        ((2**20, 16), (0,)),
    ):
        for dtype in (F32, BF16):
            size = {"shape": shape, "axes": axes, "dtype": dtype, "what": "sum"}
            yield Case("stream", size, lambda x, axes=axes: x.sum(axes), ((shape, dtype),))
    for shape, order in (
        ((8192, 8192), (1, 0)),
        ((16, 2048, 16, 64), (0, 2, 1, 3)),
        ((64, 56, 56, 128), (0, 3, 1, 2)),
        ((16, 1024, 1024), (0, 2, 1)),
        ((4096, 64, 128), (2, 0, 1)),
    ):
        for dtype in (F32, BF16):
            size = {"shape": shape, "order": order, "dtype": dtype, "what": "transpose"}
            yield Case("stream", size, lambda x, order=order: jnp.transpose(x, order), ((shape, dtype),))
    for dtype in (F32, BF16):
        shape = (8, 16, 2048, 2048)
        heads = lambda x: jax.nn.softmax(x.astype(F32)).astype(x.dtype)
        yield Case("stream", {"shape": shape, "dtype": dtype, "what": "softmax"}, heads, ((shape, dtype),))
        back = lambda x, d, f=heads: jax.vjp(f, x)[1](d)[0]
        both = ((shape, dtype), (shape, dtype))
        yield Case("stream", {"shape": shape, "dtype": dtype, "what": "softmax and gradient"}, back, both)
        shape = (16384, 2048)
        norm = lambda x: ((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)).astype(
            x.dtype
        )
        yield Case("stream", {"shape": shape, "dtype": dtype, "what": "norm"}, norm, ((shape, dtype),))
        back = lambda x, d, f=norm: jax.vjp(f, x)[1](d)[0]
        both = ((shape, dtype), (shape, dtype))
        yield Case("stream", {"shape": shape, "dtype": dtype, "what": "norm and gradient"}, back, both)
    shape = (64, 1024, 1024)
    dropped = lambda x: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.9, x.shape), x, 0)
    yield Case("stream", {"shape": shape, "dtype": F32, "what": "dropout"}, dropped, ((shape, F32),))
    drawn = lambda x: jax.random.normal(jax.random.key(1), x.shape) + x
    yield Case("stream", {"shape": shape, "dtype": F32, "what": "normal"}, drawn, ((shape, F32),))
    for what, function in {"copy": lambda x: x + 1, "tanh": jnp.tanh, "exp": jnp.exp, "erf": jax.lax.erf}.items():
        yield Case("stream", {"shape": shape, "dtype": F32, "what": what}, function, ((shape, F32),))
    for tensors, shape in ((200, (256,)), (200, (256, 256)), (50, (2048, 2048))):
        adam = lambda *xs: [0.9 * x - 0.1 * x / (jnp.sqrt(x * x) + 1e-8) for x in xs]
        size = {"tensors": tensors, "shape": shape, "what": "updates"}
        yield Case("stream", size, adam, ((shape, F32),) * tensors)


def products() -> Iterator[Case]:
    """Products of float32, small batched ones, and those of odd sizes."""
    for shapes in (
        ((8192, 1024), (1024, 4096)),
        ((65_536, 256), (256, 256)),
        ((65_536, 64), (64, 64)),
        *(((side, side), (side, side)) for side in (64, 256, 512, 1024, 2048, 4096)),
        ((256, 1024), (1024, 10)),
        ((64, 4096), (4096, 64)),
        ((65_536, 1024), (1024, 256)),
        ((4096, 1000), (1000, 333)),
        ((16, 1024, 1024), (16, 1024, 1024)),
        ((4096, 64, 32), (4096, 32, 64)),
        ((100_000, 3), (3, 128)),
        ((128, 65_536), (65_536, 128)),
    ):
        for dtype in (F32, BF16):
            size = {"shapes": shapes, "dtype": dtype}
            yield Case("product", size, jnp.matmul, tuple((shape, dtype) for shape in shapes))


def decompositions() -> Iterator[Case]:
    """What linear algebra libraries do: Cholesky, triangular solves, QR, eigenvalues, singular values."""
    definite = lambda x: x @ x.mT + 10 * jnp.eye(x.shape[-1])
    functions = {
        "cholesky": lambda x: jnp.linalg.cholesky(definite(x)),
        "triangular_solve": lambda x: jax.scipy.linalg.solve_triangular(jnp.tril(definite(x)), x, lower=True),
        "qr": jnp.linalg.qr,
        "eigh": lambda x: jnp.linalg.eigh(definite(x)),
        "svd": jnp.linalg.svd,
        "solve": lambda x: jnp.linalg.solve(definite(x), x),
    }
    for what, function in functions.items():
        for shape in ((512, 512), (2048, 2048), (256, 32, 32)):
            if what in ("eigh", "svd") and shape[0] == 2048:
                continue  # seconds
            yield Case("decomposition", {"what": what, "shape": shape}, function, ((shape, F32),))


KINDS = {
    "order": orders,
    "loop": loops,
    "stream": streams,
    "scatter": scatters,
    "edges": edges,
    "product": products,
    "conv": convolutions,
    "transposed": transposed,
    "fft": transforms,
    "ragged": experts,
    "decomposition": decompositions,
}
