"""Sockets between processes: their addresses and ports, what is sent over them, and how a lost host is noticed."""

import json
import os
import socket
from typing import Any

from meshwright.errors import ProcessError

RESERVED = "MESHWRIGHT_RESERVED_PORT"  # the environment variable with a port that `reserved_port` keeps


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


def listen_at(here: tuple[str, int]) -> socket.socket:
    """Listens at the coordinator's port, of one address or, for ``::``, of all."""
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


def read_line(connection: socket.socket) -> bytes:
    """One line and no byte more, since others follow on the same connection."""
    line = b""
    while not line.endswith(b"\n"):
        there = connection.recv(2**12, socket.MSG_PEEK)
        if not there or len(line) > 2**12:
            raise ValueError("no line")
        line += connection.recv(there.find(b"\n") + 1 or len(there))
    return line


def is_open(connection: socket.socket) -> bool:
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
