"""Do 64 real processes on one machine start, train and end?

`meshwright launch` starts them, each with one virtual device; they train a tiny model by data parallelism for 20 steps,
and save once. `memory` is what all of them together take at most, shared pages counted once (PSS); `connections` the
most that one process has to others for control, of what `mw.initialize` made.

    python benchmarks/many_processes.py [--processes 64]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

TRAIN = """
import sys, time
import jax, jax.numpy as jnp, numpy as np
import meshwright as mw
from meshwright.runtime.processes import peers

began = time.time()
mw.initialize(timeout=600, heartbeat=100)
met = time.time()

def train_step(w, x):
    loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * grad, loss

step = mw.parallelize(train_step, method=mw.DataParallel())
w, rows = np.ones((4, 1), np.float32), jax.device_count()
batches = [np.full((1, 4), jax.process_index(), np.float32) / rows] * 20
losses, ready = [], 0.0
for x in mw.batches(batches, step):
    w, loss = step(w, x)
    losses.append(float(loss))
    ready = ready or time.time()
trained = time.time()
mw.save(sys.argv[1], 20, w)
print("FOUND", len(peers.current._connections), met - began, ready - met, (trained - ready) / 19, time.time() - trained,
      losses[0], losses[-1], flush=True)
"""


def pss_bytes(pid: int) -> int:
    """The memory of a process and its children, shared pages by their share."""
    total = 0
    for child in Path("/proc").glob("[0-9]*"):
        try:
            if int((child / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                total += 1024 * int(re.search(r"^Pss:\s+(\d+)", (child / "smaps_rollup").read_text(), re.M)[1])
        except (OSError, TypeError):  # it has ended
            continue
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=64)
    count = parser.parse_args().processes
    with tempfile.TemporaryDirectory() as folder:
        script, log = Path(folder, "train.py"), Path(folder, "log")
        script.write_text(TRAIN)
        command = [sys.executable, "-m", "meshwright", "launch", "--processes", str(count), str(script)]
        settings = {"JAX_PLATFORMS": "cpu", "MESHWRIGHT_MEASURE": "never", "OMP_NUM_THREADS": "1"}
        began, most, load = time.monotonic(), 0, os.getloadavg()[0]
        with log.open("w") as output:
            run = subprocess.Popen(
                [*command, f"{folder}/saved"], env=os.environ | settings, stdout=output, stderr=output
            )
            while run.poll() is None:
                most = max(most, pss_bytes(run.pid))
                time.sleep(5)
        took = time.monotonic() - began
        found = [list(map(float, line.split()[2:])) for line in log.read_text().splitlines() if "] FOUND " in line]
        if run.returncode or len(found) < count:
            print(log.read_text()[-6000:])
            raise SystemExit(f"the run ended with {run.returncode}; {len(found)} of {count} processes trained")
    assert len({tuple(row[-2:]) for row in found}) == 1, "all have the same losses"
    connections, met, first, step, save, *losses = (max(column) for column in zip(*found, strict=True))
    rows = [
        ("processes that started, trained and ended well", len(found)),
        ("all of it", f"{took:.0f} s"),
        ("the slowest met the others after its imports in", f"{met:.1f} s"),
        ("the first step with planning and compiling", f"{first:.1f} s"),
        ("a further step", f"{1e3 * step:.0f} ms"),
        ("the save", f"{save:.1f} s"),
        ("losses of the first and the last step, in all", f"{losses[0]:.6f}, {losses[1]:.6f}"),
        ("connections", f"{connections:.0f}"),
        ("memory", f"{most / 2**30:.1f} GiB"),
    ]
    note = f"At the start {load:.0f} processes of others were running on {os.cpu_count()} cores."
    table("Many processes", f"{(__doc__ or '').strip()}\n\n{note}", ("what", "found"), rows)


if __name__ == "__main__":
    main()
