"""How much longer does a step of a pipeline take in several processes than in one, on the same cores?

A GPT of 2 or 4 equal stages on virtual CPU devices runs in one process, and with a process for each stage; both have as
many cores as there are stages. `step` is the median of the steps, `ratio` that of several processes over that of one;
`CPU` is the processor time of a step, of all processes together, which other work on a shared machine disturbs less.
In several processes arrays go by sockets or by Gloo, whatever is faster when they start.
Asked: at most 1.15.

    python benchmarks/process_ratio.py [--stages 2 4] [--hidden 256 512] [--steps 30]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

SEQ, MICROBATCHES = 128, 8


def child(stages: int, hidden: int, steps: int) -> None:
    import jax
    import numpy as np

    import meshwright as mw
    from meshwright import zoo
    from meshwright.runtime.transfer.choice import chosen

    if "JAX_NUM_PROCESSES" in os.environ:
        mw.initialize(timeout=600, heartbeat=100)
    kinds = {"batch": 2 * MICROBATCHES, "dtype": "float32"}
    model = zoo.build("gpt-tiny", layers=stages, hidden=hidden, seq=SEQ, positions=SEQ, **kinds)
    recipe = mw.ThreeD(pipeline=stages, microbatch=2)
    step = mw.parallelize(model.train_step, method=recipe)
    batch = jax.tree.map(lambda kind: np.zeros(kind.shape, kind.dtype), model.batch)
    step.plan(model.state, batch)
    state = mw.create_state(model.init, jax.random.key(0), like=step)
    times, warm = [], steps // 3
    for number in range(steps):
        began = time.perf_counter()
        if number == warm:
            cpu = time.process_time()
        state, loss = step(state, batch)
        jax.block_until_ready([x for x in jax.tree.leaves((state, loss)) if x.addressable_shards])
        times.append(time.perf_counter() - began)
    cpu = (time.process_time() - cpu) / (steps - warm)
    print("FOUND", statistics.median(times[warm:]), cpu, chosen().name, flush=True)


def step_s(stages: int, hidden: int, steps: int, processes: int) -> tuple[float, float, str]:
    """The slowest process's median step, the processor time of a step of all of them, and how arrays went."""
    own = [__file__, "--child", str(stages), str(hidden), str(steps)]
    each = str(stages // processes)
    launch = ["-m", "meshwright", "launch", "--processes", str(processes), "--devices-per-process", each]
    cores = sorted(os.sched_getaffinity(0))[:stages]
    settings = {"MESHWRIGHT_MEASURE": "never", "JAX_PLATFORMS": "cpu", "MESHWRIGHT_PROGRESS": "0"}
    if processes == 1:
        settings |= {"JAX_NUM_CPU_DEVICES": each}
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(
            ["taskset", "-c", ",".join(map(str, cores)), sys.executable, *(launch if processes > 1 else []), *own],
            stdout=log,
            stderr=log,
            env=os.environ | settings,
            check=False,
        )
        log.seek(0)
        text = log.read()
    found = [line.split("FOUND ")[1].split() for line in text.splitlines() if "FOUND " in line]
    if done.returncode or len(found) != processes:
        raise SystemExit(f"{processes} processes ended with {done.returncode}:\n{text[-3000:]}")
    return max(float(row[0]) for row in found), sum(float(row[1]) for row in found), found[0][2]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--child", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    from report import table

    rows = []
    for stages in options.stages:
        for hidden in options.hidden:
            found = [step_s(stages, hidden, options.steps, n) for n in (1, stages)]
            figures = []
            for one_s, more_s in zip(*(row[:2] for row in found), strict=True):  # of the clock, of the processor
                figures += [f"{1e3 * one_s:.1f} ms", f"{1e3 * more_s:.1f} ms", f"{more_s / one_s:.2f}"]
            rows.append((stages, hidden, *figures, found[1][2]))
            print(*rows[-1], flush=True)
    load = f"Load of the machine in the last 15 minutes: {os.getloadavg()[2]:.0f} on {os.cpu_count()} cores."
    columns = ("step in one process", "in several", "ratio", "CPU in one", "in several", "ratio", "arrays go by")
    header = ("stages and processes", "hidden size", *columns)
    table("Process ratio", f"{(__doc__ or '').split(chr(10) * 2 + '    python')[0]}\n\n{load}", header, rows)


if __name__ == "__main__":
    main()
