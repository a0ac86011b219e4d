"""Operations alone on one device, which `grid.py` times."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
