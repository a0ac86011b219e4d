"""What do transfers between stages compile to for 16 H200s, and how fast is each transport between two processes?

For a GPU that is here or that is described (`described.py` says how), arrays of 128 MiB in bfloat16 go from a stage on
a host of 8 to one on another: `permutes` are those of the program that all 16 devices run, `bytes` what they carry over
what the route needs to cross, `asynchronous` those with a start and a done, and `beside` the kernels of the same
program between the two. The last rows are a permute in a program with four matrix products that do not read it.

Between two processes of this machine, on CPUs by Gloo or sharing one GPU, `there` is the median time until an array is
there. Then both processes compute, and one sends the other what it has computed while it computes the next:
`hidden` is the part of the transfer that a turn of the loop does not take longer than one that only computes.

    python benchmarks/transports.py [--only compiled] [--target h200.txtpb]
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

CHILD = "in-process"
SHAPE = (8, 2048, 4096)
SIZES = {"0.5 MiB": (256, 512), "64 MiB": (4096, 4096)}
ROUNDS, TURNS = 40, 12
TIMEOUT_S = 100.0
Row = tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("compiled", "processes"))
    parser.add_argument("--target", type=Path, help="the description of a GPU that is not here")
    options = parser.parse_args()
    only = options.only
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # processes share one GPU
    from report import table

    rows: list[Row] = []
    parts = [partial(compiled, options.target)] if only != "processes" else []
    for part in parts + ([processes] if only != "compiled" else []):
        for row in part():
            rows.append(row)
            print("| " + " | ".join(row) + " |", flush=True)  # a run that is cut short keeps what it printed
    load = f"{os.getloadavg()[0]:.0f} processes were running on {os.cpu_count()} cores."
    text = (__doc__ or "").split("\n\n    python")[0]
    table("Transports", f"{text}\n\n{load}", ("what", "figure", "found"), rows)


def compiled(target: Path | None) -> Iterator[Row]:
    """Transfers of several layouts, compiled."""
    import jax

    if jax.default_backend() != "gpu" and target is None:
        yield ("compiled for 16 H200s", "skipped", "no GPU here, and none is described")
        return
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshwright.runtime.checking.compiled import collectives_of, text_of
    from meshwright.runtime.transfer.permutes import Permutes
    from meshwright.runtime.transfer.reshard import boxes
    from meshwright.runtime.transfer.routes import find_route

    described = {} if target is None else {"target_config": target.read_text()}
    devices = topologies.get_topology_desc("1x2x8", "cuda", topology="1x2x8", **described).devices
    rows, columns, none = PartitionSpec("x"), PartitionSpec(None, "x"), PartitionSpec()
    layouts = {
        "rows over 8 to rows over 8": (rows, rows),
        "all of it to all of it, gathered inside the host": (none, none),
        "rows over 8 to columns over 8": (rows, columns),
        "all of it to rows over 8": (none, rows),
    }
    for name, specs in layouts.items():
        began = time.perf_counter()
        source, target = (
            NamedSharding(Mesh(np.array(devices[8 * i : 8 * i + 8]), ("x",)), spec) for i, spec in enumerate(specs)
        )
        held, needed = boxes(SHAPE, source), boxes(SHAPE, target)
        host = {device: i // 8 for i, device in enumerate(devices)}
        route = find_route(held, needed, 2, host.__getitem__)
        across = [move for move in route.fetches if host[move.source] != host[move.target]]
        text = text_of(Permutes(across, jax.numpy.bfloat16, 0.0).lower().compile())
        found = [one for one in collectives_of(text, {"device": 16}) if one.kind == "permute"]
        pairs = sum(line.count("},{") + 1 for line in text.splitlines() if "source_target_pairs=" in line)
        carried = sum(one.bytes for one in found) * len(across) // max(1, len(found))
        yield (name, "pairs of devices", str(pairs))
        yield (name, "bytes", f"{carried / route.crossing_bytes:.3f} of {route.crossing_bytes / 2**20:.0f} MiB")
        for figure, value in overlapped(text, found).items():
            yield (name, figure, value)
        yield (name, "compiled in", f"{time.perf_counter() - began:.1f} s")
    text = text_of(beside_products(Mesh(np.array(devices), ("device",))).compile())
    found = [one for one in collectives_of(text, {"device": 16}) if one.kind == "permute"]
    for figure, value in overlapped(text, found).items():
        yield ("rows over 8 to rows over 8, in a program of four products", figure, value)


def overlapped(text: str, found: Any) -> dict[str, str]:
    """How many permutes a program has, and what runs beside them."""
    starts = sum("collective-permute-start(" in line for line in text.splitlines())
    beside = ", ".join(str(one.beside) for one in found)
    return {"permutes": str(len(found)), "asynchronous": f"{starts} of {len(found)}", "beside": beside}


def beside_products(mesh: Any) -> Any:
    """A program that sends an array from the first half of its devices to the second while all of them compute."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    half = mesh.size // 2

    def run(sent: jax.Array, weights: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        moved = jax.lax.ppermute(sent, "device", [(i, i + half) for i in range(half)])
        for _ in range(4):
            x = jnp.tanh(x @ weights)
        return moved, x

    split, whole = PartitionSpec("device"), PartitionSpec()
    shapes = ((mesh.size, *SHAPE[1:]), (SHAPE[2], SHAPE[2]), (mesh.size * SHAPE[1], SHAPE[2]))
    specs = (split, whole, split)
    program = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=split))
    return program.lower(
        *(
            jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs, strict=True)
        )
    )


