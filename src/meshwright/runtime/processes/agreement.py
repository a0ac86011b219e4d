"""Checks that all processes have the next batch, of the same types, before any of them computes with it.

Each process publishes the types of its batch in JAX's key-value store; the first one compares them, and publishes the
verdict. The thread that prefetches batches waits for it, so that a step waits only where it would wait for data anyway.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from meshwright import jax_devices
from meshwright.errors import ProcessError, ShardingError
from meshwright.runtime.processes import peers
from meshwright.runtime.processes.sharing import describe_type

_LOOK_S = 0.5  # between checks whether the answer is still needed
_streams: Counter[str] = Counter()  # opened for each function, in the same order in all processes


class Agreement:
    """The agreement of all processes on one stream of batches.

    Args:
        name: The function that the batches are for.
        is_stopped: Whether the batches are no longer needed.
    """

    def __init__(self, name: str, is_stopped: Callable[[], bool]):
        self._num_processes, self._process = jax.process_count(), jax.process_index()
        self._is_stopped = is_stopped
        self._folder = f"meshwright/batches/{name}/{_streams[name]}/"
        self._is_over = self._num_processes == 1
        self._num_batches = 0
        _streams[name] += 1

    def on_batch(self, batch: Any) -> None:
        """Waits until all processes have a batch of the same types.

        Raises:
            ShardingError: The processes' batches differ; the message names the process and the difference.
            ProcessError: Another process ended.
        """
        self._agree({"types": batch_types(batch)})
        self._num_batches += 1

    def on_end(self) -> None:
        """Waits until all processes have no more batches; raises the same errors as `on_batch`."""
        self._agree({"end": True})

    def leave(self, error: BaseException | None = None) -> None:
        """Announces that this process fetches no more batches, by choice or after an error, without waiting."""
        if self._is_over:
            return
        self._is_over = True
        status = {"left": True} if error is None else {"error": peers.describe_error(error)}
        for i in (self._num_batches, self._num_batches + 1):  # the others ask for one of them next
            key = f"verdict/{i}" if self._process == 0 else f"{i}/{self._process}"
            text = _left(0, status, self._num_batches) if self._process == 0 else json.dumps(status)
            jax_devices.publish(self._folder + key, text)  # if that fails, no process is left to read it

    def _agree(self, status: Mapping[str, Any]) -> None:
        if self._is_over:
            return
        if peers.current is not None:
            peers.current.num_batches += 1
        i = self._num_batches
        verdict = self._judge(i, status) if self._process == 0 else self._ask(i, status)
        self._is_over = bool(verdict) or "end" in status
        if verdict:
            raise ShardingError(verdict)

    def _ask(self, i: int, status: Mapping[str, Any]) -> str:
        self._publish(f"{i}/{self._process}", json.dumps(status))
        return self._wait(f"verdict/{i}")

    def _judge(self, i: int, status: Mapping[str, Any]) -> str:
        """The first process's verdict: the error in one sentence, or an empty text."""
        found: dict[int, Any] = {0: status}
        while len(found) < self._num_processes:
            self._wait(f"{i}/{next(p for p in count() if p not in found)}")
            told = jax_devices.all_published(f"{self._folder}{i}/")
            found |= {int(p): json.loads(text) for p, text in told.items()}
        verdict = compare(found, i)
        self._publish(f"verdict/{i}", verdict)
        jax_devices.forget_published(f"{self._folder}{i}/")
        if i:  # every process that announced this batch has read the verdict on the previous one
            jax_devices.forget_published(f"{self._folder}verdict/{i - 1}")
        return verdict

    def _wait(self, key: str) -> str:
        while True:
            try:
                text = jax_devices.read_published(self._folder + key, _LOOK_S)
            except ConnectionError as error:
                raise ProcessError(f"process 0 cannot be reached any more: {error:.200}") from error
            if text is not None:
                return text.removeprefix(" ")
            if peers.current is not None and peers.current.failure is not None:
                raise ProcessError(peers.current.failure)
            if self._is_stopped():
                raise Stopped

    def _publish(self, key: str, text: str) -> None:
        if not jax_devices.publish(self._folder + key, f" {text}"):  # an empty text would not be stored
            raise ProcessError("process 0 cannot be reached any more; its own output may say why")


class Stopped(Exception):
    """The batches are no longer needed."""


def compare(found: Mapping[int, Mapping[str, Any]], num_batches: int) -> str:
    """How the processes' batches differ after some batches, in one sentence; an empty text where they agree."""
    for process, status in found.items():
        if "error" in status or "left" in status:
            return _left(process, status, num_batches)
    ended = [p for p, status in found.items() if "end" in status]
    if len(ended) == len(found):
        return ""
    others = [p for p in found if p not in ended]
    if ended:
        return (
            f"process {ended[0]} has no more batches after {num_batches}, and process {others[0]} has more; give "
            "the same number in all processes: drop the surplus, or repeat some"
        )
    ours = found[0]["types"]
    for process, status in found.items():
        theirs = status["types"]
        for path in (*ours, *theirs):
            if ours.get(path) != theirs.get(path):
                return (
                    f"batch {num_batches + 1} has {path} as {theirs.get(path, 'nothing')} in process {process} and as "
                    f"{ours.get(path, 'nothing')} in process 0; the processes' parts of a batch must be equally large "
                    "and of one structure, and leaves without dims the same"
                )
    return ""


def _left(process: int, status: Mapping[str, Any], num_batches: int) -> str:
    if "error" in status:
        return f"the batches of process {process} ended in {status['error']}, after {num_batches} of them"
    return f"process {process} stopped taking batches after {num_batches}, and others did not; stop in all processes"


def batch_types(batch: Any) -> dict[str, str]:
    """The types of a batch's leaves by path, and the values of leaves that must be equal in all processes."""
    found = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        is_shared = isinstance(leaf, bool | int | float | complex | str) or (
            isinstance(leaf, np.ndarray | np.generic) and not leaf.shape
        )
        where = keystr(path, simple=True, separator="/") or "its array"
        found[where] = describe_type(leaf) + (f" = {leaf}" if is_shared else "")
    return found
