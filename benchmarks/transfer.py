"""Does `mw.reshard` move arrays right, with the fewest bytes, and how long does that take?

Random pairs: shapes, dtypes, meshes of one to three axes on 1 to 8 of 8 virtual CPU devices in any order, and specs, as
drawn by `tests/runtime/transfer/pairs.py`; the devices stand for hosts of 1, 2, 4 or 8. Asked: all equal to the byte,
the bytes between hosts at the lower bound in 95%, and a call on equal layouts within 150 µs of the host's time in the
median. Host times last until a call returns. Times are medians of all calls; in brackets is the median of the quietest
of 40 rounds, since others may use the machine. Between two processes of 4 devices the clock runs in the receiver until
the data are there.

    python benchmarks/transfer.py [--pairs 500]
"""

import argparse
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]
from tests.compiling import FLAGS

DEVICES = "--xla_force_host_platform_device_count"
TIMED, STAGES = "timed", "stages"  # what child processes do
if len(sys.argv) < 2 or sys.argv[1] not in (TIMED, STAGES):
    os.environ["XLA_FLAGS"] = f"{DEVICES}=8 {FLAGS}"  # most of the time of random pairs goes into compiling
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from report import table

from meshwright.runtime.cpu_turns import add_threads
from meshwright.runtime.transfer.permutes import Permutes
from meshwright.runtime.transfer.pulls import Pulls
from meshwright.runtime.transfer.reshard import Transfer, boxes
from tests.runtime.transfer.bounds import least_bytes
from tests.runtime.transfer.pairs import as_bytes, random_pair

CALLS, ROUNDS = 600, 40
ACTIVATION = (256, 512)  # 0.5 MiB in float32
LARGE = (4096, 4096)  # 64 MiB
Row = tuple[str, str, str]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=500)
    rows: list[Row] = []
    count = parser.parse_args().pairs
    for part in (lambda: _children(TIMED, 1, 8)[0], lambda: _children(STAGES, 2, 4)[1], lambda: random_pairs(count)):
        for row in part():
            rows.append(tuple(row))
            print("| " + " | ".join(row) + " |", flush=True)  # a run that is cut short keeps what it printed
    load = f"{os.getloadavg()[0]:.0f} processes were running on {os.cpu_count()} cores."
    table("Transfer", f"{__doc__ or ''}\n{load}", ("figure", "found", "by `jax.device_put`"), rows)


def random_pairs(count: int) -> list[Row]:
    num_equal = num_least = num_moved_least = 0
    for seed in range(count):
        pair = random_pair(np.random.default_rng(10**6 + seed))
        per_host = (1, 2, 4, 8)[seed % 4]

        def host_of(device: Any, per_host: int = per_host) -> int:
            return int(device.id) // per_host

        array = jax.device_put(pair.values, pair.source)
        transfer = Transfer(array.shape, array.dtype, pair.source, pair.target, group_of=host_of)
        moved = transfer(array)
        num_equal += moved.sharding == pair.target and all(
            as_bytes(shard.data) == as_bytes(pair.values[shard.index]) for shard in moved.addressable_shards
        )
        held, needed = (boxes(pair.values.shape, sharding) for sharding in (pair.source, pair.target))
        bounds = least_bytes(held, needed, array.dtype.itemsize, host_of)
        num_least += transfer.route.crossing_bytes == bounds.crossing_bytes
        num_moved_least += transfer.route.moved_bytes == bounds.moved_bytes
    return [
        ("random pairs equal to the byte", f"{num_equal} of {count}", "–"),
        ("bytes between hosts at the lower bound", f"{num_least} of {count}", "–"),
        ("bytes between devices at the lower bound", f"{num_moved_least} of {count}", "–"),
    ]


def timed() -> list[Row]:
    """Calls in one process: seconds of the host for an activation, and bytes a second for a large array."""
    devices = np.array(jax.devices())
    a, b = Mesh(devices[:4], ("x",)), Mesh(devices[4:], ("x",))
    square = Mesh(devices[4:].reshape(2, 2), ("x", "y"))
    cases = {
        "one device to one": (SingleDeviceSharding(devices[0]), SingleDeviceSharding(devices[4])),
        "equal layouts, 4 devices to 4": (NamedSharding(a, PartitionSpec("x")), NamedSharding(b, PartitionSpec("x"))),
        "replicas, 4 to 4": (NamedSharding(a, PartitionSpec()), NamedSharding(b, PartitionSpec())),
        "rows to rows and columns, 4 to 2 × 2": (
            NamedSharding(a, PartitionSpec("x")),
            NamedSharding(square, PartitionSpec("x", "y")),
        ),
        "rows to columns, 4 to 4": (NamedSharding(a, PartitionSpec("x")), NamedSharding(b, PartitionSpec(None, "x"))),
        "rows to replicas, 4 to 4": (NamedSharding(a, PartitionSpec("x")), NamedSharding(b, PartitionSpec())),
    }
    pairs = list(cases.items())
    host = _in_turns([_host_s(*pair) for _, pair in pairs])
    large = _in_turns([_large_s(*pair) for _, pair in pairs])
    rows = [(f"host time, {name}", *map(_microseconds, case)) for (name, _), case in zip(pairs, host, strict=True)]
    return rows + [(f"64 MiB, {name}", *map(_rate, case)) for (name, _), case in zip(pairs, large, strict=True)]


