"""Does loading a model of Hugging Face keep a process at its own part of the memory, at the speed of the disk?

A random Llama in bfloat16 is made on the spot, and read into the shardings of ZeRO by 2 processes with 4 virtual
devices each. For each process: the bytes of its own part and its peak memory, mapped files included; for both together
the bandwidth, beside two others: of the disk (reading the same files again and again into one small buffer), and of two
processes that each read half of the bytes into memory of their own, which is the most that any loader can reach: on
virtual machines the system is slower at giving out memory than a quick disk is at filling it. The page cache is dropped
before each.

    python benchmarks/hf_load.py [--gigabytes 4]
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import table

KEYS = {
    "model_type": "llama",
    "vocab_size": 32_000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
LAYER_BYTES = 2 * (4 * 2048**2 + 3 * 2048 * 8192)


def make(folder: Path, gigabytes: float) -> int:
    """Writes a checkpoint, one file for each eight layers; returns its bytes."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    num_layers = max(1, round((gigabytes * 1e9 - 4 * 32_000 * 2048) / LAYER_BYTES))
    d, f, v = 2048, 8192, 32_000
    own = {"self_attn.q_proj": (d, d), "self_attn.k_proj": (d, d), "self_attn.v_proj": (d, d)}
    own |= {"self_attn.o_proj": (d, d), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    own |= {"input_layernorm": (d,), "post_attention_layernorm": (d,)}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in own.items()}
    ends = {"model.embed_tokens.weight": (v, d), "model.norm.weight": (d,), "lm_head.weight": (v, d)}
    files: dict[str, dict[str, tuple[int, ...]]] = {"ends.safetensors": ends}
    for name, shape in shapes.items():
        files.setdefault(f"layers{int(name.split('.')[2]) // 8}.safetensors", {})[name] = shape
    bits = np.random.default_rng(0).integers(0, 2**14, v * d + len(shapes), np.uint16).view(ml_dtypes.bfloat16)
    firsts = {name: number for number, name in enumerate(shapes)}  # each tensor's begin one further on
    for file, some in files.items():
        parts = {name: bits[firsts.get(name, 0) :][: np.prod(shape)].reshape(shape) for name, shape in some.items()}
        save_file(parts, folder / file)
    index = {"weight_map": {name: file for file, some in files.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(KEYS | {"num_hidden_layers": num_layers}))
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drop(folder: Path) -> None:
    """Has the system forget what it keeps of the files, so that they are read from the disk."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_whole(folder: Path) -> float:
    """Seconds to read all files in order into a small buffer, by two threads."""
    from concurrent.futures import ThreadPoolExecutor

    def read(path: Path) -> None:
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(2**24)
            while file.readinto(buffer):
                pass

    drop(folder)
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as readers:
        list(readers.map(read, sorted(folder.glob("*.safetensors"))))
    return time.perf_counter() - started


def read_half(folder: str, _: str, number: str) -> None:
    """One process: reads its half of every 32 MiB of the files into memory of its own, by as many threads as `load`."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    def read(part: tuple[Path, int]) -> "np.ndarray":
        path, start = part
        target = np.empty(min(2**24, path.stat().st_size - start), np.uint8)
        with path.open("rb", buffering=0) as file:
            file.seek(start)
            left = memoryview(target)
            while left:
                left = left[file.readinto(left) :]
        return target

    paths = sorted(Path(folder).glob("*.safetensors"))
    parts = [(path, start) for path in paths for start in range(0, path.stat().st_size, 2**24)]
    started = time.perf_counter()
    with ThreadPoolExecutor(8) as readers:
        kept = list(readers.map(read, parts[int(number) :: 2]))
    print(json.dumps({"seconds": time.perf_counter() - started, "own": sum(part.nbytes for part in kept)}))


def in_two(what: str, folder: Path) -> list[dict[str, float]]:
    """What two processes print that do the same at the same time."""
    drop(folder)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    command = [sys.executable, __file__, what, str(folder), str(port)]
    started = [
        subprocess.Popen([*command, str(i)], env=os.environ | flags, stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    lines = [process.communicate()[0].splitlines() for process in started]
    return [json.loads(next(line for line in some if line.startswith("{"))) for some in lines]


def status(name: str) -> int:
    """A line of this process's status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def load(folder: str, port: str, number: str) -> None:
    """One process: plans a step, loads, and prints what it took."""
    import jax
    from jax.experimental import multihost_utils

    import meshwright as mw

    mw.initialize(f"localhost:{port}", 2, int(number))
    model = mw.hf.load(folder)
    example = model.example(batch=8, seq=16)
    step = mw.parallelize(example.train_step, method="zero3")
    step.plan(example.state, example.batch)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status("VmRSS")
    started, computed = time.perf_counter(), time.process_time()
    params = jax.block_until_ready(mw.hf.load(folder, like=step).params)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - computed
    own = sum(shard.data.nbytes for x in jax.tree.leaves(params) for shard in x.addressable_shards)
    multihost_utils.sync_global_devices("loaded")  # a process that ends would end the other
    print(json.dumps({"own": own, "before": before, "peak": status("VmHWM"), "seconds": seconds, "cpu_s": cpu_s}))


def main() -> None:
    """Makes the checkpoint, starts the processes, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--folder", default=None, help="where the checkpoint is made; the system's temporary one")
    parser.add_argument("--rounds", type=int, default=3, help="of which the quickest counts, of each reading")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        size = make(folder, options.gigabytes)
        disk, halves, loads = [], [], []
        for _ in range(options.rounds):
            disk.append(size / read_whole(folder) / 1e9)
            halves.append(size / max(one["seconds"] for one in in_two("--read", folder)) / 1e9)
            loads.append(in_two("--load", folder))
    found = min(loads, key=lambda some: max(one["seconds"] for one in some))
    speed = size / max(one["seconds"] for one in found) / 1e9
    rows: list[tuple[object, ...]] = [
        (
            *(f"process {number}", *(round(one[name] / 1e9, 2) for name in ("own", "before", "peak")), limit(one)),
            *(round(one["cpu_s"] / one["own"] * 1e9, 2), "", "", ""),
        )
        for number, one in enumerate(found)
    ]
    speeds = f"{speed:.2f}", f"{max(halves):.2f}", f"{max(disk):.2f}"
    header = ("", "own part, GB", "before, GB", "peak, GB", "limit, GB", "CPU s/GB", "GB/s", "halves", "disk")
    title = "Loading a model of Hugging Face"
    question = f"Does a process stay at 1.2 times its own part plus 2 GB, at 80% of the disk? {size / 1e9:.2f} GB."
    table(title, question, header, [*rows, ("both", "", "", "", "", "", *speeds)])


def limit(one: dict[str, float]) -> float:
    """The memory that a process may take, in GB."""
    return round(1.2 * one["own"] / 1e9 + 2, 2)


if __name__ == "__main__":
    children = {"--load": load, "--read": read_half}
    children[sys.argv[1]](*sys.argv[2:]) if sys.argv[1:2] and sys.argv[1] in children else main()
