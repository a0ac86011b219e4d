"""`mw.initialize`: starts JAX in one of several processes that end together."""

import os
from collections.abc import Sequence
from typing import Any

import jax
import jaxlib

import meshwright
from meshwright import jax_devices
from meshwright.errors import ProcessError
from meshwright.runtime.cpu_turns import add_threads
from meshwright.runtime.processes import peers
from meshwright.runtime.processes.rendezvous import meet
from meshwright.runtime.processes.stalls import DEADLINE


def initialize(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    local_device_ids: int | Sequence[int] | None = None,
    *,
    timeout: float = 300.0,
    heartbeat: float = 10.0,
    deadline: float | None = None,
    cluster_detection_method: str | None = None,
    coordinator_bind_address: str | None = None,
) -> None:
    """Starts JAX as one of several processes: `jax.distributed.initialize` that never waits for a lost process.

    Call it in each process before anything else is done with JAX. Under `meshwright launch` it needs no arguments: they
    are in the environment variables JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, which any other
    launcher may set as well. From then on:

    - A process that does not connect in time is named in all processes that did.
    - A process that ends by an error, is killed, or loses its host ends all others, which name it and the cause.
    - A process that keeps the others waiting is named in all of them, its stack is printed, and it ends the run if it
      still stands after ten times as long.
    - Processes that call different functions, or the same with different types, or a different number of times, are
      ended as well, instead of waiting for each other for ever.

    The others meet a `mw.ProcessError` at their next step. One that is in a step, waiting for data that will not come,
    prints the sentence and ends with exit code 1.

    Args:
        coordinator_address: Host and port of the first process, such as ``"10.0.0.1:1234"``; the port must be free.
        num_processes: How many processes there are.
        process_id: Which one this is, from 0.
        local_device_ids: The devices that this process uses; all of its host by default.
        timeout: Seconds to wait for the other processes.
        heartbeat: Seconds after which JAX ends a process that does not answer; a host counts as lost after half of
            them. A process that dies on a host that lives is noticed at once.
        deadline: Seconds after which a process is named that stands still while others are ahead of it; by default
            those of the environment variable MESHWRIGHT_DEADLINE, or 60.
        cluster_detection_method: As for JAX: where the arguments omitted above are looked up, such as Slurm.
        coordinator_bind_address: Where the first process listens; at this port of all its addresses by default.

    Raises:
        ProcessError: Some process did not connect, or the processes do not fit together.

    Examples:
        >>> import meshwright as mw
        >>> mw.initialize("10.0.0.1:1234", 2, 0, timeout=60)  # doctest: +SKIP
    """
    if not timeout > 0 or not heartbeat >= 1:
        raise ProcessError(
            f"timeout is {timeout!r} and heartbeat {heartbeat!r}; give seconds, more than 0 and at least 1"
        )
    deadline_s = _deadline() if deadline is None else deadline
    if not deadline_s > 0:
        raise ProcessError(f"deadline is {deadline_s!r}; give seconds, more than 0")
    if num_processes is None and process_id is None and "JAX_NUM_PROCESSES" in os.environ:
        num_processes, process_id = _from_environment("JAX_NUM_PROCESSES"), _from_environment("JAX_PROCESS_ID")
        cluster_detection_method = "deactivate"  # a scheduler around the launcher counts other processes
    address, count, process = _detected(
        coordinator_address, num_processes, process_id, cluster_detection_method, timeout
    )
    bind = coordinator_bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if count > 1:
        _join(address, count, process, bind, timeout, heartbeat, deadline_s)
    else:  # JAX ends with a signal if its port is in use
        meet(address, count, process, timeout_s=timeout, heartbeat_s=heartbeat, bind=bind)
    jax.distributed.initialize(
        address,
        count,
        process,
        local_device_ids,
        cluster_detection_method=cluster_detection_method,
        initialization_timeout=max(1, round(timeout)),
        heartbeat_timeout_seconds=round(heartbeat),
        coordinator_bind_address=coordinator_bind_address,
    )


def _detected(*given: Any) -> tuple[str, int, int]:
    """The address of process 0, the number of processes and which one this is: as given, or from the environment."""
    address, count, process = jax_devices.detect_processes(*given)
    if None in (address, count, process) or not 0 <= process < count:
        raise ProcessError(
            f"coordinator_address is {address!r}, num_processes {count!r} and process_id {process!r}; give the host "
            "and port of process 0, the number of processes, and this one's number, from 0"
        )
    return address, count, process


def _join(
    address: str, count: int, process: int, bind: str | None, timeout: float, heartbeat: float, deadline: float
) -> None:
    """Meets the other processes, and watches them from then on."""
    add_threads(count)
    # Programs that different versions plan or compile would wait for each other for ever.
    versions = {package.__name__: package.__version__ for package in (meshwright, jax, jaxlib)}
    connections = meet(address, count, process, timeout_s=timeout, heartbeat_s=heartbeat, bind=bind, versions=versions)
    peers.current = peers.Peers(process, connections, heartbeat, deadline)
    peers.current.start()


def _deadline() -> float:
    text = os.environ.get(DEADLINE, "") or str(peers.DEADLINE_S)
    try:
        return float(text)
    except ValueError:
        raise ProcessError(f"the environment variable {DEADLINE} is {text!r}; give seconds") from None


def _from_environment(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.strip().isdecimal():
        raise ProcessError(f"the environment variable {name} is {text!r}; give a whole number")
    return int(text)
