"""How long do toy models take to plan in tight memory, and how far may their plans be from the best?

Limits lie at parts of the way from the least memory for which a plan was found to what the best plan without a limit
needs. JAX's own tracing is not counted.

    python benchmarks/toys.py            # every model on every mesh
    python benchmarks/toys.py mlp-8      # those whose names begin so
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import jax
import jax.numpy as jnp
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.hardware import Mesh
from meshwright.planner.planner import Task
from meshwright.planner.solving.solves import least_memory

PARTS = (0.0, 0.1, 0.3, 0.6)
SHAPES: tuple[tuple[int, ...], ...] = ((4,), (2, 2), (2, 4))
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def descent(loss: Callable[..., Any]) -> Callable[..., Any]:
    """One step of gradient descent."""
    return lambda params, *data: jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params, *data))


def mlp(layers: int) -> Program:
    def loss(weights: list[Any], x: Any, y: Any) -> Any:
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean((x - y) ** 2)

    return descent(loss), ([array(16, 16)] * layers, array(8, 16), array(8, 16))


def attention() -> Program:
    def loss(params: dict[str, Any], x: Any) -> Any:
        q, k, v = (x @ params[name] for name in "qkv")
        return jnp.mean((jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v @ params["o"]) ** 2)

    return descent(loss), ({name: array(16, 16) for name in "qkvo"}, array(4, 8, 16))


def recurrent() -> Program:
    def loss(params: dict[str, Any], x: Any) -> Any:
        def cell(state: Any, at: Any) -> tuple[Any, None]:
            return jnp.tanh(state @ params["state"] + at @ params["input"]), None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((8, 16)), x)[0] ** 2)

    return descent(loss), ({"state": array(16, 16), "input": array(16, 16)}, array(12, 8, 16))


def convolutional() -> Program:
    def loss(kernels: list[Any], x: Any) -> Any:
        for kernel in kernels:
            x = jax.nn.relu(
                jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            )
        return jnp.mean(x**2)

    return descent(loss), ([array(3, 3, 8, 8)] * 4, array(8, 8, 8, 8))


def tiny(name: str) -> Program:
    example = zoo.build(name)
    return example.train_step, (example.state, example.batch)


MODELS: dict[str, Callable[[], Program]] = {
    "mlp-3": lambda: mlp(3),
    "mlp-6": lambda: mlp(6),
    "mlp-8": lambda: mlp(8),
    "attention": attention,
    "recurrent": recurrent,
    "convolutional": convolutional,
    "gpt-tiny": lambda: tiny("gpt-tiny"),
}


def meshes() -> Iterator[tuple[str, Mesh, Callable[[int], mw.Auto]]]:
    """Names, meshes without a limit, and how a limit is given."""
    for shape in SHAPES:
        yield "×".join(map(str, shape)), Mesh.abstract(shape, alpha=1.0, beta=1e-3), lambda _: mw.Auto()
    machine = mw.cluster("1x4 cpu").mesh((2, 2))
    yield "2×2 cpu", machine, lambda limit: mw.Auto(memory_fraction=limit / (machine.memory_bytes or 1))


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    mw.plan(*_flat(mlp(2)), mesh=Mesh.abstract((2, 2), 1.0, 1e-3))  # loads compiled kernels
    rows: list[tuple[float, float, tuple[object, ...]]] = []
    for name, make in MODELS.items():
        if name.startswith(wanted):
            rows += _rows(name, make())
    worst = ("worst", "", "", "", f"{max(r[0] for r in rows):.1f} s", "", f"{100 * max(r[1] for r in rows):.1f}%")
    header = ("model", "mesh", "part", "limit", "planned in", "status", "gap")
    table("Toys", __doc__ or "", header, [*(row for _, _, row in rows), worst])


def _flat(program: Program) -> tuple[Any, ...]:
    return program[0], *program[1]


def _rows(name: str, program: Program) -> Iterator[tuple[float, float, tuple[object, ...]]]:
    traced = trace(*_flat(program))
    for where, mesh, method_of in meshes():
        free = Task(traced, mw.Auto()).plan([mesh], lambda _: None)
        _, least = least_memory(Task(traced, mw.Auto()).formulate(mesh))
        for part in PARTS:
            limit = int(least + part * max(free.memory.peak_bytes - least, 0))
            machine = Mesh.abstract(mesh.sizes, mesh.alpha, mesh.beta, limit) if mesh.is_abstract else mesh
            started = time.perf_counter()
            try:
                solution = Task(traced, method_of(limit)).plan([machine], lambda _: None).solution
                status, gap = solution.status, solution.gap
            except mw.DoesNotFit:
                status, gap = "does not fit", 0.0
            taken = time.perf_counter() - started
            print(name, where, part, limit, f"{taken:.1f} s", status, f"{100 * gap:.1f}%", file=sys.stderr, flush=True)
            yield taken, gap, (name, where, part, limit, f"{taken:.1f} s", status, f"{100 * gap:.1f}%")


if __name__ == "__main__":
    main()
