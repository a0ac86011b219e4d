"""The barriers of one save among several processes; they end for all of them when one could not write its part.

Orbax synchronises its background threads at barriers of JAX's coordination service. A process whose write failed does
not come to the barrier where the others wait, but to the last one, and all would wait for each other until a timeout of
twenty minutes. These barriers are texts in the service's store instead, among which a failure is published, too.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from meshwright import jax_devices
from meshwright.errors import CheckpointError, ProcessError
from meshwright.runtime.processes import peers
from meshwright.training.saving.files import reason

Agreed = TypeVar("Agreed")

_LOOK_S = 0.5  # between checks whether another process failed
_TICK_S = 0.02  # between counts of the processes that have arrived
_saves: Counter[str] = Counter()  # begun by this process: in the same order in all processes


class SaveBarrier:
    """All barriers of one save; Orbax calls it."""

    def __init__(self) -> None:
        number = _saves["begun"]
        _saves["begun"] += 1
        self._folder = f"meshwright/saves/{number}/"
        self._count, self._process = jax.process_count(), jax.process_index()
        if number > 1 and self._count > 1 and self._process == 0:
            # All took part in the previous save, so they have left the barriers of the one before it.
            jax_devices.forget_published(f"meshwright/saves/{number - 2}/")

    def __call__(self, key: str, timeout_ms: int | None = None) -> None:
        """Waits until all processes are here; raises the same errors as `agree`."""
        if self._count > 1:
            error = sys.exc_info()[1]
            if error is not None:
                self.fail(error)
                raise CheckpointError(reason(error)) from error
            self.agree(key, None, lambda _: None)

    def agree(self, key: str, own: Any, combine: Callable[[list[Any]], Agreed]) -> Agreed:
        """What the first process makes of a value of each process; values are JSON's.

        Raises:
            CheckpointError: Another process could not write its part, or this one, and its error is being handled.
            ProcessError: Another process ended.
        """
        if self._count == 1:
            return combine([own])
        place = f"{self._folder}{key.replace('/', '.')}/"
        jax_devices.publish(f"{place}{self._process}", json.dumps(own))
        if self._process == 0:
            values = [json.loads(self._read(f"{place}{process}")) for process in range(self._count)]
            jax_devices.publish(f"{place}all", json.dumps(combine(values)))
        agreed: Agreed = json.loads(self._read(f"{place}all"))
        return agreed

    def _read(self, key: str) -> str:
        while (text := jax_devices.read_published(key, _LOOK_S)) is None:
            self._check()
        return text

    def fail(self, error: BaseException) -> None:
        """Lets the others know that this process could not write its part."""
        if self._count > 1:
            jax_devices.publish(f"{self._folder}failed/{self._process}", reason(error))

    def leave(self) -> bool:
        """Whether to clear what a save that failed has written: the first process is to, once none writes any more."""
        if self._count > 1:
            place = f"{self._folder}left/"
            jax_devices.publish(f"{place}{self._process}", "here")
            while self._process == 0 and len(jax_devices.all_published(place)) < self._count:
                if peers.current is not None and peers.current.failure is not None:
                    return False
                time.sleep(_TICK_S)
        return self._process == 0

    def _check(self) -> None:
        for process, why in jax_devices.all_published(f"{self._folder}failed/").items():
            raise CheckpointError(f"process {process} could not do its part: {why}")
        if peers.current is not None and peers.current.failure is not None:
            raise ProcessError(peers.current.failure)
