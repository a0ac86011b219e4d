"""Parallel compilation: another process compiles the solver's kernels while this one continues.

It is started when this process first has to wait for a kernel to be compiled, ends when it is done or when this process
does, and there is at most one of them on a machine. This process then loads the kernels that the other one has
compiled.
"""

import atexit
import os
import subprocess
import sys
from pathlib import Path

from meshwright.scratch import HAS_LOCKS

_SWITCH = "MESHWRIGHT_COMPILE_BESIDE"
_started: list[subprocess.Popen] = []


def start() -> None:
    """Starts the other process, unless that was done, or is not worth it, or ``MESHWRIGHT_COMPILE_BESIDE=0``."""
    wanted = os.environ.get(_SWITCH, "1") != "0" and (os.cpu_count() or 1) > 1
    if _started or not HAS_LOCKS or not wanted or not sys.executable:
        return
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join([source, *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {**os.environ, "PYTHONPATH": path, _SWITCH: "0"}
    nothing = subprocess.DEVNULL
    command = [sys.executable, "-m", "meshwright.warm", "--beside"]
    _started.append(subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=nothing, env=settings))
    atexit.register(_stop)


def _stop() -> None:
    for process in _started:
        process.terminate()
        process.wait()
