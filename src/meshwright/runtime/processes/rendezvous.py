"""Connects the processes of one program before JAX starts, each with its neighbours in the tree (`tree.py`).

If a process is missing, JAX's own start ends the others with a C++ stack, and does not name the missing one. So the
first process listens at the coordinator's port, where each of the others asks for the address of its parent, and frees
the port for JAX's service when all are connected. Who asks is answered at once, and asks again later where its parent
is not there yet: nobody but its children stays connected to the first process. The connections stay open: the kernel
closes them when a process ends in any way, which is the quickest and surest sign of it (see `peers.py`).
"""

import json
import selectors
import socket
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from meshwright.errors import ProcessError
from meshwright.runtime.processes.connections import is_open, keep_alive, listen_at, read_line, send, split_address
from meshwright.runtime.processes.tree import CHILDREN, children, parent

_RETRY_S = 0.2  # between attempts to reach a coordinator that does not listen yet
_LATER_S = 2.0  # at most, until a process asks again for a parent that was not there
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
        Connections to the neighbours in the tree, by process.

    Raises:
        ProcessError: Some processes did not connect, or they do not fit together.
    """
    hello = {"process": process, "of": num_processes, "versions": dict(versions or {})}
    if process == 0:
        found = _First(split_address(bind or f"[::]:{split_address(address)[1]}"), hello, timeout_s).meet()
    else:
        found = _Other(split_address(address), hello, timeout_s).meet()
    for connection in found.values():
        keep_alive(connection, heartbeat_s)
    return found


class _Member:
    """A process until all are connected: it waits for its children, and for what is said above and below.

    Args:
        hello: What it says of itself.
        timeout_s: How long it waits.
    """

    def __init__(self, hello: Mapping[str, Any], timeout_s: float):
        self._hello, self._timeout_s = hello, timeout_s
        self._process, self._count = int(hello["process"]), int(hello["of"])
        self._deadline = time.monotonic() + timeout_s
        self._expected = set(children(self._process, self._count))
        self._children: dict[int, socket.socket] = {}
        self._ready: set[int] = set()  # children with all that are below them
        self._listener: socket.socket | None = None

    def _is_complete(self) -> bool:
        return self._ready == self._expected

    def _next_message(self, above: socket.socket | None = None) -> Mapping[str, Any]:
        """Answers whoever writes first; returns a message from above."""
        with selectors.DefaultSelector() as selector:
            for child, connection in self._children.items():
                selector.register(connection, selectors.EVENT_READ, child)
            for source in (self._listener, above):
                if source is not None:
                    selector.register(source, selectors.EVENT_READ)
            left_s = max(0.01, self._deadline - time.monotonic())
            ready = selector.select(None if above else left_s)  # the first process enforces the timeout
        if not ready:
            self._give_up()
        key = ready[0][0]  # one after the other, since each may close another
        if key.fileobj is above:
            return _message(above) or {"closed": True}
        if key.fileobj is self._listener:
            self._receive(self._listener.accept()[0])
        else:
            self._hear(key.data, _message(self._children[key.data]))
        return {}

    def _receive(self, connection: socket.socket) -> None:
        """Receives whoever connects."""
        connection.settimeout(_HELLO_S)
        try:
            hello = json.loads(read_line(connection))
            process, count = int(hello["process"]), int(hello["of"])
            versions, port = dict(hello.get("versions", {})), int(hello.get("port", 0))
        except (OSError, ValueError, KeyError, TypeError):
            connection.close()  # not a process of this program
            return
        connection.settimeout(None)
        self._admit(connection, process, count, versions, port)

    def _admit(
        self, connection: socket.socket, process: int, count: int, versions: Mapping[str, str], port: int
    ) -> None:
        """Takes in a child."""
        if process not in self._expected:
            connection.close()  # a process of another program
            return
        old, self._children[process] = self._children.get(process), connection
        if old is not None:  # a process that ended may be started again
            taken = f"two processes say that they are process {process}; give each of them its own process_id"
            is_taken = is_open(old)
            send(old, {"failed": taken})
            old.close()
            if is_taken:
                self._fail(taken)
        self._ready.discard(process)
        send(connection, {"child": True})

    def _hear(self, child: int, message: Mapping[str, Any]) -> None:
        if "ready" in message:
            self._ready.add(child)
            return
        if "failed" in message:
            self._fail(message["failed"])
        if not message:
            self._children.pop(child).close()
        self._ready.discard(child)
        self._lose(message.get("lost", child))

    def _lose(self, process: int) -> None:
        """Notes that a process ended, which may be started again."""
        raise NotImplementedError

    def _give_up(self) -> NoReturn:
        """Ends the meeting when its time is over."""
        raise NotImplementedError

    def _fail(self, problem: str) -> NoReturn:
        """Ends the meeting in all processes."""
        for connection in self._children.values():
            send(connection, {"failed": problem})
            connection.close()
        self._leave(problem)
        if self._listener is not None:
            self._listener.close()
        raise ProcessError(problem)

    def _leave(self, problem: str) -> None:
        """Tells others than the children."""
        raise NotImplementedError

    def _go(self) -> None:
        """Lets those below go on, when all are connected."""
        # The port is free before: a process that gets an answer starts JAX, which connects to this port.
        if self._listener is not None:
            self._listener.close()
        for connection in self._children.values():
            send(connection, {"go": True})


class _First(_Member):
    """The first process, which knows where all others are."""

    def __init__(self, here: tuple[str, int], hello: Mapping[str, Any], timeout_s: float):
        super().__init__(hello, timeout_s)
        self._port = here[1]
        self._known: dict[int, tuple[str, int]] = {}  # where processes are, and the ports at which they listen
        self._lost: set[int] = set()
        self._listener = listen_at(here)

    def meet(self) -> dict[int, socket.socket]:
        while not self._is_complete():
            self._next_message()
        self._go()
        return self._children

    def _admit(
        self, connection: socket.socket, process: int, count: int, versions: Mapping[str, str], port: int
    ) -> None:
        if count != self._count or not 0 <= process < count:
            unlike = f"process {process} was started as one of {count} processes, and process 0 as one of {self._count}"
            self._fail_with(connection, unlike)
        for name, version in self._hello["versions"].items():
            if versions.get(name) != version:
                there = versions.get(name, "of an unknown version")
                self._fail_with(
                    connection,
                    f"process {process} has {name} {there}, and process 0 has {name} {version}; install the same "
                    "versions for all processes",
                )
        if process == 0:
            self._fail_with(
                connection, "two processes say that they are process 0; give each of them its own process_id"
            )
        self._known[process] = connection.getpeername()[0].removeprefix("::ffff:"), port
        self._lost.discard(process)
        if process in self._expected:
            super()._admit(connection, process, count, versions, port)
            self._miss()
            return
        above = self._known.get(parent(process))
        send(connection, {"later": True} if above is None else {"parent": above})
        connection.close()
        self._miss()

    def _lose(self, process: int) -> None:
        self._known.pop(process, None)
        self._lost.add(process)
        self._miss()

    def _miss(self) -> None:
        """Ends the meeting if nobody is missing but processes that have ended."""
        if self._lost and len(self._known) + len(self._lost) == self._count - 1:
            self._fail(f"{_named(sorted(self._lost))} connected and ended before all processes had connected")

    def _give_up(self) -> NoReturn:
        missing = [process for process in range(1, self._count) if process not in self._known]
        if not missing:
            apart = _named(sorted(self._expected - self._ready))
            self._fail(
                f"all processes reached process 0, and {apart} or those below did not reach each other within "
                f"{self._timeout_s:g} s; processes must be able to reach each other at any port"
            )
        self._fail(
            f"{_named(missing)} of {self._count} did not connect to process 0 at port {self._port} within "
            f"{self._timeout_s:g} s; see whether {'it was' if len(missing) == 1 else 'they were'} started and can "
            "reach this host, or give a longer timeout"
        )

    def _fail_with(self, connection: socket.socket, problem: str) -> NoReturn:
        send(connection, {"failed": problem})
        connection.close()
        self._fail(problem)

    def _leave(self, problem: str) -> None:
        """Tells those that look for a parent why they look in vain."""
        assert self._listener is not None
        until = time.monotonic() + (_LATER_S + _RETRY_S if self._count > 1 + CHILDREN else 0)
        while (left_s := until - time.monotonic()) > 0:
            self._listener.settimeout(left_s)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                return
            send(connection, {"failed": problem})
            connection.close()


class _Other(_Member):
    """Any other process, which finds its parent by asking the first one."""

    def __init__(self, first: tuple[str, int], hello: Mapping[str, Any], timeout_s: float):
        super().__init__(hello, timeout_s)
        self._first = first
        self._above: socket.socket | None = None

    def meet(self) -> dict[int, socket.socket]:
        self._above = self._find_parent()
        is_told = False
        while True:
            if self._is_complete() and not is_told:
                send(self._above, {"ready": True})
            is_told = self._is_complete()
            message = self._next_message(self._above)
            if "go" in message:
                self._go()
                return {parent(self._process): self._above, **self._children}
            if message:
                self._fail(message.get("failed") or self._ended(parent(self._process)))

    def _find_parent(self) -> socket.socket:
        """The connection to the parent, once it is there."""
        delay_s, is_reached, why = _RETRY_S, False, "it is not there"
        while True:
            connection = self._connect(is_patient=not is_reached)
            is_reached = True
            if self._expected and self._listener is None:
                host = connection.getsockname()[0]
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = socket.create_server((host, 0), family=family)
            answer = self._introduce(connection)
            if "child" in answer:
                return connection
            connection.close()
            if "parent" not in answer and "later" not in answer:
                self._fail(answer.get("failed") or self._ended(0))
            if "parent" in answer:
                above, why = self._join(*answer["parent"])
                if above is not None:
                    return above
            if time.monotonic() > self._deadline + 2 * _LATER_S:  # the first process knows by then who is missing
                self._fail(
                    f"process {self._process} could not reach process {parent(self._process)} within "
                    f"{self._timeout_s:g} s ({why}); processes must be able to reach each other at any port"
                )
            time.sleep(delay_s)
            delay_s = min(_LATER_S, 1.5 * delay_s)

    def _join(self, host: str, port: int) -> tuple[socket.socket | None, str]:
        """The connection to the parent at an address, or why there is none."""
        try:
            above = socket.create_connection((host, port), timeout=max(0.01, self._deadline - time.monotonic()))
        except OSError as error:
            return None, f"{error} at {host}:{port}"
        above.settimeout(None)
        if "child" in self._introduce(above):
            return above, ""
        above.close()
        return None, f"another program is at {host}:{port}"

    def _introduce(self, connection: socket.socket) -> Mapping[str, Any]:
        """What a process answers to this one's hello."""
        port = 0 if self._listener is None else self._listener.getsockname()[1]
        return _message(connection) if send(connection, {**self._hello, "port": port}) else {}

    def _connect(self, *, is_patient: bool) -> socket.socket:
        """A connection to the first process."""
        place = f"process 0 at {self._first[0]}:{self._first[1]}"
        while True:
            try:
                connection = socket.create_connection(self._first, timeout=max(0.01, self._deadline - time.monotonic()))
                connection.settimeout(None)
                return connection
            except OSError as error:
                if not is_patient:
                    self._fail(f"{place} ended while process {self._process} waited")
                if time.monotonic() + _RETRY_S > self._deadline:
                    self._fail(
                        f"process {self._process} could not reach {place} within {self._timeout_s:g} s ({error}); see "
                        "whether process 0 was started and its address is right, or give a longer timeout"
                    )
                time.sleep(_RETRY_S)

    def _ended(self, process: int) -> str:
        place = f"process {process}" + ("" if process else f" at {self._first[0]}:{self._first[1]}")
        return f"{place} ended, or is not mw.initialize, while process {self._process} waited"

    def _lose(self, process: int) -> None:
        assert self._above is not None
        send(self._above, {"lost": process})

    def _leave(self, problem: str) -> None:
        if self._above is not None:
            send(self._above, {"failed": problem})
            self._above.close()


def _message(connection: socket.socket) -> Mapping[str, Any]:
    """The next message of a connection; none where it is closed, or where something else comes."""
    try:
        message = json.loads(read_line(connection))
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _named(processes: list[int]) -> str:
    shown = ", ".join(map(str, processes[:8])) + (", …" if len(processes) > 8 else "")
    return f"process {shown}" if len(processes) == 1 else f"processes {shown}"
