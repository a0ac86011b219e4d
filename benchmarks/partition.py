"""What happens when the network between two hosts is cut?

Two processes train in network namespaces of their own, which stand for hosts; then the link between them goes down.
`ends after` is when each process has ended, and `said` whether it named the other.

    sudo python benchmarks/partition.py [--cuts 3]

Asked: both end within 20 s and name each other. It needs root, `ip`, and folders in /etc/netns, which it removes.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from report import table

TRAIN = """
import jax, jax.numpy as jnp, numpy as np
import meshwright as mw

mw.initialize()

def train_step(w, x):
    return w - jax.grad(lambda w: jnp.mean(x @ w))(w), x.max()

step = mw.parallelize(train_step, method=mw.DataParallel())
w = np.ones((2, 1), np.float32)
for number in range(10**9):
    w, top = step(w, np.ones((4, 2), np.float32))
    float(top)
    if number == 5:
        print("training", flush=True)
"""
SPACES = ("meshwright0", "meshwright1")
PATIENCE_S = 120.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def hosts() -> Iterator[None]:
    """Two namespaces with a link between them, in which this host's name has their own addresses."""
    try:
        for number, space in enumerate(SPACES):
            folder = Path("/etc/netns") / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n10.77.0.{number + 1} {socket.gethostname()}\n")
            ip("netns", "add", space)
        ip("link", "add", "link0", "netns", SPACES[0], "type", "veth", "peer", "name", "link1", "netns", SPACES[1])
        for number, space in enumerate(SPACES):
            ip("-n", space, "addr", "add", f"10.77.0.{number + 1}/24", "dev", f"link{number}")
            for device in ("lo", f"link{number}"):
                ip("-n", space, "link", "set", device, "up")
        yield
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False, capture_output=True)
            shutil.rmtree(Path("/etc/netns") / space, ignore_errors=True)


def cut(folder: Path) -> list[tuple[float, bool]]:
    """For each process after how many seconds it ended, and whether it named the other one."""
    settings = {"JAX_COORDINATOR_ADDRESS": "10.77.0.1:29511", "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    logs = [folder / f"{number}.log" for number in range(2)]
    running = []
    with hosts():
        for number, space in enumerate(SPACES):
            command = ["ip", "netns", "exec", space, sys.executable, "-c", TRAIN]
            with logs[number].open("w") as log:
                env = os.environ | settings | {"JAX_PROCESS_ID": str(number)}
                running.append(subprocess.Popen(command, stdout=log, stderr=log, env=env))
        try:
            wait_for(lambda: all("training" in log.read_text() for log in logs))
            ip("-n", SPACES[0], "link", "set", "link0", "down")
            began, ended = time.monotonic(), [PATIENCE_S] * 2
            while time.monotonic() - began < PATIENCE_S and any(process.poll() is None for process in running):
                time.sleep(0.05)
                for number, process in enumerate(running):
                    if process.poll() is None:
                        ended[number] = time.monotonic() - began
        finally:
            for process in running:
                process.kill()
                process.wait()
    return [(ended[number], f"meshwright: process {1 - number} " in logs[number].read_text()) for number in range(2)]


def wait_for(is_there) -> None:
    began = time.monotonic()
    while not is_there():
        if time.monotonic() - began > PATIENCE_S:
            raise TimeoutError("the processes do not train")
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=3)
    rows = []
    if os.geteuid() or shutil.which("ip") is None:
        print("skipped: network namespaces need root and ip")
        return
    for number in range(parser.parse_args().cuts):
        with tempfile.TemporaryDirectory() as folder:
            for process, (ended_s, named) in enumerate(cut(Path(folder))):
                rows.append(
                    (number + 1, process, f"{ended_s:.1f} s", "names the other" if named else "does not name it")
                )
                print(*rows[-1], flush=True)
    table("Partition", (__doc__ or "").strip(), ("cut", "process", "ends after", "said"), rows)


if __name__ == "__main__":
    main()
