"""How long do operations take that no product or stream of bytes explains? A grid of them, alone on one device.

Convolutions with both gradients, scatters by how often their indices repeat, look-ups, sorts, running sums, Fourier
transforms, `ragged_dot`, reductions, transposes, random numbers, decompositions, small products, and loops whose steps
are small. Each is compiled by itself; what is kept is the time of one of many runs in a row, its kernels where JAX's
profiler sees them, and the temporary memory that the compiler gave it. The kinds take turns, some cases at a time, and
every case is a line of `grid.jsonl` once it was measured.

    python benchmarks/grid.py [--out FOLDER] [--seconds 100] [KIND …]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from report import RESULTS, table
from strangers.kernels import kernel_events

BF16, F32 = "bfloat16", "float32"


@dataclass
class Case:
    """One operation: what it is, its function, its arguments' shapes and types, and integers that are indices."""

    kind: str
    size: dict[str, Any]
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    indices: np.ndarray | None = None
    name: str = "case"
    compiled: Any = None
    arguments: Any = None
    row: dict[str, Any] = field(default_factory=dict)

    def compile(self) -> None:
        types = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in self.shapes]
        if self.indices is not None:
            types.append(jax.ShapeDtypeStruct(self.indices.shape, self.indices.dtype))

        def run(*args: Any) -> Any:
            return self.function(*args)

        run.__name__ = self.name  # by which the profiler's events are told apart
        self.compiled = jax.jit(run).lower(*types).compile()
        self.arguments = jax.jit(self._draw).lower().compile()
        temporary = self.compiled.memory_analysis()
        self.row = {"kind": self.kind, **self.size, "temp_bytes": temporary.temp_size_in_bytes if temporary else None}

    def _draw(self) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), len(self.shapes))
        return [jax.random.normal(key, *shape) for key, shape in zip(keys, self.shapes, strict=True)]

    def measure(self, folder: Path) -> None:
        args = self.arguments()
        if self.indices is not None:
            args = [*args, jnp.asarray(self.indices)]
        jax.block_until_ready(self.compiled(*args))
        started = time.perf_counter()
        jax.block_until_ready(self.compiled(*args))
        runs = int(min(max(0.02 / (time.perf_counter() - started), 3), 50))
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            for _ in range(runs):
                results = self.compiled(*args)
            jax.block_until_ready(results)
            best = min(best, (time.perf_counter() - started) / runs)
        with jax.profiler.trace(str(folder)):
            jax.block_until_ready(self.compiled(*args))
        kernels: dict[str, float] = {}
        for module, _, kernel, seconds in kernel_events(folder):
            if module.endswith(self.name):
                kernels[kernel] = kernels.get(kernel, 0.0) + seconds
        largest = sorted(kernels.items(), key=lambda item: -item[1])[:6]
        self.row |= {"wall_s": best, "kernel_s": sum(kernels.values()), "kernels": dict(largest)}
        self.compiled = self.arguments = None


