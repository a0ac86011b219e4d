"""Leads an elastic run: hosts come and leave, and each round of the run has the processes of those that are there.

The launcher that can listen at the run's address leads; those of other hosts connect to it, and a connection that
closes is a host that left. A round ends when one of its processes fails, when a host of it is lost, and when a host has
come that there is room for; its processes are then asked to end, and the next round begins with what is there. JAX
cannot replace single processes, so a round's processes all start together.
"""

import json
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from meshwright.cli.console import note
from meshwright.cli.launching.crew import Ending
from meshwright.cli.launching.settings import is_loopback
from meshwright.runtime.processes.connections import keep_alive, reserved_port, send, split_address

_TICK_S = 0.2  # between looks at the clock
_SETTLE_S = 3.0  # after a host has come: several mostly come together
_FAILED = "a process failed"
HEARTBEAT_S = 10.0  # after which a host that does not answer has left


@dataclass(eq=False)
class Host:
    """A launcher that takes part.

    Attributes:
        connection: The leader's connection to it.
        name: The host's name.
        places: How many processes it can run.
        leads: Whether it is the leader's own, which has the first process.
    """

    connection: socket.socket
    name: str
    places: int
    leads: bool


@dataclass
class Round:
    """Processes that started together.

    Attributes:
        number: Counts the rounds of a run.
        shares: How many processes each host runs.
        port: Reserves the port of the first process.
        endings: How the processes of hosts ended, in the order in which they did.
        why: Why the round is to end before its processes do; empty as long as it is not.
        lost: Hosts of the round that have left.
    """

    number: int
    shares: dict[Host, int]
    port: socket.socket
    endings: dict[Host, Ending] = field(default_factory=dict)
    why: str = ""
    lost: set[Host] = field(default_factory=set)

    @property
    def is_over(self) -> bool:
        return self.shares.keys() <= self.endings.keys() | self.lost


class Leader:
    """The leader of a run.

    Args:
        listener: Listens at the run's address.
        address: Where processes reach this host.
        least: The fewest processes that a round may have.
        most: The most that it may have.
        restarts: How often a round may fail by its processes; hosts that leave or come do not count.
        patience_s: How long it waits for hosts while there are too few.
        kept: A folder of this host's, for hosts that see it, too.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: str,
        least: int,
        most: int,
        restarts: int,
        patience_s: float,
        kept: str,
    ):
        self._listener, self._address, self._kept = listener, address, kept
        self._least, self._most, self._restarts = least, most, restarts
        self._events: SimpleQueue[tuple[Host, Any]] = SimpleQueue()  # a message; None when it left
        self._hosts: list[Host] = []
        self._round: Round | None = None
        self._num_rounds = 0
        self._changed_at = time.monotonic()  # when a host has come or left
        self._patience_s = patience_s
        self._is_over = False

    def start(self) -> None:
        """Leads in the background; the launcher that leads takes part as any other does."""
        Thread(target=self._accept, name="meshwright-hosts", daemon=True).start()
        Thread(target=self._lead, name="meshwright-leader", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            keep_alive(connection, HEARTBEAT_S)
            Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        host = None
        for message in messages(connection):
            if host is None:
                host = Host(connection, str(message["host"]), int(message["places"]), bool(message["leads"]))
            self._events.put((host, message))
        if host is not None:
            self._events.put((host, None))

    def _lead(self) -> None:
        while not self._is_over:
            with suppress(Empty):
                self._heed(*self._events.get(timeout=_TICK_S))
            self._advance()

    def _heed(self, host: Host, message: Any) -> None:
        if message is None or "left" in message:
            if host in self._hosts:
                self._hosts.remove(host)
                self._changed_at = time.monotonic()
            if self._round is not None and host in self._round.shares:
                self._round.lost.add(host)
                self._end_round(f"host {host.name} left")
        elif "places" in message:
            self._hosts.insert(0 if host.leads else len(self._hosts), host)
            self._changed_at = time.monotonic()
        elif self._round is not None and message.get("ended") == self._round.number:
            ending = self._round.endings[host] = Ending(**message["how"])
            if ending.code:
                self._end_round(_FAILED)

    def _end_round(self, why: str, *, gently: bool = False) -> None:
        """Has all processes of the round end, if it is not to end already."""
        assert self._round is not None
        if self._round.why:
            return
        self._round.why = why
        for host in self._round.shares:
            send(host.connection, {"end": self._round.number, "gently": gently})

    def _advance(self) -> None:
        """Begins, ends or waits for a round, as the hosts that are here and the time allow."""
        if not self._hosts or not self._hosts[0].leads:
            return  # its own connection comes
        places = min(self._most, sum(host.places for host in self._hosts))
        waited_s = time.monotonic() - self._changed_at
        if self._round is not None:
            running = sum(self._round.shares.values())
            if not self._round.why and places > running and waited_s >= _SETTLE_S:
                self._end_round(f"there is room for {places} processes", gently=True)
            if self._round.is_over:
                self._after(self._round)
        elif places >= self._least and (places == self._most or waited_s >= _SETTLE_S):
            self._begin(places)
        elif places < self._least and waited_s > self._patience_s:
            lacking = f"{self._least} processes are needed, and the hosts that are here have room for {places}"
            note(f"meshwright launch: {lacking}; no other host came within {self._patience_s:g} s")
            self._finish(1)

    def _begin(self, places: int) -> None:
        host, _ = split_address(self._address)
        port = reserved_port(host if is_loopback(self._address) else "")
        shares: dict[Host, int] = {}
        for one in self._hosts:
            shares[one] = min(one.places, places - sum(shares.values()))
        self._round = Round(self._num_rounds, {one: share for one, share in shares.items() if share}, port)
        self._num_rounds += 1
        number, first = port.getsockname()[1], 0
        told = {"address": f"{self._address.rpartition(':')[0]}:{number}", "count": places, "kept": self._kept}
        for one, share in self._round.shares.items():
            send(one.connection, {"start": self._round.number, "first": first, "share": share, **told})
            first += share
        if self._num_rounds > 1:
            hosts = f"{len(self._round.shares)} host{'s' if len(self._round.shares) > 1 else ''}"
            note(f"meshwright launch: starting again with {places} processes of {hosts}")

    def _after(self, ended: Round) -> None:
        """Decides what follows a round: the next one, or the end."""
        ended.port.close()
        self._round = None
        failed = [ending for ending in ended.endings.values() if ending.code]
        if not failed and not ended.why:
            self._finish(0)
        elif ended.why == _FAILED and not ended.lost:
            first = next((ending for ending in failed if not ending.is_consequence), failed[0])
            first.explain()
            if first.is_permanent:
                note("meshwright launch: not started again, since the same error would end it again")
            if first.is_permanent or not self._restarts:
                self._finish(first.code)
            self._restarts -= 1
        else:
            note(f"meshwright launch: {ended.why}")

    def _finish(self, code: int) -> None:
        self._is_over = True
        for host in reversed(self._hosts):  # this one is the first: it exits when it hears so, and this thread with it
            send(host.connection, {"over": code})


def messages(connection: socket.socket) -> Iterator[Mapping[str, Any]]:
    """The messages that come over a connection, until it closes or brings what no launcher sends."""
    text = b""
    with suppress(OSError, ValueError):
        while received := connection.recv(2**16):
            *lines, text = (text + received).split(b"\n")
            yield from map(json.loads, lines)