def processes() -> Iterator[Row]:
    """Each transport between two processes, in processes of its own: one that hangs costs its own row."""
    for name in ("device_put", "permute", "sockets"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        children = [
            subprocess.Popen(
                [sys.executable, __file__, CHILD, name, str(p), port],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for p in range(2)
        ]
        ends = time.monotonic() + TIMEOUT_S
        said = []
        for child in children:
            try:
                said.append(child.communicate(timeout=max(0.1, ends - time.monotonic()))[0])
            except subprocess.TimeoutExpired:
                child.kill()
                said.append(f"nothing more after {TIMEOUT_S:g} s\n{child.communicate()[0]}")
        found = [line[6:] for line in said[1].splitlines() if line.startswith("FOUND ")]
        for line in found:
            yield (f"between processes by {name}", *json.loads(line))
        if len(found) < len(SIZES) + 1 and "skipped" not in said[1]:
            lines = [line for text in said for line in text.strip().splitlines()[-3:]]
            yield (f"between processes by {name}", "not all", " / ".join(lines).replace("|", "/")[-600:])


def child(name: str, process: int, port: str) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from meshwright import jax_devices
    from meshwright.runtime.cpu_turns import add_threads
    from meshwright.runtime.transfer.choice import TRANSPORTS
    from meshwright.runtime.transfer.reshard import Transfer

    add_threads()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, local_device_ids=[0] if _has_gpu() else None)
    ends = [[d for d in jax.devices() if d.process_index == p][:1] for p in range(2)]
    source, target = (NamedSharding(Mesh(np.array(own), ("x",)), PartitionSpec()) for own in ends)

    def tell(figure: str, value: str) -> None:
        if process == 1:  # which receives
            print("FOUND " + json.dumps([figure, value]), flush=True)

    if name == "device_put" and not jax_devices.sends_across_processes(ends[0][0]):
        tell("skipped", "JAX's backend here does not send from device to device")
        os._exit(0)

    alone = 0.0
    for size, shape in SIZES.items():
        transfer = Transfer(shape, np.dtype("float32"), source, target, transport=TRANSPORTS[name])
        array = jax.device_put(np.ones(shape, np.float32), source) if process == 0 else None
        times = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            jax.block_until_ready(transfer(array))
            times.append(time.perf_counter() - start)
        alone = statistics.median(times[ROUNDS // 4 :])
        tell(f"there, {size}", f"{1e3 * alone:.2f} ms, {4 * np.prod(shape) / alone / 1e9:.1f} GB/s")

    count = 24 if _has_gpu() else 1

    def compute(x: Any) -> Any:
        return jax.lax.fori_loop(0, count, lambda _, y: y @ x / x.shape[0], x)

    run = jax.jit(compute)
    own = jax.device_put(np.ones(shape if _has_gpu() else (768, 768), np.float32), (source, target)[process])
    sent = jax.device_put(np.ones(shape, np.float32), source) if process == 0 else None
    next_one = jax.jit(lambda made, x: x + made[0, 0])

    def turns(sends: bool) -> float:
        value, arrival = own, sent
        jax.block_until_ready(run(own))
        begin = time.perf_counter()
        waits = []
        for _ in range(TURNS):
            value = run(value)
            if sends:
                arrival = next_one(value, arrival) if process == 0 else None
                waits.append(transfer.start(arrival))
            if len(waits) > 1:  # the last one but one is waited for, as a stage does
                arrived = waits.pop(0)()
                value = next_one(arrived, value) if process == 1 else value
        jax.block_until_ready((value, [wait() for wait in waits]))
        return (time.perf_counter() - begin) / TURNS

    for sends in (False, True):
        turns(sends)
    pairs = [(turns(False), turns(True)) for _ in range(5)]
    idle, busy = (statistics.median(times) for times in zip(*pairs, strict=True))
    hidden = 1 - max(0.0, busy - idle) / alone
    tell("a turn", f"{1e3 * idle:.1f} ms without, {1e3 * busy:.1f} ms with sends: {hidden:.0%} hidden")
    jax_devices.meet("measured", TIMEOUT_S)
    os._exit(0)  # JAX would wait for the other process


def _has_gpu() -> bool:
    return Path("/dev/nvidia0").exists() and os.environ.get("JAX_PLATFORMS", "") != "cpu"


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
