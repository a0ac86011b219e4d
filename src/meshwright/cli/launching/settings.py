"""The variables of processes: where they meet, their devices, and what is kept for the next start."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from meshwright.cli.console import CommandError
from meshwright.plan_files import PLANS
from meshwright.runtime.processes.connections import RESERVED

_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
_SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=\S*")


def keeping(folder: str) -> dict[str, str]:
    """The variables by which processes that are started again take the plans and programs of those before them."""
    kept = {PLANS: f"{folder}/plans", _PROGRAMS: f"{folder}/programs", _SHORTEST: "0"}
    return {name: os.environ.get(name) or value for name, value in kept.items()}


def process_settings(
    address: str, count: int, shares: Sequence[Mapping[str, str]], first: int = 0
) -> list[dict[str, str]]:
    """The environment of each process: what `mw.initialize` reads, and the process's devices.

    Args:
        address: Where the first process of all listens.
        count: How many processes there are on all hosts.
        shares: The devices of each process of this host.
        first: The number of the first one of them.
    """
    common = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(count),
        RESERVED: address.rpartition(":")[2],
        "PYTHONUNBUFFERED": "1",  # lines appear when they are printed
    }
    if is_loopback(address):
        common["JAX_COORDINATOR_BIND_ADDRESS"] = address
    return [{**os.environ, **common, "JAX_PROCESS_ID": str(first + i), **share} for i, share in enumerate(shares)]


def is_loopback(address: str) -> bool:
    """Whether an address with its port is this machine's own, which no other host reaches."""
    return address.startswith(("127.", "localhost:", "[::1]:"))


def device_settings(processes: int, each: int | None, platform: str | None) -> list[dict[str, str]]:
    """The variables that give each process its devices.

    Raises:
        CommandError: There are fewer devices than needed.
    """
    if each is not None and each < 1:
        raise CommandError(f"--devices-per-process is {each}; give 1 or more")
    gpus = _gpus()
    asked = platform or os.environ.get("JAX_PLATFORMS", "").split(",")[0]
    chosen = asked or ("cuda" if gpus and any(map(find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))) else "cpu")
    if chosen == "cpu":
        flags = _VIRTUAL.sub("", os.environ.get("XLA_FLAGS", ""))
        return [{"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(each or 1), "XLA_FLAGS": flags}] * processes
    if chosen not in ("cuda", "gpu"):
        raise CommandError(f"the platform is {chosen!r}; give --platform cpu or cuda")
    each = each or max(1, len(gpus) // processes)
    if processes * each > len(gpus):
        raise CommandError(
            f"{processes} processes with {each} {'GPU' if each == 1 else 'GPUs'} each need {processes * each}, and "
            f"there are {len(gpus)} here; give fewer, or --platform cpu for virtual devices"
        )
    shares = [gpus[i * each : (i + 1) * each] for i in range(processes)]
    return [{"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ",".join(share)} for share in shares]


def _gpus() -> list[str]:
    """The names by which CUDA knows this machine's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listed: Any = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return re.findall(r"^GPU (\d+):", listed.stdout, re.MULTILINE)
