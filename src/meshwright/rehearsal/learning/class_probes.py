"""Small train steps that are full of one class of operations, to learn the efficiency of each class on this machine."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.graph import trace
from meshwright.hardware import Cluster
from meshwright.planner.budget import Budget
from meshwright.planner.methods import DataParallel
from meshwright.planner.planner import plan_program
from meshwright.profiler.measurements import Database
from meshwright.progress import Say
from meshwright.rehearsal.learning.calibration import keep_work
from meshwright.rehearsal.learning.from_parts import Measured
from meshwright.rehearsal.measuring import Candidate, Measuring
from meshwright.rehearsal.parts import parts_of
from meshwright.runtime.spmd import device_mesh

SECONDS = 120.0  # no probe is begun after that

Probe = tuple[str, Callable[..., Any], tuple[Any, ...]]


def _products(x: Any, w: Any) -> jax.Array:
    return jax.nn.relu(x @ w) @ w.T


def _small_products(x: Any, w: Any) -> jax.Array:
    return jnp.einsum("bnsh,bnth->bnst", x * w, x)


def _convolutions(x: Any, w: Any) -> jax.Array:
    conv = partial(jax.lax.conv_general_dilated, dimension_numbers=("NHWC", "HWIO", "NHWC"), padding="SAME")
    return conv(jax.nn.relu(conv(x, w, (1, 1))), w, (1, 1))


def _elementwise(x: Any, w: Any) -> jax.Array:
    wide = x.astype(jnp.float32)
    normal = (wide - wide.mean(-1, keepdims=True)) * jax.lax.rsqrt(wide.var(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normal.astype(x.dtype) * w)


def _look_ups(tokens: Any, table: Any) -> jax.Array:
    return table[tokens]


def _attention(x: Any, w: Any) -> jax.Array:
    return jax.nn.dot_product_attention(x * w, x, x, is_causal=True, implementation="cudnn")


def probes(platform: str, num_devices: int) -> list[Probe]:
    """The probes of a platform, with the types of their arguments, which all devices share."""
    small = platform == "cpu"
    dtype, batch, width = ("float32", 4, 64) if small else ("bfloat16", 16, 2048)

    def kind(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape[0] * num_devices, *shape[1:]), dtype)

    def whole(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    side, features = (16, 8) if small else (56, 256)
    found: list[Probe] = [
        ("products", _products, (kind(batch * 512, width), whole(width, 2 * width))),
        ("convolutions", _convolutions, (kind(batch, side, side, features), whole(3, 3, features, features))),
        ("elementwise work", _elementwise, (kind(batch * 256, width), whole(width))),
        ("small products", _small_products, (kind(batch, 8, 64, 64), whole(64))),
        ("look-ups", _look_ups, (kind(batch * 64, dtype="int32"), whole(8 * width, width))),
    ]
    if platform == "gpu":
        found.append(("attention", _attention, (kind(batch // 4, 1024, 16, 64), whole(64))))
    return found


def calibrate(cluster: Cluster, database: Database, say: Say = lambda _: None, seconds: float = SECONDS) -> list[str]:
    """Measures the probes on the local devices, and keeps the work of each class.

    Args:
        cluster: The local machine, all devices in this process.
        database: Where the results are kept.
        say: Called with a word on each stage.
        seconds: No probe but the first begins after that.

    Returns:
        What could not be measured, a sentence each.
    """
    mesh, remarks = cluster.mesh((cluster.num_devices,)), []
    device, started = jax.local_devices()[0], time.perf_counter()
    for number, (name, function, types) in enumerate(probes(device.platform, cluster.num_devices)):
        if number and time.perf_counter() - started > seconds:
            remarks.append(f"There was no time for {name}.")
            continue
        say(f"measuring {name}")
        traced = trace(_step(function), *types, cluster=cluster)
        plan = plan_program(traced, [mesh], DataParallel(), lambda _: None, Budget(None))
        traced = replace(traced, graph=traced.graph.for_cpu()) if mesh.is_cpu else traced
        devices = device_mesh(plan) if cluster.num_devices > 1 else None
        candidates = [Candidate(plan, traced, part, devices) for part in parts_of(plan, traced.graph)]
        measuring = Measuring(device, database, fresh=True)
        found = measuring.measure(candidates)
        rows = [Measured(plan, c.part, found.get(c.key(device))) for c in candidates]
        keep_work(database, rows, traced.graph)
        remarks += measuring.remarks
    return remarks


def _step(function: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient of a function by its weights and, where it can be, by its data."""

    def step(x: Any, w: Any) -> jax.Array | tuple[jax.Array, jax.Array]:
        by = (0, 1) if jnp.issubdtype(x.dtype, jnp.inexact) else 1
        return jax.grad(lambda x, w: jnp.sum(function(x, w).astype(jnp.float32) ** 2), by)(x, w)

    return step
