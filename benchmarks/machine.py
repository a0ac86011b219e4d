"""How well do figures measured once on this machine, and those of the catalogue, predict other work on it?

Work that was not timed for the figures: products of other shapes, elementwise work, convolutions with few and with many
features, collectives of other sizes among other groups, and whole training steps, all on 8 virtual CPU devices at once
unless JAX_PLATFORMS says otherwise. The figures and the work are timed in the same rounds, so that others who use the
machine disturb both alike.
"""

import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
sys.path.insert(0, str(Path(__file__).parent))

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.hardware.collectives import KINDS
from meshwright.hardware.load import local_cluster
from meshwright.profiler.local import measured_cluster
from meshwright.profiler.measure import time_probes
from meshwright.profiler.probes import collective_probe, looped, probes, window_probe
from meshwright.profiler.survey import Survey, this_machine
from meshwright.runtime.spmd import spmd

STEPS = 20


@dataclass(frozen=True)
class Work:
    """Something to time and to predict; `what` to `unroll` are what `time_probes` asks for."""

    what: str
    body: Callable[..., Any]
    arrays: tuple[np.ndarray, ...]
    predict: Callable[[mw.Cluster], float]
    amount: float = 0.0
    dtype: str = "float32"
    size: int = 1
    across: bool = False
    unroll: int = 1
    flops: float = 0.0

    def compile(self) -> Callable[[int], Any]:
        return looped(self.body, self.arrays, (jax.device_count(), 1, 1))


def product(m: int, k: int, n: int, dtype: str) -> Work:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype(jnp.dtype(dtype)) / np.sqrt(s[0]).astype(dtype) for s in ((m, k), (k, n)))
    y = np.zeros((m, n), x.dtype)
    num_bytes = x.nbytes + w.nbytes + y.nbytes

    def predict(machine: mw.Cluster) -> float:
        return machine.chip.launch_s + machine.chip.matmul_s(2 * m * k * n, dtype, num_bytes)

    def body(x: Any, w: Any, y: Any) -> Any:
        y = x @ w
        return x.at[0, 0].set(y[0, 0]), w, y

    return Work(f"product {m} × {k} × {n}, {dtype}", body, (x, w, y), predict)


def stream(
    name: str, body: Callable[..., Any], num_arrays: int, moved: int, megabytes: float, functions: int = 0
) -> Work:
    length = int(megabytes * 2**20) // 4
    arrays = tuple(np.ones(length, np.float32) for _ in range(num_arrays))

    def predict(machine: mw.Cluster) -> float:
        return machine.chip.memory_s(4 * length * moved) + machine.chip.special_s * length * functions

    return Work(f"{name}, {megabytes:g} MiB", body, arrays, predict)


def convolution(batch: int, side: int, inputs: int, outputs: int, window: int, stride: int) -> Work:
    probe = window_probe(jax.device_count(), batch, side, inputs, outputs, window, stride)

    def predict(machine: mw.Cluster) -> float:
        chip = machine.chip
        return chip.launch_s + chip.matmul_s(probe.flops, "float32") + chip.fetch_s * probe.amount

    name = f"convolution {window} × {window}, {inputs} → {outputs} features, stride {stride}"
    return Work(name, probe.body, probe.arrays(), predict)


def works() -> list[Work]:
    return [
        product(96, 96, 96, "float32"),
        product(128, 512, 128, "float32"),
        product(32, 256, 1024, "float32"),
        product(128, 512, 128, "bfloat16"),
        stream("x + y", lambda x, y: (x + y, y), 2, 3, 0.5),
        stream("x + y", lambda x, y: (x + y, y), 2, 3, 4),
        stream("max(x, 0)", lambda x: (jnp.maximum(x - 1e-3, 0),), 1, 2, 1),
        stream("tanh(x)", lambda x: (jnp.tanh(x),), 1, 2, 1, functions=1),
        *(convolution(2, 32, 3, outputs, 7, 2) for outputs in (2, 16, 64)),
        *(convolution(4, 8, inputs, outputs, 3, 1) for inputs, outputs in ((4, 32), (32, 4), (32, 32))),
    ]


def groups() -> list[int]:
    count = jax.device_count()
    return [size for size in (2, 4, 8) if size <= count and count % size == 0]


def steps(machine: mw.Cluster) -> list[tuple[str, float, float, float]]:
    """Whole training steps: predicted with measured figures and with the catalogue's, and timed."""
    found = []
    for name, sizes in (("mlp", {"batch": 256, "hidden": 256}), ("gpt-tiny", {"batch": 16, "seq": 64, "hidden": 128})):
        example = zoo.build(name, **sizes, dtype="float32")
        args = (example.train_step, example.state, example.batch)
        for method in (mw.DataParallel(), mw.Zero(3), mw.TensorParallel()):
            mesh = (jax.device_count(),)
            plan = mw.plan(*args, cluster=machine, mesh=mesh, method=method)
            paper = mw.plan(*args, cluster=local_cluster(), mesh=mesh, method=method)
            run, state, batch = spmd(plan, example.train_step), example.init(0), example.sample(0)
            best = float("inf")
            for _ in range(STEPS):
                started = time.perf_counter()
                state, _ = jax.block_until_ready(run(state, batch))
                best = min(best, time.perf_counter() - started)
            found.append((f"step of {name}, {method.name}", plan.step_s, paper.step_s, best))
    return found


def main() -> None:
    here, paper, count = this_machine(), local_cluster(), jax.device_count()
    usual, todo = probes(here), works()
    others = [
        collective_probe(kind, num_bytes, (count // size, size, 1))
        for size in groups()
        for kind in KINDS
        for num_bytes in (2**15, 3 * 2**18)
    ]
    readings = time_probes([*usual, *todo, *others], rounds=30, patience=60)
    survey = Survey(here, str(date.today()), 0.0, os.getloadavg()[0], None, readings[: len(usual)])
    machine = measured_cluster(paper, survey)
    rows = []
    for work, reading in zip(todo, readings[len(usual) :], strict=False):
        rows.append((work.what, work.predict(machine), work.predict(paper), reading.seconds))
    for probe, reading in zip(others, readings[len(usual) + len(todo) :], strict=True):
        mesh = (count,) if probe.size == count else (count // probe.size, probe.size)
        times = [m.mesh(mesh).collective_s(probe.what, (len(mesh) - 1,), probe.amount) for m in (machine, paper)]
        name = f"{probe.what.replace('_', '-')} of {probe.amount / 1024:g} KiB among {probe.size}"
        rows.append((name, times[0], times[1], reading.seconds))
    rows += steps(machine)
    question = (
        f"{(__doc__ or '').splitlines()[0]}\n\n{survey.load:.0f} processes were running on {here.num_cpus} cores. "
        "Ratios are predicted to timed."
    )
    header = ("work on each of the devices", "timed", "by measured figures", "by the catalogue")
    table("Machine", question, header, [_row(*row) for row in rows])


def _row(name: str, measured_s: float, paper_s: float, timed_s: float) -> tuple[str, ...]:
    return name, f"{timed_s * 1e6:,.0f} µs", f"{measured_s / timed_s:.2f}×", f"{paper_s / timed_s:.2f}×"


if __name__ == "__main__":
    main()
