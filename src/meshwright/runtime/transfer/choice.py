"""Which transport arrays take between processes: what is there is tried on a small message, and the fastest is taken.

Two processes try, and all learn what they found, so that all take the same. A transport that JAX lacks here, that does
not deliver in time, or that delivers something else is out; the sockets of `jax.experimental.transfer` are what is left
where no other works. The environment variable MESHWRIGHT_TRANSPORT names one to be taken untried.
"""

import logging
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass
from threading import Thread
from typing import Any

import jax
import numpy as np

from meshwright import jax_devices
from meshwright.errors import ShardingError
from meshwright.runtime.transfer.permutes import Permutes
from meshwright.runtime.transfer.pulls import Pulls
from meshwright.runtime.transfer.routes import Move
from meshwright.runtime.transfer.transports import Puts, Transport
from meshwright.units import format_seconds

log = logging.getLogger("meshwright")

SETTING = "MESHWRIGHT_TRANSPORT"
TRANSPORTS: Mapping[str, type[Transport]] = {"device_put": Puts, "permute": Permutes, "sockets": Pulls}
_SIZE = 2**14  # numbers of the message: 64 KiB, an activation of a small model
_TRIES = 9
_PATIENCE_S = 20.0  # for a transport to deliver the first message, which also compiles


@dataclass(frozen=True)
class Choice:
    """The transport that all processes take.

    Attributes:
        name: One of `TRANSPORTS`.
        reason: What was measured, or who chose.
    """

    name: str
    reason: str

    @property
    def transport(self) -> type[Transport]:
        return TRANSPORTS[self.name]

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


_chosen: list[Choice] = []  # none, or one: what all processes agreed on


def chosen() -> Choice:
    """What the processes agreed on; the sockets as long as they have not, since nobody meets there."""
    return _chosen[0] if _chosen else Choice("sockets", "not measured")


def agree(devices: Sequence[Any]) -> Choice:
    """Lets all processes choose together, once; each calls this at the same place.

    Args:
        devices: All devices that send each other something, in one order; the first two of different processes try.

    Raises:
        ShardingError: The environment variable of process 0 names no transport.
    """
    if not _chosen:
        forced = jax_devices.broadcast(os.environ.get(SETTING, "").encode()).decode()
        if forced and forced not in TRANSPORTS:
            raise ShardingError(
                f"the environment variable {SETTING} is {forced!r}; give one of {', '.join(TRANSPORTS)}"
            )
        _chosen.append(Choice(forced, f"set by {SETTING}") if forced else _measured(devices))
        log.info("stages send each other arrays by %s", _chosen[0])
    return _chosen[0]


def _measured(devices: Sequence[Any]) -> Choice:
    """The fastest of what is there."""
    first = devices[0]
    second = next(device for device in devices if device.process_index != first.process_index)
    takes_part = jax.process_index() in (first.process_index, second.process_index)
    found: list[tuple[float, str]] = []
    for name, transport in TRANSPORTS.items():
        if name == "device_put" and not jax_devices.sends_across_processes(first):
            continue
        seconds = _tried(transport, first, second) if takes_part else 0.0
        found.append((jax_devices.largest_number(seconds), name))
    said = ", ".join(f"{name} {format_seconds(s) if np.isfinite(s) else 'failed'}" for s, name in found)
    seconds, name = min(found)
    about = f"{4 * _SIZE // 2**10} KiB there and back: {said}"
    return Choice(name if np.isfinite(seconds) else "sockets", about)


def _tried(transport: type[Transport], first: Any, second: Any) -> float:
    """Seconds in which a message is there and back; infinite where it is not, and the log says why."""
    done: Future[float] = Future()

    def attempt() -> None:
        try:
            done.set_result(_round_trip_s(transport, first, second))
        except Exception as error:  # whatever a backend raises for what it cannot do
            done.set_exception(error)

    Thread(target=attempt, name="meshwright-transport", daemon=True).start()
    try:
        return done.result(_PATIENCE_S)
    except LateError:
        log.warning("%s cannot be used between processes: nothing arrived in %g s", transport.__name__, _PATIENCE_S)
    except Exception as error:
        log.warning("%s cannot be used between processes: %s", transport.__name__, error)
    return float("inf")


def _round_trip_s(transport: type[Transport], first: Any, second: Any) -> float:
    here, box = jax.process_index(), ((0, _SIZE),)
    ways = ((first, second), (second, first))
    forth, back = (transport([Move(box, *way)], np.dtype("float32"), _PATIENCE_S) for way in ways)
    is_first, times = first.process_index == here, []
    message = np.arange(_SIZE, dtype=np.float32)
    array = jax.block_until_ready(jax.device_put(message, first)) if is_first else None
    for _ in range(_TRIES):
        started = time.perf_counter()
        moved = forth.exchange([array] if is_first else [])
        if not is_first:
            forth.wait(moved)
        returned = back.exchange([] if is_first else moved)
        if is_first:
            back.wait(returned)
            jax.block_until_ready(returned)
            times.append(time.perf_counter() - started)
    last = returned if is_first else moved
    if not np.array_equal(np.asarray(last[0]), message):
        raise ValueError("the message arrived changed")
    return statistics.median(times[1:]) if times else 0.0
