"""How long after a fault in one of two processes do both leave, and in which words? Asked: 15 s, the cause named."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

FAULT_AT = 3  # batches that go well
CASES = {
    "none": "none: both come to their end",
    "killed": "process 1 is killed (SIGKILL)",
    "first": "process 0 is killed (SIGKILL)",
    "error": "process 1's own code raises",
    "exit": "process 1 calls sys.exit",
    "loader": "process 1's loader raises",
    "fewer": "process 1 has fewer batches",
    "part": "process 1 has a smaller part of a batch",
    "types": "process 1 calls with another shape",
    "absent": "process 1 never comes (timeout=5)",
}


def main() -> None:
    rows = [(CASES[case], *_run(case)) for case in CASES]
    header = ("fault", "process 0 leaves after", "process 1 leaves after", "its last line", "C++ lines before")
    table("Processes", __doc__ or "", header, rows)


def _run(case: str) -> tuple[str, str, str, str]:
    """Seconds from the fault to the end of each process, and what a survivor said."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=1", "MESHWRIGHT_MEASURE": "never"}
    command = [sys.executable, __file__, case, str(port)]
    children = {
        process: subprocess.Popen(
            [*command, str(process)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for process in range(1 if case == "absent" else 2)
    }
    ends: dict[int, float] = {}
    while len(ends) < len(children):
        ends |= {p: time.time() for p, child in children.items() if p not in ends and child.poll() is not None}
        time.sleep(0.02)
    said = {process: child.communicate() for process, child in children.items()}
    told = [line.split() for out, _ in said.values() for line in out.splitlines()]
    faults = [float(words[1]) for words in told if words[:1] == ["FAULT"]]
    leaves = [f"{ends[p] - min(faults):.1f} s" if p in ends else "–" for p in (0, 1)]
    lines = said[1 if case == "first" else 0][1].strip().splitlines() or ["nothing"]
    stack = sum(".cc:" in line or ".h:" in line for line in lines)
    return leaves[0], leaves[1], lines[-1].replace("|", "/"), str(stack)


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
            yield np.ones((rows, 8), np.float32)

    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * gradient, loss

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    fault(0, "absent")
    mw.initialize(f"127.0.0.1:{port}", 2, process, timeout=5 if case == "absent" else 300)
    step = mw.parallelize(train_step, cluster="2x1 cpu", method=mw.DataParallel())
    w = np.ones((8, 8), np.float32)
    for i, x in enumerate(mw.batches(loader(), step)):
        if i == FAULT_AT:
            if fault(1, "killed") or fault(0, "first"):
                os.kill(os.getpid(), signal.SIGKILL)
            if fault(1, "error"):
                raise KeyError("no such metric")
            if fault(1, "exit"):
                sys.exit(3)
        w, loss = step(w, np.ones((4, 8), np.float32) if i == FAULT_AT and fault(1, "types") else x)
        float(loss)
    fault(0, "none")


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    else:
        main()
