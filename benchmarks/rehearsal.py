"""Does one device's share of a plan measure what the whole plan does?

`memory` compiles plans for eight virtual CPU devices and, of each, one device's share alone: bytes and FLOPs of both.
On a GPU, `step` times real steps beside rehearsed ones, in turn.

python benchmarks/rehearsal.py [memory] [step]
"""

import os
import sys
import tempfile
import time
from pathlib import Path

MODES = [word for word in sys.argv[1:] if not word.startswith("-")] or ["memory"]
if "step" not in MODES:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MESHWRIGHT_CACHE", tempfile.mkdtemp())
sys.path.insert(0, str(Path(__file__).parent))

import jax
from report import table

import meshwright as mw
from meshwright import zoo
from meshwright.rehearsal.share.program import Share
from meshwright.runtime.checking.compiled import flops_of
from meshwright.runtime.checking.verify import allocated_bytes

MEMORY = [
    ("gpt-tiny", "zero3", (8,), {}),
    ("gpt-tiny", "tensor", (2, 4), {}),
    ("llama-tiny", "zero3", (8,), {"scan": True, "checkpoint": True}),
    ("llama-tiny", "auto", (2, 4), {}),
    ("moe-tiny", "auto", (2, 4), {}),
    ("bert-tiny", "zero3", (8,), {}),
    ("wide-resnet-tiny", "data", (8,), {}),
]
STEPS = [
    ("bert-large", {"batch": 32, "seq": 512, "layers": 2}),
    ("vit-l16", {"batch": 256, "layers": 2, "attention": "plain"}),
    ("gpt2-774m", {"batch": 8, "seq": 1024, "layers": 2}),
    ("llama3-8b", {"batch": 2, "seq": 4096, "layers": 2}),
    ("mixtral-8x7b", {"batch": 1, "seq": 4096, "layers": 1}),
    ("gshard-moe-380m", {"batch": 8, "seq": 1024, "layers": 2}),
    ("wide-resnet-50-2", {"batch": 128}),
    ("unet-cifar10", {"batch": 128}),
]
QUESTION = (__doc__ or "").split("\n")[0]


def memory_rows() -> None:
    """Bytes and FLOPs of the share and of the program on all devices."""
    rows = []
    for name, method, mesh, options in MEMORY:
        example = zoo.build(name, **options)
        plan = mw.plan(example.train_step, example.state, example.batch, cluster="1x8 cpu", mesh=mesh, method=method)
        found = plan.rehearse(steps=0)
        whole = plan.verify()
        ratio = f"{found.memory.compiled / whole.memory.compiled:.3f}"
        sizes = [f"{n / 2**20:.2f}" for n in (plan.memory.peak_bytes, found.memory.compiled, whole.memory.compiled)]
        flops = f"{found.flops.compiled / whole.flops.compiled:.4f}"
        rows.append((f"{name} {' '.join(options)}", f"{method} {'×'.join(map(str, mesh))}", *sizes, ratio, flops))
    header = (
        "model",
        "plan",
        "planned MiB",
        "rehearsed MiB",
        "compiled MiB",
        "rehearsed ÷ compiled",
        "FLOPs, likewise",
    )
    table("Rehearsed memory", QUESTION, header, rows)


def step_rows() -> None:
    """Real and rehearsed steps on one device, in turn."""
    rows, device = [], jax.devices()[0]
    for name, options in STEPS:
        example = zoo.build(name, **options)
        args = (example.train_step, example.state, example.batch)
        plan = mw.plan(*args, cluster="1x1 h200", mesh=(1,))
        share = Share.of(plan, plan.origin)
        mine, real = share.compile(device), example.train_step.lower(example.state, example.batch).compile()
        state, batch = jax.jit(example.init)(jax.random.key(0)), jax.jit(example.sample)(jax.random.key(1))
        values, best = share.draw(device, jax.tree.leaves((state, batch))), [float("inf"), float("inf")]
        for _ in range(6):
            started = time.perf_counter()
            state, loss = real(state, batch)
            jax.block_until_ready((state, loss))
            between = time.perf_counter()
            values = jax.block_until_ready(share.step(mine, values))
            best = [min(best[0], between - started), min(best[1], time.perf_counter() - between)]
        sizes = (allocated_bytes(mine) / allocated_bytes(real), flops_of(mine.as_text()) / flops_of(real.as_text()))
        times = (f"{1e3 * best[0]:.2f}", f"{1e3 * best[1]:.2f}", f"{best[1] / best[0]:.3f}", f"{1e3 * plan.step_s:.2f}")
        rows.append((f"{name} {options}", *times, *(f"{ratio:.3f}" for ratio in sizes)))
    header = ("model", "real, ms", "rehearsed, ms", "ratio", "planned, ms", "memory, ratio", "FLOPs, ratio")
    table("Rehearsed steps", QUESTION, header, rows)


def main() -> None:
    for mode in MODES:
        {"memory": memory_rows, "step": step_rows}[mode]()


if __name__ == "__main__":
    main()
