"""How much do 64 to 1,024 processes say to each other beside the data: at the start, in a step, a save, a restore?

Each process is a thread here, with the code that real processes run: they meet over sockets, watch each other along the
tree, agree on batches, and pass the barriers of a save and a restore of a state of 300 arrays in JAX's key-value store,
which is a counting stand-in. The store is in process 0, so all that others put there or read counts as its own, too.

    python benchmarks/control_plane.py [--processes 64 256 1024] [--children 2 4 8]

`connections` are the most of one process (JAX's own, one of each process to process 0, come on top); `busiest` is the
process that sends and receives most, `others` the median of the rest. A step has one batch; its figures are the mean of
20 steps of a second. `all know` is the time from the loss of the last process until all have learnt of it. A list of
what hosts have in memory is passed to all by their devices in a restore, and is not counted.
Asked: O(log n) connections and O(n) bytes a step.
"""

import argparse
import json
import resource
import socket
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from report import table

from meshwright import jax_devices
from meshwright.runtime.processes import agreement, connections, peers, rendezvous, tree
from meshwright.training.saving import barrier as save_barrier

STEPS, STEP_S, LEAVES, CHECKS = 20, 1.0, 300, 6
TYPES = {"state": "float32[4096, 4096]", "tokens": "int32[512, 4096]"}
here = threading.local()
traffic: Counter[int] = Counter()
counting = threading.Lock()


def count(process: int, num_bytes: int) -> None:
    with counting:
        traffic[process] += num_bytes


