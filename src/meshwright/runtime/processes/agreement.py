"""Whether all processes have the next batch, and one of the same types: agreed before any of them computes with it.

Each process publishes what it fetched in JAX's key-value store; the first one compares, and publishes the verdict. The
thread that fetches batches ahead waits for it, so that a step waits only where it would have to wait for data.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from meshwright import jax_compat
from meshwright.errors import ProcessError, ShardingError
from meshwright.runtime.processes import peers
from meshwright.runtime.processes.sharing import describe_type

_LOOK_S = 0.5  # between looks whether anybody still wants the answer
_streams: Counter[str] = Counter()  # of batches for each function: all processes open them in the same order


class Agreement:
    """What all processes agree on about one stream of batches.

    Args:
        name: The function that the batches are for.
        is_stopped: Whether nobody wants them any more.
    """

    def __init__(self, name: str, is_stopped: Callable[[], bool]):
        self._num_processes, self._process = jax.process_count(), jax.process_index()
        self._is_stopped = is_stopped
        self._folder = f"meshwright/batches/{name}/{_streams[name]}/"
        self._is_over = self._num_processes == 1
        self._num_batches = 0
        _streams[name] += 1

    def on_batch(self, batch: Any) -> None:
        """Waits until all have a batch like this one.

        Raises:
            ShardingError: They do not; it says which process has what.
            ProcessError: Another process ended.
        """
        self._agree({"types": batch_types(batch)})
        self._num_batches += 1

    def on_end(self) -> None:
        """Waits until all have no more batches; raises what `on_batch` does."""
        self._agree({"end": True})

    def leave(self, error: BaseException | None = None) -> None:
        """Says that this process fetches no more, since it does not want to, or for an error; waits for nobody."""
        if self._is_over:
            return
        self._is_over = True
        status = {"left": True} if error is None else {"error": peers.describe_error(error)}
        for i in (self._num_batches, self._num_batches + 1):  # one of them is the next that the others ask for
            key = f"verdict/{i}" if self._process == 0 else f"{i}/{self._process}"
            text = _left(0, status, self._num_batches) if self._process == 0 else json.dumps(status)
            jax_compat.publish(self._folder + key, text)  # if that fails, there is nobody left to read it

    def _agree(self, status: Mapping[str, Any]) -> None:
        if self._is_over:
            return
        i = self._num_batches
        verdict = self._judge(i, status) if self._process == 0 else self._ask(i, status)
        self._is_over = bool(verdict) or "end" in status
        if verdict:
            raise ShardingError(verdict)

    def _ask(self, i: int, status: Mapping[str, Any]) -> str:
        self._publish(f"{i}/{self._process}", json.dumps(status))
        return self._wait(f"verdict/{i}")

    def _judge(self, i: int, status: Mapping[str, Any]) -> str:
        """The first process's verdict: what is wrong, or nothing."""
        found: dict[int, Any] = {0: status}
        while len(found) < self._num_processes:
            self._wait(f"{i}/{next(p for p in count() if p not in found)}")
            told = jax_compat.all_published(f"{self._folder}{i}/")
            found |= {int(p): json.loads(text) for p, text in told.items()}
        verdict = compare(found, i)
        self._publish(f"verdict/{i}", verdict)
        jax_compat.forget_published(f"{self._folder}{i}/")
        if i:  # whoever announced this batch has read the verdict on the one before
            jax_compat.forget_published(f"{self._folder}verdict/{i - 1}")
        return verdict

    def _wait(self, key: str) -> str:
        while True:
            try:
                text = jax_compat.read_published(self._folder + key, _LOOK_S)
            except ConnectionError as error:
                raise ProcessError(f"process 0 cannot be reached any more: {error:.200}") from error
            if text is not None:
                return text.removeprefix(" ")
            if peers.current is not None and peers.current.failure is not None:
                raise ProcessError(peers.current.failure)
            if self._is_stopped():
                raise Stopped

    def _publish(self, key: str, text: str) -> None:
        if not jax_compat.publish(self._folder + key, f" {text}"):  # an empty text would not be stored
            raise ProcessError("process 0 cannot be reached any more; its own output may say why")


class Stopped(Exception):
    """Nobody wants the batches any more."""


def compare(found: Mapping[int, Mapping[str, Any]], num_batches: int) -> str:
    """What is wrong about what the processes have after some batches, in one sentence; nothing where all is well."""
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
            "equally many in all processes: drop what is over, or repeat some"
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
    return f"process {process} stopped to take batches after {num_batches}, and others did not; stop in all together"


def batch_types(batch: Any) -> dict[str, str]:
    """The types of a batch's leaves by path, and the values of those that all processes must have alike."""
    found = {}
    for path, leaf in tree_flatten_with_path(batch)[0]:
        is_shared = isinstance(leaf, bool | int | float | complex | str) or (
            isinstance(leaf, np.ndarray | np.generic) and not leaf.shape
        )
        where = keystr(path, simple=True, separator="/") or "its array"
        found[where] = describe_type(leaf) + (f" = {leaf}" if is_shared else "")
    return found
