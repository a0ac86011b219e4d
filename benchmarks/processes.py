"""How long after a fault in one of two processes do both leave, and in which words? Asked: 15 s, the cause named.

A process that is stopped is one after a heartbeat of 10 s, and one that is stuck is named after `deadline`, 2 s here,
and ends the run after ten times as long; one that is slow is named, and the run goes on to its end.

    python benchmarks/processes.py [--cases killed stopped stuck slow …]
"""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import kept, table

FAULT_AT = 3  # batches that go well
SLOW_STEPS, SLOW_S = 40, 0.2
DEADLINES = {"stuck": 2.0}
CASES = {
    "none": "none: both come to their end",
    "killed": "process 1 is killed (SIGKILL)",
    "first": "process 0 is killed (SIGKILL)",
    "stopped": "process 1 is stopped (SIGSTOP)",
    "stuck": "process 1's loader waits for ever (deadline=2)",
    "slow": "process 1 takes 0.2 s between steps",
    "error": "process 1's own code raises",
    "exit": "process 1 calls sys.exit",
    "loader": "process 1's loader raises",
    "fewer": "process 1 has fewer batches",
    "part": "process 1 has a smaller part of a batch",
    "types": "process 1 calls with another shape",
    "absent": "process 1 never comes (timeout=5)",
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        case, port, process = options.child
        return _child(case, port, int(process))
    rows = kept("Processes") | {CASES[case]: [CASES[case], *_run(case)] for case in options.cases}
    header = ("fault", "process 0 leaves after", "process 1 leaves after", "its last line", "C++ lines before")
    table("Processes", __doc__ or "", header, [rows[name] for name in CASES.values() if name in rows])
    return None


def _run(case: str) -> tuple[str, str, str, str]:
    """Seconds from the fault to the end of each process, and what a survivor said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "MESHWRIGHT_MEASURE": "never"}
    command = [sys.executable, __file__, "--child", case, str(port)]
    children = {
        process: subprocess.Popen(
            [*command, str(process)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for process in range(1 if case == "absent" else 2)
    }
    ends: dict[int, float] = {}
    while len(ends) < len(children):
        ends |= {p: time.time() for p, child in children.items() if p not in ends and child.poll() is not None}
        if case == "stopped" and 0 in ends:  # a launcher kills it now
            children[1].kill()
        time.sleep(0.02)
    said = {process: child.communicate() for process, child in children.items()}
    told = [line.split() for out, _ in said.values() for line in out.splitlines()]
    faults = [float(words[1]) for words in told if words[:1] == ["FAULT"]]
    leaves = [f"{ends[p] - min(faults):.1f} s" if p in ends else "–" for p in (0, 1)]
    lines = said[1 if case == "first" else 0][1].strip().splitlines() or ["nothing"]
    stack = sum(".cc:" in line or ".h:" in line for line in lines)
    return (
        leaves[0],
        leaves[1],
        lines[-1].replace("|", "/").replace(f"{Path(__file__).parents[1]}/", "").strip(),
        str(stack),
    )


def _child(case: str, port: str, process: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import meshwright as mw

    def fault(where: int, *cases: str) -> bool:
        if case in cases and process == where:
            print("FAULT", time.time(), flush=True)
            return True
        return False

    def loader() -> Iterator[np.ndarray]:
        for i in range(FAULT_AT + 2):
            if i == FAULT_AT and fault(1, "loader"):
                raise ValueError("record 17 is damaged")
            if i == FAULT_AT and fault(1, "fewer"):
                return
            rows = 3 if i == FAULT_AT and fault(1, "part") else 4
            if i == FAULT_AT and fault(1, "stuck"):
                threading.Event().wait()
            yield np.ones((rows, 8), np.float32)
        yield from [np.ones((4, 8), np.float32)] * (SLOW_STEPS if case == "slow" else 0)

    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, loss

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    fault(0, "absent")
    mw.initialize(f"127.0.0.1:{port}", 2, process, timeout=5 if case == "absent" else 300, deadline=DEADLINES.get(case))
    step = mw.parallelize(train_step, cluster="2x1 cpu", method=mw.DataParallel())
    w = np.ones((8, 8), np.float32)
    for i, x in enumerate(mw.batches(loader(), step)):
        if i == FAULT_AT:
            if fault(1, "killed") or fault(0, "first"):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault(1, "stopped"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if fault(1, "error"):
                raise KeyError("no such metric")
            if fault(1, "exit"):
                sys.exit(3)
        w, loss = step(w, np.ones((4, 8), np.float32) if i == FAULT_AT and fault(1, "types") else x)
        float(loss)
        if case == "slow" and process == 1:
            time.sleep(SLOW_S)
    fault(0, "none", "slow")


if __name__ == "__main__":
    main()
