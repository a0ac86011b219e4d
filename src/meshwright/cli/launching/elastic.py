"""Takes part in an elastic run: the processes of this host, in each of the run's rounds.

The same command is given on every host. Whichever launcher can listen at the run's address leads (`leader.py`); all of
them, that one too, connect to it, and start and end processes as it says. If the leader is lost, the others look for
another one at the same address.
"""

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from meshwright.cli.console import note
from meshwright.cli.launching.crew import Crew
from meshwright.cli.launching.leader import HEARTBEAT_S, Leader, messages
from meshwright.cli.launching.settings import keeping, process_settings
from meshwright.errors import ProcessError
from meshwright.runtime.processes.connections import keep_alive, send, split_address

_RETRY_S = 0.5  # between attempts to reach a leader
_ANSWER_S = 5.0  # for a host to answer


@dataclass(frozen=True)
class ElasticRun:
    """A run whose hosts come and leave, as one host sees it.

    Attributes:
        command: What each process runs.
        shares: The devices of each process that this host can run.
        address: The run's address.
        least: The fewest processes that the run may have.
        most: The most.
        restarts: How often it is started again after a process failed.
        patience_s: How long to wait for hosts, and for the leader.
        grace_s: How long processes have to end when they are asked to.
        kept: A folder of this host's, in which plans and compiled programs are kept.
    """

    command: Sequence[str]
    shares: Sequence[Mapping[str, str]]
    address: str
    least: int
    most: int
    restarts: int
    patience_s: float
    grace_s: float
    kept: str

    def take_part(self) -> int:
        """Takes part until the run is over, or this host is asked to leave; returns the exit code."""
        address, deadline = self.address, time.monotonic() + self.patience_s
        while True:
            lead = _listen(address)
            if lead is not None:
                address = f"{address.rpartition(':')[0]}:{lead.getsockname()[1]}"
                note(f"meshwright launch: leading at {address}; other hosts join with --at {address}")
                numbers = self.least, self.most, self.restarts
                Leader(lead, address, *numbers, self.patience_s, self.kept).start()
            connection = _connect(address)
            if connection is not None:
                code = _Member(self, connection, leads=lead is not None).run()
                if code is not None:
                    return code
                note("meshwright launch: the host that leads left; looking for it")
                deadline = time.monotonic() + self.patience_s
            elif time.monotonic() > deadline:
                raise ProcessError(
                    f"no launcher leads at {address}, within {self.patience_s:g} s; start one on that host, or give "
                    "the right address"
                )
            time.sleep(_RETRY_S)


class _Member:
    """This host's part, as long as one leader leads."""

    def __init__(self, run: ElasticRun, connection: socket.socket, *, leads: bool):
        self._run, self._connection = run, connection
        self._inbox: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
        self._crew: Crew | None = None
        self._round = -1
        self._is_lost = False
        self._to_end: dict[int, bool] = {}  # rounds, and whether gently
        send(connection, {"host": socket.gethostname(), "places": len(run.shares), "leads": leads})
        Thread(target=self._listen, daemon=True).start()

    def run(self) -> int | None:
        """Does what the leader says; returns the exit code, or None when the leader is lost."""
        while message := self._inbox.get():
            if "over" in message:
                return int(message["over"])
            code = self._run_round(message)
            if code is not None:
                send(self._connection, {"left": True})
                return code
        return None

    def _listen(self) -> None:
        for message in messages(self._connection):
            if "end" in message:
                self._to_end[message["end"]] = message["gently"]
                self._end_crew()
            else:
                self._inbox.put(message)
        self._is_lost = True
        self._end_crew()
        self._inbox.put(None)

    def _end_crew(self) -> None:
        """Ends the processes of a round that is to end."""
        crew = self._crew
        if crew is None:
            return
        if self._is_lost or self._to_end.get(self._round) is False:
            crew.kill_later()
        elif self._round in self._to_end:
            crew.end(signal.SIGTERM)

    def _run_round(self, told: Mapping[str, Any]) -> int | None:
        """Runs this host's processes of a round; returns their exit code if a signal asked this host to leave."""
        first, share, folder = told["first"], told["share"], told["kept"]
        kept = keeping(folder if Path(folder).is_dir() else self._run.kept)  # on one machine, or a disk that both see
        shares = [{**kept, **devices} for devices in self._run.shares[:share]]
        settings = process_settings(told["address"], told["count"], shares, first)
        crew = Crew(self._run.command, settings, self._run.grace_s, first, told["count"])
        self._round, self._crew = told["start"], crew
        self._end_crew()  # if that was said meanwhile
        ending = crew.run()
        self._crew = None
        send(self._connection, {"ended": told["start"], "how": asdict(ending)})
        return ending.code if crew.is_stopped else None


def _listen(address: str) -> socket.socket | None:
    """Listens at a run's address; None where another host or launcher does."""
    host, port = split_address(address, any_port=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Launchers of one machine look for a new leader at the same time: an address is never shared.
        return socket.create_server((host, port), family=family)
    except OSError:
        return None


def _connect(address: str) -> socket.socket | None:
    try:
        connection = socket.create_connection(split_address(address), timeout=_ANSWER_S)
    except OSError:
        return None
    connection.settimeout(None)
    keep_alive(connection, HEARTBEAT_S)
    return connection