def convolutions() -> Iterator[Case]:
    """2-D (depthwise too), 1-D and 3-D, each forward and its gradients by the input and by the window."""
    shapes = [  # batch, space, in, out, window, stride, groups, dtype
        *((32, (s, s), i, o, (k, k), (1, 1), 1, BF16) for s, i, o, k in CHANNELS),
        (128, (224, 224), 3, 64, (7, 7), (2, 2), 1, BF16),
        (128, (56, 56), 128, 128, (3, 3), (2, 2), 1, BF16),
        (64, (56, 56), 96, 96, (7, 7), (1, 1), 96, BF16),
        (64, (14, 14), 384, 384, (7, 7), (1, 1), 384, BF16),
        (128, (56, 56), 144, 144, (3, 3), (1, 1), 144, BF16),
        (128, (14, 14), 480, 480, (5, 5), (2, 2), 480, BF16),
        (32, (64, 64), 64, 64, (3, 3), (1, 1), 1, F32),
        (32, (32, 32), 256, 256, (3, 3), (1, 1), 1, F32),
        (8, (16384,), 128, 256, (2,), (1,), 1, F32),
        (8, (3000,), 80, 768, (3,), (1,), 1, BF16),
        (4, (1024,), 2048, 2048, (4,), (1,), 2048, BF16),
        (2, (64, 64, 64), 32, 32, (3, 3, 3), (1, 1, 1), 1, F32),
        (8, (16, 56, 56), 64, 64, (3, 3, 3), (1, 1, 1), 1, BF16),
    ]
    for batch, space, inputs, outputs, window, stride, groups, dtype in shapes:
        names = "DHW"[-len(space) :]
        numbers = (f"N{names}C", f"{names}IO", f"N{names}C")

        def forward(x: Any, w: Any, stride: Any = stride, numbers: Any = numbers, groups: int = groups) -> Any:
            return jax.lax.conv_general_dilated(
                x, w, stride, "SAME", dimension_numbers=numbers, feature_group_count=groups
            )

        x, w = ((batch, *space, inputs), dtype), ((*window, inputs // groups, outputs), dtype)
        made = ((batch, *(-(-s // t) for s, t in zip(space, stride, strict=True)), outputs), dtype)
        size = {"batch": batch, "space": space, "in": inputs, "out": outputs, "window": window, "stride": stride}
        size |= {"groups": groups, "dtype": dtype}
        yield Case("conv", {**size, "pass": "forward"}, forward, (x, w))
        by_input = lambda x, w, d, f=forward: jax.vjp(lambda x: f(x, w), x)[1](d)[0]
        yield Case("conv", {**size, "pass": "input"}, by_input, (x, w, made))
        by_window = lambda x, w, d, f=forward: jax.vjp(lambda w: f(x, w), w)[1](d)[0]
        yield Case("conv", {**size, "pass": "window"}, by_window, (x, w, made))


CHANNELS = [
    (56, 64, 64, 1),
    (56, 64, 64, 3),
    (28, 128, 128, 3),
    (14, 256, 256, 3),
    (7, 512, 512, 3),
    (14, 1024, 256, 1),
]
CHANNELS += [(64, 128, 128, 3), (16, 512, 512, 3), (8, 1024, 512, 3), (56, 256, 64, 1), (64, 16, 16, 3)]


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
    for steps, count, batch, width in ((200, 1, 64, 256), (200, 4, 64, 256), (200, 16, 64, 256), (200, 1, 256, 1024)):
        for between in (False, True):

            def body(x: Any, w: Any, count: int = count, between: bool = between) -> Any:
                for _ in range(count):
                    x = x @ w
                    x = jnp.tanh(x) + 0.1 if between else x
                return x

            def run(x: Any, w: Any, steps: int = steps, body: Any = body) -> Any:
                return jax.lax.scan(lambda x, _: (body(x, w), x[0]), x, None, steps)

            size = {"steps": steps, "products": count, "batch": batch, "width": width, "between": between}
            yield Case("loop", size, run, (((batch, width), F32), ((width, width), F32)))
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
        ((512, 512), (512, 512)),
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
    "product": products,
    "conv": convolutions,
    "fft": transforms,
    "ragged": experts,
    "decomposition": decompositions,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=100)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + options.seconds
    # Kinds take turns, so that every one has rows when time is over.
    turns = zip_longest(*(KINDS[kind]() for kind in options.kinds))
    cases = [case for case in chain.from_iterable(turns) if case is not None]
    for number, case in enumerate(cases):
        case.name = f"case_{number}"
    threads = max((os.cpu_count() or 2) - 2, 1)
    rows: list[dict[str, Any]] = []
    with (
        (options.out / "grid.jsonl").open("w", encoding="utf-8") as file,
        ThreadPoolExecutor(threads) as pool,
        tempfile.TemporaryDirectory() as folder,
    ):
        while len(rows) < len(cases) and time.time() < end:
            some = cases[len(rows) : len(rows) + 2 * threads]
            for case, failure in zip(some, pool.map(partial(_outcome, Case.compile), some), strict=True):
                failure = failure or _outcome(partial(Case.measure, folder=Path(folder)), case)
                if failure:
                    case.row = {"kind": case.kind, **case.size, "failure": failure}
                file.write(json.dumps(case.row) + "\n")
                file.flush()
                rows.append(case.row)
            print(f"{len(rows)} of {len(cases)} measured, {end - time.time():.0f} s left", flush=True)
    shown = [(row.pop("kind"), *_cells(row)) for row in rows]
    table("Grid", (__doc__ or "").split("\n")[0], ("operation", "size", "µs a run", "µs of kernels", "MiB"), shown)


def _outcome(function: Callable[[Case], None], case: Case) -> str | None:
    """What went wrong, so that the others are measured; None where nothing did."""
    try:
        function(case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    size = {key: value for key, value in row.items() if key not in ("wall_s", "kernel_s", "kernels", "temp_bytes")}
    what = ", ".join(f"{key} {value}" for key, value in size.items())
    if "failure" in row:
        return (what, "", "", "")
    temporary = "" if row["temp_bytes"] is None else f"{row['temp_bytes'] / 2**20:.1f}"
    return (what, f"{1e6 * row['wall_s']:.0f}", f"{1e6 * row['kernel_s']:.0f}", temporary)


if __name__ == "__main__":
    main()
