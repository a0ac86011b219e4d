"""The `meshwright launch` command: runs a script as several processes of this machine, which divide its devices."""

import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.console import CommandError, note
from meshwright.cli.launching.crew import Crew
from meshwright.cli.launching.elastic import ElasticRun
from meshwright.cli.launching.settings import device_settings, keeping, process_settings
from meshwright.runtime.processes.connections import reserved_port
from meshwright.runtime.processes.stalls import DEADLINE
from meshwright.scratch import scratch_folder
from meshwright.training.in_memory.folder import host_memory

SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_RESTARTS = 100  # of an elastic run, whose hosts are expected to fail


def launch_command(
    script: Annotated[str, typer.Argument(help="The script, which calls mw.initialize() first.")],
    arguments: Annotated[list[str] | None, typer.Argument(help="Its own arguments.", metavar="[ARGUMENTS]...")] = None,
    module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module, as for python -m: -m meshwright train run.toml.")
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(help="How many processes to start here.  [default: 2; --max; or 1 with --at]", show_default=False),
    ] = None,
    devices_per_process: Annotated[
        int | None,
        typer.Option(help="Devices of each process.  [default: GPUs are divided evenly; 1 virtual device on CPUs]"),
    ] = None,
    platform: Annotated[
        str | None, typer.Option(help="cpu or cuda.  [default: cuda if there are GPUs that JAX can use, else cpu]")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(help="How often all are started again after a process failed.  [default: 0; 100 with --min]"),
    ] = None,
    least: Annotated[
        int | None, typer.Option("--min", help="The run goes on with the processes there are, this many or more.")
    ] = None,
    most: Annotated[
        int | None, typer.Option("--max", help="The most processes that it has when hosts come.  [default: --min]")
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="HOST:PORT of the host that leads a run of several, where the same command is given."),
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to wait for hosts while fewer than --min are there.")] = 600,
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
    is_elastic = least is not None or most is not None or at is not None
    least = most if least is None else least
    most = least if most is None else most
    here = processes if processes is not None else 2 if not is_elastic else 1 if at is not None else most or 2
    bounds = {"--processes": (here, 1), "--restarts": (restarts, 0), "--grace": (grace, 0), "--deadline": (deadline, 1)}
    bounds |= {"--min": (least, 1), "--max": (most, least or 1), "--patience": (patience, 0)}
    for name, (value, bound) in bounds.items():
        if value is not None and value < bound:
            raise CommandError(f"{name} is {value}; give {bound} or more")
    shares = device_settings(here, devices_per_process, platform)
    shares = [{**share, **({} if deadline is None else {DEADLINE: str(deadline)})} for share in shares]
    command = [sys.executable, *(["-m"] if module else []), script, *(arguments or ())]
    with scratch_folder("launch") as folder, host_memory() as memory:
        kept = str(folder)
        if is_elastic or restarts:
            shares = [{**memory, **share} for share in shares]
        if not is_elastic:
            raise typer.Exit(_run(command, shares, grace, restarts or 0, kept))
        again = _RESTARTS if restarts is None else restarts
        numbers = least or here, most or here, again, patience, grace
        raise typer.Exit(ElasticRun(command, shares, at or "127.0.0.1:0", *numbers, kept).take_part())


def _run(command: Sequence[str], shares: Sequence[Mapping[str, str]], grace: float, restarts: int, kept: str) -> int:
    """Runs processes on this machine, and starts all of them again after one failed; returns the exit code."""
    settings = [{**keeping(kept), **share} for share in shares] if restarts else shares
    for attempt in range(restarts + 1):
        with reserved_port("127.0.0.1") as port_socket:
            address = f"127.0.0.1:{port_socket.getsockname()[1]}"
            crew = Crew(command, process_settings(address, len(shares), settings), grace)
            ending = crew.run()
        ending.explain()
        if ending.code == 0 or crew.is_stopped or attempt == restarts:
            break
        if ending.is_permanent:
            note("meshwright launch: not started again, since the same error would end it again")
            break
        note(f"meshwright launch: starting all {len(shares)} processes again (restart {attempt + 1} of {restarts})")
    return ending.code


def _is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # of a package that is not there, or no name at all
        return False
