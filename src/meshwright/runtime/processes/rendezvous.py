"""Connects the processes of one program before JAX starts: each sends its number to the first one.

If a process is missing, JAX's own start ends the others with a C++ stack, and does not name the missing one. So the
first process listens at the coordinator's port, accepts all others, and frees the port for JAX's service. The
connections stay open: the kernel closes them when a process ends in any way, which is the quickest and surest sign of
it (see `peers.py`).
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from meshwright.errors import ProcessError

RESERVED = "MESHWRIGHT_RESERVED_PORT"  # the environment variable with a port that `reserved_port` keeps
_RETRY_S = 0.2  # between attempts to reach a coordinator that does not listen yet
_HELLO_S = 5.0  # for a new connection to identify itself: an unrelated program may connect


def meet(
    address: str,
    num_processes: int,
    process: int,
    *,
    timeout_s: float,
    heartbeat_s: float,
    bind: str | None = None,
    versions: Mapping[str, str] | None = None,
) -> dict[int, socket.socket]:
    """Waits until all processes are connected.

    Args:
        address: Host and port of the first process.
        num_processes: How many there are.
        process: Which of them this is.
        timeout_s: How long the first process waits for the others, and the others for the first.
        heartbeat_s: After how long a host that does not answer counts as lost.
        bind: Where the first process listens; at this port of all its addresses by default.
        versions: The versions of packages that must be equal in all processes.

    Returns:
        Connections by process: of the first one to each of the others, of the others to the first.

    Raises:
        ProcessError: Some processes did not connect, or they do not fit together.
    """
    here = {"process": process, "of": num_processes, "versions": dict(versions or {})}
    if process == 0:
        found = _gather(split_address(bind or f"[::]:{split_address(address)[1]}"), here, timeout_s)
    else:
        found = {0: _join(split_address(address), here, timeout_s)}
    for connection in found.values():
        keep_alive(connection, heartbeat_s)
    return found


def reserved_port(host: str = "") -> socket.socket:
    """A socket that reserves a free port for the coordinator as long as it is open.

    It is bound and does not listen. Sockets that allow sharing the port, such as those of JAX's service, can listen at
    it, and the system gives it to nobody else. A port that was only looked up might be taken before it is used.

    Args:
        host: The address at which the first process will listen; all addresses by default.
    """
    is_both = not host and socket.has_dualstack_ipv6()
    held = socket.socket(socket.AF_INET6 if is_both else socket.AF_INET)
    if is_both:
        held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    return held


def split_address(address: str, *, any_port: bool = False) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[host]:port``; ``any_port``: port 0 stands for any that is free."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) + any_port < 2**16:
        raise ProcessError(f"the coordinator's address is {address!r}; give host:port, such as 10.0.0.1:1234")
    return host.removeprefix("[").removesuffix("]"), int(port)


def send(connection: socket.socket, message: Any) -> bool:
    """Sends a message as one line; returns False if the other end is closed."""
    try:
        connection.sendall(json.dumps(message).encode() + b"\n")
    except OSError:
        return False
    return True


def _gather(here: tuple[str, int], hello: Mapping[str, Any], timeout_s: float) -> dict[int, socket.socket]:
    """The first process's part."""
    num_processes = hello["of"]
    deadline = time.monotonic() + timeout_s
    found: dict[int, socket.socket] = {}
    problem = None
    with _listen(here) as listener:
        while len(found) < num_processes - 1 and problem is None:
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [i for i in range(1, num_processes) if i not in found]
                problem = (
                    f"{_named(missing)} of {num_processes} did not connect to process 0 at port {here[1]} within "
                    f"{timeout_s:g} s; see whether {'it was' if len(missing) == 1 else 'they were'} started and can "
                    "reach this host, or give a longer timeout"
                )
                break
            problem = _admit(connection, found, hello)
    # The answers wait until the port is free: a process that gets one starts JAX, which connects to this port.
    if problem is None:
        lost = [i for i, connection in found.items() if not send(connection, {"go": True})]
        problem = f"{_named(lost)} connected and ended before all processes had connected" if lost else None
    if problem is not None:
        for connection in found.values():
            send(connection, {"failed": problem})
            connection.close()
        raise ProcessError(problem)
    return found


