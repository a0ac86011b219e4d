"""Moves between processes by `jax.experimental.transfer`: senders post arrays under a number, receivers pull them.

Each process has one server, whose address it publishes in JAX's key-value store. Three traps of that module (jax 0.10)
are avoided here:

- It takes shards in the order of their devices, without a look at how the array is split. So only arrays on one device
  are posted.
- A connection to a server that has ended waits for ever, and the `timeout` of a pull has no effect. So the port is
  tried before the first pull and while a pull waits, and the waiting is bounded here.
- Arrays are found by their number alone, whatever their shapes. So both ends count the posts from one process to
  another, which they make in the same order, and the number also depends on the types: out of order nothing is found.

A pull whose server ends fails at once. On CPUs a server needs threads of XLA's client: see `cpu_turns.add_threads`.
"""

import socket
import time
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import cache
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from meshwright import jax_devices
from meshwright.errors import ProcessError
from meshwright.runtime.processes import peers
from meshwright.runtime.processes.connections import split_address
from meshwright.runtime.transfer.routes import Move

_FOLDER = "meshwright/transfer/"
_LOOK_S = 1.0  # between looks whether a process that is waited for still exists
_CONNECT_S = 10.0  # for the host of a process to accept a connection
_NUMBERS = 2**24  # of posts from one process to another, until they begin anew; and of stamps


class Pulls:
    """A `Transport` between processes in which senders do not wait for receivers, nor others for either."""

    by_xla = False

    def __init__(self, moves: Sequence[Move], dtype: Any, timeout_s: float):
        self._timeout_s = timeout_s
        here = jax.process_index()
        sent: list[Any] = [move.target for move in moves if _process(move.source) == here]
        received = [move for move in moves if _process(move.target) == here]
        specs = [jax.ShapeDtypeStruct(m.shape, dtype, sharding=SingleDeviceSharding(m.target)) for m in received]
        self._num_received = len(received)
        self._receivers = _by_process(sent)  # the positions of what each of them is sent
        self._senders = _by_process([move.source for move in received])  # and of what each of them sends
        self._specs = {peer: [specs[i] for i in places] for peer, places in self._senders.items()}
        self._stamps = {peer: _stamp(moves, dtype, here, peer) for peer in self._receivers}
        self._their_stamps = {peer: _stamp(moves, dtype, peer, here) for peer in self._senders}

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """See `Transport`; the pieces are posted before any is pulled, so that processes may exchange some."""
        server = _server()
        for peer, places in self._receivers.items():
            server.post(peer, self._stamps[peer], [sent[place] for place in places])
        received: list[Any] = [None] * self._num_received
        for peer, places in self._senders.items():
            pulled = server.pull(peer, self._their_stamps[peer], self._specs[peer], self._timeout_s)
            for place, array in zip(places, pulled, strict=True):
                received[place] = array
        return received

    def wait(self, received: Sequence[Any]) -> None:
        """See `Transport`."""
        server = _server()
        for peer, places in self._senders.items():
            server.wait(peer, [received[place] for place in places], self._timeout_s)