def _in_turns(cases: Sequence[Iterator[list[list[float]]]]) -> list[list[list[list[float]]]]:
    """For each case and each way to move, the times of each round; the cases take turns."""
    rounds = [[next(case) for case in cases] for _ in range(ROUNDS)]
    return [[list(way) for way in zip(*case, strict=True)] for case in zip(*rounds, strict=True)]


def _microseconds(rounds: Sequence[Sequence[float]]) -> str:
    return "{:.0f} µs ({:.0f})".format(*(1e6 * seconds for seconds in _medians(rounds)))


def _rate(rounds: Sequence[Sequence[float]]) -> str:
    return "{:.1f} GB/s ({:.1f})".format(*(4 * math.prod(LARGE) / seconds / 1e9 for seconds in _medians(rounds)))


def _medians(rounds: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The median of all times, and that of the quietest round."""
    return statistics.median(t for times in rounds for t in times), min(map(statistics.median, rounds))


def _host_s(source: Any, target: Any) -> Iterator[list[list[float]]]:
    """Times until a call returns, by `Transfer` and `jax.device_put`, on arrays that a program has just made."""
    make = jax.jit(lambda i: jax.lax.broadcast(i, ACTIVATION), out_shardings=source)
    transfer = Transfer(ACTIVATION, np.dtype("float32"), source, target)
    moves = [transfer, lambda array: jax.device_put(array, target)]
    while True:
        times: list[list[float]] = [[] for _ in moves]
        for i in range(CALLS // ROUNDS):
            for move, spent in zip(moves, times, strict=True):
                array = jax.block_until_ready(make(np.float32(i)))
                start = time.perf_counter()
                moved = move(array)
                spent.append(time.perf_counter() - start)
                jax.block_until_ready(moved)
        yield times


def _large_s(source: Any, target: Any) -> Iterator[list[list[float]]]:
    """Times until the data are there, likewise."""
    transfer = Transfer(LARGE, np.dtype("float32"), source, target)
    while True:
        array = jax.block_until_ready(jax.device_put(np.ones(LARGE, np.float32), source))
        times = []
        for move in (transfer, lambda array: jax.device_put(array, target)):
            start = time.perf_counter()
            jax.block_until_ready(move(array))
            times.append([time.perf_counter() - start])
        yield times


def stages(process: int, port: str) -> list[Row]:
    """Between two processes, by each transport."""
    add_threads()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process)
    devices = [[d for d in jax.devices() if d.process_index == p] for p in range(2)]
    source, target = (NamedSharding(Mesh(np.array(each), ("x",)), PartitionSpec("x")) for each in devices)
    rows = []
    for name, transport in (("pulls", Pulls), ("collective permutes", Permutes)):
        for shape, calls in ((ACTIVATION, CALLS), (LARGE, ROUNDS)):
            transfer = Transfer(shape, np.dtype("float32"), source, target, transport=transport)
            array = jax.device_put(np.ones(shape, np.float32), source) if process == 0 else None
            rounds = []
            for _ in range(ROUNDS):
                times = []
                for _ in range(calls // ROUNDS):
                    start = time.perf_counter()
                    jax.block_until_ready(transfer(array))
                    times.append(time.perf_counter() - start)
                rounds.append(times)
            found = _microseconds(rounds) if shape == ACTIVATION else _rate(rounds)
            size = 4 * math.prod(shape)
            rows.append((f"between processes by {name}, {size / 2**20:g} MiB", found, "–"))
    return rows


def _children(task: str, processes: int, devices: int) -> list[Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"XLA_FLAGS": f"{DEVICES}={devices}", "MESHWRIGHT_MEASURE": "never"}
    children = [
        subprocess.Popen([sys.executable, __file__, task, str(p), port], stdout=subprocess.PIPE, env=environment)
        for p in range(processes)
    ]
    said = [child.communicate()[0].decode() for child in children]
    return [json.loads(text.partition("FOUND ")[2].splitlines()[0]) for text in said]


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[1] in (TIMED, STAGES):
        found = timed() if sys.argv[1] == TIMED else stages(int(sys.argv[2]), sys.argv[3])
        print("FOUND " + json.dumps(found), flush=True)
    else:
        main()
