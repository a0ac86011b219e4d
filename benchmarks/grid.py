"""How long do operations take that no product or stream of bytes explains? A grid of them, alone on one device.

Convolutions with both gradients, scatters by how often their indices repeat, look-ups, sorts, running sums, Fourier
transforms, `ragged_dot`, and loops whose steps are small. Each is compiled by itself; what is kept is the time of one
of many runs in a row, and the sum of its kernels where JAX's profiler sees them.

    python benchmarks/grid.py [--out FOLDER] [--seconds 120] [KIND …]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
from report import RESULTS, table
from strangers.kernels import kernels

BF16, F32 = "bfloat16", "float32"


@dataclass
class Case:
    """One operation: what it is, its function, its arguments' shapes and types, and integers that are indices."""

    kind: str
    size: dict[str, Any]
    function: Callable[..., Any]
    shapes: tuple[tuple[tuple[int, ...], str], ...]
    indices: np.ndarray | None = None
    compiled: Any = None
    wall_s: float = 0.0
    kernel_s: float = 0.0

    def compile(self) -> None:
        types = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in self.shapes]
        if self.indices is not None:
            types.append(jax.ShapeDtypeStruct(self.indices.shape, self.indices.dtype))
        self.compiled = jax.jit(self.function).lower(*types).compile()

    def measure(self) -> None:
        pool = np.random.default_rng(0).standard_normal(1_000_003, np.float32)
        args = [jnp.asarray(np.resize(pool.astype(jnp.dtype(dtype)), shape)) for shape, dtype in self.shapes]
        if self.indices is not None:
            args.append(jnp.asarray(self.indices))
        jax.block_until_ready(self.compiled(*args))
        started = time.perf_counter()
        jax.block_until_ready(self.compiled(*args))
        runs = int(min(max(0.02 / (time.perf_counter() - started), 3), 50))
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            made = [self.compiled(*args) for _ in range(runs)]
            jax.block_until_ready(made)
            best = min(best, (time.perf_counter() - started) / runs)
        self.wall_s = best
        with tempfile.TemporaryDirectory() as folder:
            found = kernels(lambda: self.compiled(*args), Path(folder))
        self.kernel_s = sum(seconds for _, seconds in found.values())

    @property
    def row(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.size, "wall_s": self.wall_s, "kernel_s": self.kernel_s}


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


KINDS = {
    "conv": convolutions,
    "scatter": scatters,
    "order": orders,
    "fft": transforms,
    "ragged": experts,
    "loop": loops,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=120)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.time() + options.seconds
    cases = [case for kind in options.kinds for case in KINDS[kind]()]
    with ThreadPoolExecutor(max((os.cpu_count() or 2) - 2, 1)) as pool:
        for done in [pool.submit(case.compile) for case in cases]:
            done.result()
    print(f"{len(cases)} compiled, {end - time.time():.0f} s left", flush=True)
    rows = []
    with (options.out / "grid.jsonl").open("w", encoding="utf-8") as file:
        for case in cases:
            if time.time() > end:
                break
            case.measure()
            case.compiled = None
            file.write(json.dumps(case.row) + "\n")
            file.flush()
            what = ", ".join(f"{key} {value}" for key, value in case.size.items())
            rows.append((case.kind, what, f"{1e6 * case.wall_s:.0f}", f"{1e6 * case.kernel_s:.0f}"))
    table("Grid", (__doc__ or "").split("\n")[0], ("operation", "size", "µs a run", "µs of kernels"), rows)


if __name__ == "__main__":
    main()
