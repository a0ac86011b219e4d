"""The `meshwright launch` command: runs a script as several processes of this machine, which divide its devices."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from meshwright.cli.console import CommandError, note
from meshwright.cli.crew import Crew
from meshwright.plan_files import PLANS
from meshwright.runtime.processes.rendezvous import RESERVED, reserved_port
from meshwright.runtime.processes.stalls import DEADLINE

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
_SHORTEST = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
_VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=\S*")


def launch_command(
    script: Annotated[str, typer.Argument(help="The script, which calls mw.initialize() first.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", metavar="[ARGUMENTS]...")] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m: -m meshwright train run.toml.")
    ] = False,
    processes: Annotated[int, typer.Option(help="How many processes to start.")] = 2,
    devices_per_process: Annotated[
        int | None,
        typer.Option(help="Devices of each process.  [default: GPUs are divided evenly; 1 virtual device on CPUs]"),
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="cpu or cuda.  [default: cuda if there are GPUs that JAX can use, else cpu]")
    ] = None,
    restarts: Annotated[int, typer.Option(help="How often all processes are started again after one failed.")] = 0,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds after which a process that keeps the others waiting is named.")
    ] = None,
    grace: Annotated[float, typer.Option(help="Seconds that processes have to end after SIGTERM or Ctrl-C.")] = 30.0,
) -> None:
    """Run a script as several processes on this machine, to try what will run on several hosts."""
    if not module and not Path(script).is_file():
        raise CommandError(f"there is no script {script}; give the path of a Python file, or -m and a module")
    if module and not _is_module(script):
        raise CommandError(f"there is no module {script}; give the name of one that can be imported")
    least = {"--processes": (processes, 1), "--restarts": (restarts, 0), "--grace": (grace, 0)}
    least |= {} if deadline is None else {"--deadline": (deadline, 1)}
    for name, (value, bound) in least.items():
        if value < bound:
            raise CommandError(f"{name} is {value}; give {bound} or more")
    shares = device_settings(processes, devices_per_process, platform)
    shares = [{**share, **({} if deadline is None else {DEADLINE: str(deadline)})} for share in shares]
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or ())]
    code = 0
    with TemporaryDirectory(prefix="meshwright-kept-") as kept:
        shares = [{**_keeping(kept), **share} for share in shares] if restarts else shares
        for attempt in range(restarts + 1):
            with reserved_port("127.0.0.1") as port_socket:
                settings = process_settings(port_socket.getsockname()[1], shares)
                crew = Crew(command, settings, grace)
                code = crew.run()
            if code == 0 or crew.is_stopped or attempt == restarts:
                break
            if crew.is_permanent:
                note("meshwright launch: not started again, since the same error would end it again")
                break
            note(f"meshwright launch: starting all {processes} processes again (restart {attempt + 1} of {restarts})")
    raise typer.Exit(code)


def _keeping(folder: str) -> dict[str, str]:
    """What makes processes that are started again take the plans and the compiled programs of those before them."""
    kept = {PLANS: f"{folder}/plans", _PROGRAMS: f"{folder}/programs", _SHORTEST: "0"}
    return {name: os.environ.get(name) or value for name, value in kept.items()}


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # of a package that is not there, or no name at all
        return False


def process_settings(port: int, shares: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The environment of each process: what `mw.initialize` reads, and the process's devices."""
    address = f"127.0.0.1:{port}"
    common = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_COORDINATOR_BIND_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(len(shares)),
        RESERVED: str(port),
        "PYTHONUNBUFFERED": "1",  # lines appear when they are printed
    }
    return [{**os.environ, **common, "JAX_PROCESS_ID": str(i), **share} for i, share in enumerate(shares)]


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