class _Server:
    """This process's server, and its connections to those of others."""

    def __init__(self) -> None:
        self._process = jax.process_index()
        self._server = jax_devices.start_transfer_server(_own_host())
        self._num_posts: Counter[tuple[int, int]] = Counter()
        self._addresses: dict[int, str] = {}
        self._connections: dict[int, Any] = {}
        self._watchers = _Watchers()
        if not jax_devices.publish(f"{_FOLDER}{self._process}", self._server.address()):
            raise ProcessError("process 0 cannot be reached any more; its own output may say why")

    def post(self, receiver: int, stamp: int, arrays: Sequence[Any]) -> None:
        """Offers arrays to a process, and returns at once."""
        self._server.await_pull(self._number(self._process, receiver, stamp), list(arrays))

    def pull(self, sender: int, stamp: int, specs: Sequence[Any], timeout_s: float) -> list[Any]:
        """Begins to fetch the arrays that a process posts for this one."""
        if sender not in self._connections:
            self._addresses[sender] = self._find(sender, timeout_s)
            self._check(sender)
            self._connections[sender] = self._server.connect(self._addresses[sender])
        return self._connections[sender].pull(self._number(sender, self._process, stamp), list(specs))

    def wait(self, sender: int, arrays: Sequence[Any], timeout_s: float) -> None:
        """Waits until arrays have arrived from a process."""
        if not all(array.is_ready() for array in arrays):
            self._await(sender, list(arrays), timeout_s)
        try:
            jax.block_until_ready(list(arrays))
        except jax.errors.JaxRuntimeError as error:
            raise ProcessError(_lost(sender, str(error).splitlines()[0])) from error

    def _await(self, sender: int, arrays: list[Any], timeout_s: float) -> None:
        deadline, arrived = time.monotonic() + timeout_s, self._watchers.watch(arrays)
        while not arrived.wait(min(_LOOK_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise ProcessError(
                    f"process {sender} sent nothing to process {self._process} for {timeout_s:g} s; all processes must "
                    "move the same arrays in the same order"
                )
            self._check(sender)

    def _number(self, sender: int, receiver: int, stamp: int) -> int:
        """The number of the next post, which both ends count; a server has one sender and any receivers."""
        self._num_posts[sender, receiver] += 1
        return (receiver * _NUMBERS + stamp) * _NUMBERS + self._num_posts[sender, receiver] % _NUMBERS

    def _find(self, process: int, timeout_s: float) -> str:
        """The address of another process's server, once it has one."""
        deadline = time.monotonic() + timeout_s
        while True:
            _check_peers()
            try:
                address = jax_devices.read_published(f"{_FOLDER}{process}", _LOOK_S)
            except ConnectionError as error:
                raise ProcessError(f"process 0 cannot be reached any more: {error:.200}") from error
            if address is not None:
                return address
            if time.monotonic() > deadline:
                raise ProcessError(
                    f"process {process} did not begin to move arrays to process {self._process} within {timeout_s:g} "
                    "s; all processes must move the same arrays in the same order"
                )

    def _check(self, process: int) -> None:
        """Raises an error if another process does not exist any more."""
        _check_peers()
        try:
            socket.create_connection(split_address(self._addresses[process]), timeout=_CONNECT_S).close()
        except OSError as error:
            raise ProcessError(_lost(process, str(error))) from error


class _Watchers:
    """Threads that block until arrays are ready, so that whoever waits for them can do so with a limit.

    A thread whose arrays never arrive is left alone: it ends with the process.
    """

    def __init__(self) -> None:
        self._idle: deque[SimpleQueue[tuple[list[Any], Event]]] = deque()

    def watch(self, arrays: list[Any]) -> Event:
        """An event that is set once arrays are ready, or have failed."""
        try:
            orders = self._idle.pop()
        except IndexError:
            orders = SimpleQueue()
            Thread(target=self._serve, args=(orders,), name="meshwright-arrivals", daemon=True).start()
        event = Event()
        orders.put((arrays, event))
        return event

    def _serve(self, orders: "SimpleQueue[tuple[list[Any], Event]]") -> None:
        while True:
            arrays, event = orders.get()
            with suppress(Exception):  # whoever waits raises it
                jax.block_until_ready(arrays)
            del arrays  # a buffer lives as long as somebody refers to it
            self._idle.append(orders)
            event.set()


@cache
def _server() -> _Server:
    return _Server()


def _process(device: Any) -> int:
    return int(device.process_index)


def _stamp(moves: Sequence[Move], dtype: Any, sender: int, receiver: int) -> int:
    """A number that depends on what one process sends to another."""
    sent = [move.box for move in moves if (_process(move.source), _process(move.target)) == (sender, receiver)]
    return zlib.crc32(repr((str(dtype), sent)).encode()) % _NUMBERS


def _by_process(devices: Sequence[Any]) -> dict[int, list[int]]:
    """The positions of each process's devices."""
    found = defaultdict(list)
    for place, device in enumerate(devices):
        found[_process(device)].append(place)
    return dict(found)


def _lost(process: int, cause: str) -> str:
    return f"process {process} ended or failed before it had sent an array ({cause:.200}); its own output may say why"


def _check_peers() -> None:
    if peers.current is not None and peers.current.failure is not None:
        raise ProcessError(peers.current.failure)


def _own_host() -> str:
    """The address of this machine from which it reaches the coordinator: others can reach it there."""
    host, port = split_address(jax_devices.coordinator_address() or "127.0.0.1:1")
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with closing(socket.socket(family, kind)) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])
