"""Does loading a model of Hugging Face keep a process at its own part of the memory, at the speed of the disk?

A random Llama in bfloat16 is made on the spot, and read into the shardings of ZeRO by 2 processes with 4 virtual
devices each. For each process: the bytes of its own part and its peak memory, mapped files included; for both together
the bandwidth, beside that of reading the same files in one go. The page cache is dropped before each.

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
    """Seconds to read all files in order, by two processes' worth of threads."""
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
    gigabytes, where = (parsed := parser.parse_args()).gigabytes, parsed.folder
    with tempfile.TemporaryDirectory(dir=where) as name:
        folder = Path(name)
        size = make(folder, gigabytes)
        whole = [read_whole(folder) for _ in range(2)]
        drop(folder)
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        flags = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
        command = [sys.executable, __file__, "--load", name, str(port)]
        started = [
            subprocess.Popen([*command, str(i)], env=os.environ | flags, stdout=subprocess.PIPE, text=True)
            for i in range(2)
        ]
        lines = [process.communicate()[0].splitlines() for process in started]
        found = [json.loads(next(line for line in own if line.startswith("{"))) for own in lines]
    seconds = max(one["seconds"] for one in found)
    rows: list[tuple[object, ...]] = [
        (
            *(f"process {number}", *(round(one[name] / 1e9, 2) for name in ("own", "before", "peak")), limit(one)),
            *(round(one["cpu_s"] / one["own"] * 1e9, 2), ""),
        )
        for number, one in enumerate(found)
    ]
    speeds = f"{size / seconds / 1e9:.2f} of {size / min(whole) / 1e9:.2f}"
    header = ("", "own part, GB", "before, GB", "peak, GB", "limit, GB", "CPU s/GB", "GB/s, of reading in one go")
    title = "Loading a model of Hugging Face"
    question = f"Does a process stay at 1.2 times its own part plus 2 GB, at 80% of the disk? {size / 1e9:.2f} GB."
    table(title, question, header, [*rows, ("both", "", "", "", "", "", speeds)])


def limit(one: dict[str, float]) -> float:
    """The memory that a process may take, in GB."""
    return round(1.2 * one["own"] / 1e9 + 2, 2)


if __name__ == "__main__":
    load(*sys.argv[2:]) if sys.argv[1:2] == ["--load"] else main()