def _admit(connection: socket.socket, found: dict[int, socket.socket], ours: Mapping[str, Any]) -> str | None:
    """Adds a new connection to those found; returns an error that all processes must learn of, or None."""
    num_processes = ours["of"]
    connection.settimeout(_HELLO_S)
    try:
        hello = json.loads(_read_line(connection))
        process, count = int(hello["process"]), int(hello["of"])
        versions = dict(hello.get("versions", {}))
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()  # not a process of this program
        return None
    old, found[process] = found.get(process), connection
    connection.settimeout(None)
    if count != num_processes or not 0 <= process < num_processes:
        return f"process {process} was started as one of {count} processes, and process 0 as one of {num_processes}"
    for name, version in ours["versions"].items():
        if versions.get(name) != version:
            there = versions.get(name, "of an unknown version")
            return (
                f"process {process} has {name} {there}, and process 0 has {name} {version}; install the same versions "
                "for all processes"
            )
    taken = f"two processes say that they are process {process}; give each of them its own process_id"
    is_taken = process == 0 or (old is not None and _is_open(old))
    if old is not None:  # a process that ended may be started again
        send(old, {"failed": taken})
        old.close()
    return taken if is_taken else None


def _join(there: tuple[str, int], hello: Mapping[str, Any], timeout_s: float) -> socket.socket:
    """Another process's part."""
    process = hello["process"]
    deadline = time.monotonic() + timeout_s
    place = f"process 0 at {there[0]}:{there[1]}"
    while True:
        try:
            connection = socket.create_connection(there, timeout=max(0.01, deadline - time.monotonic()))
            break
        except OSError as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise ProcessError(
                    f"process {process} could not reach {place} within {timeout_s:g} s ({error}); see whether process "
                    "0 was started and its address is right, or give a longer timeout"
                ) from None
            time.sleep(_RETRY_S)
    connection.settimeout(None)  # the first process enforces the timeout now, and sends the outcome
    answer: dict[str, str] = {}
    with suppress(OSError, ValueError):
        if send(connection, hello):
            answer = json.loads(_read_line(connection))
    if "go" in answer:
        return connection
    connection.close()
    raise ProcessError(
        answer.get("failed") or f"{place} ended, or is not mw.initialize, while process {process} waited"
    )


def _listen(here: tuple[str, int]) -> socket.socket:
    # A port that is reserved for this process can only be shared; any other port in use must be refused.
    is_shared = os.environ.get(RESERVED) == str(here[1])
    try:
        if here[0] == "::" and socket.has_dualstack_ipv6():
            return socket.create_server(here, family=socket.AF_INET6, dualstack_ipv6=True, reuse_port=is_shared)
        host = "" if here[0] == "::" else here[0]
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, here[1]), family=family, reuse_port=is_shared)
    except OSError as error:
        raise ProcessError(
            f"process 0 cannot listen at port {here[1]} of this host: {error.strerror or error}; give a free port in "
            "coordinator_address, in all processes"
        ) from None


def _read_line(connection: socket.socket) -> bytes:
    """One line and no byte more, since others follow on the same connection."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) > 2**12:
            raise ValueError("no line")
        line += byte
    return line


def _is_open(connection: socket.socket) -> bool:
    """Whether the other end is still connected; it sends nothing before it is answered."""
    connection.setblocking(False)
    try:
        return bool(connection.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        connection.setblocking(True)


def keep_alive(connection: socket.socket, heartbeat_s: float) -> None:
    """Has the kernel check that the other host answers, since Python may be busy.

    It has to find out in half of the time: JAX may end a process from then on, without a word of who was lost.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tenth_s = max(1, round(heartbeat_s / 10))
    for name, value in (
        ("KEEPIDLE", tenth_s),
        ("KEEPINTVL", tenth_s),
        ("KEEPCNT", 4),
        ("USER_TIMEOUT", 5000 * tenth_s),
    ):
        option = getattr(socket, f"TCP_{name}", None)  # not every system has every option
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _named(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