class Counted:
    """A connection whose bytes are counted for the process that has it."""

    def __init__(self, process: int, connection: socket.socket):
        self._process, self._connection = process, connection

    def sendall(self, data: bytes) -> None:
        count(self._process, len(data))
        self._connection.sendall(data)

    def recv(self, size: int) -> bytes:
        data = self._connection.recv(size)
        count(self._process, len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Store:
    """JAX's key-value store, which is in process 0."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._folders: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self._there: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self._lock = threading.Lock()

    def _count(self, num_bytes: int) -> None:
        count(0, num_bytes)
        if here.process:
            count(here.process, num_bytes)

    def publish(self, key: str, text: str) -> bool:
        self._count(len(key) + len(text))
        with self._lock:
            self._texts[key] = text
            folder, _, name = key.rpartition("/")
            self._folders[f"{folder}/"][name] = text
            self._there[key].set()
        return True

    def read(self, key: str, timeout_s: float) -> str | None:
        with self._lock:
            there = self._there[key]
        there.wait(timeout_s)
        text = self._texts.get(key)
        self._count(len(key) + len(text or ""))
        return text

    def all(self, folder: str) -> dict[str, str]:
        with self._lock:
            found = dict(self._folders[folder])
        self._count(len(folder) + sum(len(folder) + len(k) + len(v) for k, v in found.items()))
        return found

    def forget(self, key: str) -> None:
        with self._lock:
            for old in [k for k in self._texts if k.startswith(key)]:
                folder, _, name = old.rpartition("/")
                del self._texts[old], self._there[old], self._folders[f"{folder}/"][name]


class Counts(defaultdict[Any, int]):
    """A counter of a module, of which each process has its own."""

    def __init__(self) -> None:
        super().__init__(int)

    def __getitem__(self, key: Any) -> int:
        return super().__getitem__((here.process, key))

    def __setitem__(self, key: Any, value: int) -> None:
        super().__setitem__(key if isinstance(key, tuple) else (here.process, key), value)


def in_all(num: int, do: Callable[[int], Any]) -> list[Any]:
    """What each of so many processes returns."""
    found: dict[int, Any] = {}

    def run(process: int) -> None:
        here.process = process
        found[process] = do(process)

    threads = [threading.Thread(target=run, args=(process,)) for process in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[process] for process in range(num)]


def counted(num: int, do: Callable[[int], Any], times: int = 1) -> tuple[list[Any], str, str]:
    """What processes return, and the bytes of the busiest and of the others."""
    traffic.clear()
    found = in_all(num, do)
    each = sorted(traffic[process] / times for process in range(num))
    return found, size(each[-1]), size(statistics.median(each[:-1]))


def size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"


def send(connection: socket.socket, message: Any) -> bool:
    count(here.process, len(json.dumps(message)) + 1)
    return connections.send(connection, message)


def read_line(connection: socket.socket) -> bytes:
    line = connections.read_line(connection)
    count(here.process, len(line))
    return line


def meet(num: int) -> Callable[[int], dict[int, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    versions = {"meshwright": "0.1.0", "jax": "0.10.2", "jaxlib": "0.10.2"}
    options = {"timeout_s": 300.0, "heartbeat_s": 10.0, "versions": versions}
    return lambda process: rendezvous.meet(address, num, process, **options)


def step(members: list[peers.Peers]) -> Callable[[int], None]:
    def run(process: int) -> None:
        agreed = agreement.Agreement("train_step", lambda: False)
        for _ in range(STEPS):
            agreed.on_batch({"tokens": SimpleNamespace(shape=(512, 4096), dtype="int32")})
            members[process].num_batches += 1
            members[process].enter()
            members[process].announce("train_step", TYPES)
            time.sleep(STEP_S)

    return run


def save(process: int) -> None:
    barrier = save_barrier.SaveBarrier()
    barrier.agree("owners", [[0, 1]] * LEAVES, lambda _: [False] * LEAVES)
    barrier.agree(
        "checksums", {f"params/layer{i}/weights": [2**31, 2**31] for i in range(LEAVES)}, lambda all_: all_[0]
    )
    for i in range(CHECKS):  # Orbax's and ours
        barrier(f"check{i}")


def restore(process: int) -> None:
    barrier = save_barrier.SaveBarrier()
    barrier.agree("hosts", f"host{process // 8}", list)
    pieces = [[f"params/layer{i}/weights", [[process, process + 8], [0, 4096]]] for i in range(LEAVES)]
    barrier.agree("held", pieces if process % 8 == 0 else [], lambda _: None)


def one(num: int, num_children: int) -> list[tuple[Any, ...]]:
    tree.CHILDREN = rendezvous.CHILDREN = num_children
    began = time.monotonic()
    found, busiest, others = counted(num, meet(num))
    rows = [("start", busiest, others, f"{time.monotonic() - began:.1f} s")]
    most = max(map(len, found))
    left: dict[int, float] = {}
    members = [
        peers.Peers(process, {peer: Counted(process, c) for peer, c in found[process].items()}, 10.0)  # type: ignore[misc]
        for process in range(num)
    ]
    watching = [threading.Thread(target=member._listen, daemon=True) for member in members]

    def leave(member: peers.Peers) -> None:
        left[member.process] = time.monotonic()
        for connection in member._connections.values():
            connection.close()
        raise SystemExit

    peers.Peers._leave = leave  # type: ignore[method-assign]
    for thread in watching:
        thread.start()
    began = time.monotonic()
    _, busiest, others = counted(num, step(members), STEPS)
    rows.append(("a step", busiest, others, f"{(time.monotonic() - began) / STEPS:.1f} s"))
    for name, do in (("a save", save), ("a restore", restore)):
        began = time.monotonic()
        _, busiest, others = counted(num, do)
        rows.append((name, busiest, others, f"{time.monotonic() - began:.1f} s"))
    began = time.monotonic()
    for connection in found[num - 1].values():
        connection.shutdown(socket.SHUT_RDWR)
    for thread in watching:
        thread.join()
    rows.append(("all know", "", "", f"{max(left.values()) - began:.2f} s"))
    return [(num, num_children, most, *row) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--children", type=int, nargs="+", default=[2, 4, 8])
    args = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    store = Store()
    jax_devices.publish, jax_devices.read_published = store.publish, store.read
    jax_devices.all_published, jax_devices.forget_published = store.all, store.forget
    rendezvous.send, rendezvous.read_line = send, read_line  # type: ignore[attr-defined]
    rows, usual = [], tree.CHILDREN
    for num in args.processes:
        fake = SimpleNamespace(process_count=lambda num=num: num, process_index=lambda: here.process)
        agreement.jax = save_barrier.jax = fake  # type: ignore[attr-defined]
        for num_children in args.children if num == args.processes[len(args.processes) // 2] else [usual]:
            agreement._streams, save_barrier._saves = Counts(), Counts()  # type: ignore[assignment]
            jax_devices.forget_published("")
            rows += one(num, num_children)
            print(*rows[-5:], sep="\n", flush=True)
    header = ("processes", "children", "connections", "what", "bytes of the busiest", "of the others", "took")
    table("Control plane", (__doc__ or "").strip(), header, rows)


if __name__ == "__main__":
    main()
