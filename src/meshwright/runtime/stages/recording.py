"""Records when the instructions of a pipelined step run: the timeline of a real step.

Instructions are carried out as always. Each result is waited for by a thread of its own, so that nothing else waits for
it. Devices run programs in order, so one begins when the host has asked for it, what it reads is there, and the one
before it on its stage has ended.
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from meshwright.runtime.stages.bound import WAIT, Bound


class Event(NamedTuple):
    """What a stage did when, in seconds from the beginning of the step.

    Attributes:
        stage: The stage; of a transfer, the one that receives, unless another process has that.
        is_transfer: Whether an array moved from stage to stage, or a program ran.
        name: What it is, for people.
        start_s, end_s: Its start and end.
    """

    stage: int
    is_transfer: bool
    name: str
    start_s: float
    end_s: float


class Recording:
    """One step that is recorded.

    Args:
        bound: The instructions of this process.

    Attributes:
        bound: The same, which note when they run.
    """

    def __init__(self, bound: Sequence[Bound]):
        self._plain = list(bound)
        self._asked_s, self._ended_s = [0.0] * len(bound), [0.0] * len(bound)
        self._pool = ThreadPoolExecutor(max(1, len(bound)), thread_name_prefix="meshwright-recording")
        self.bound = [replace(one, run=partial(self._run, number)) for number, one in enumerate(bound)]

    def events(self) -> tuple[Event, ...]:
        """What happened, once all of it has."""
        self._pool.shutdown()
        posted: dict[int, tuple[str, float]] = {}  # what arrives in each slot, and when it was asked for
        there: dict[int, float] = {}  # when the array of each slot was there
        free: dict[int, float] = {}  # when each stage had computed what came before
        waited = {one.reads[0] for one in self._plain if one.work == WAIT}
        read = {slot for one in self._plain for slot in one.reads}
        found = []
        for one, asked_s, ended_s in zip(self._plain, self._asked_s, self._ended_s, strict=True):
            is_transfer, stage, work = one.source >= 0, one.stage, one.work
            start_s = max([asked_s, *(there.get(slot, 0.0) for slot in one.reads)])
            if one.work == WAIT:
                work, start_s = posted[one.reads[0]]
            elif one.source >= 0 and one.fills[0] in waited:
                posted[one.fills[0]] = one.work, asked_s
                continue
            elif one.source >= 0 and one.fills[0] not in read:
                stage = one.source
            elif not is_transfer:
                start_s = max(start_s, free.get(one.stage, 0.0))
                free[one.stage] = max(start_s, ended_s)
            end_s = max(start_s, ended_s)
            there |= dict.fromkeys(one.fills, end_s)
            name = f"{work} from stage {one.source} to {one.stage}" if is_transfer else one.name
            found.append(Event(stage, is_transfer, name, start_s, end_s))
        first_s = min((event.start_s for event in found), default=0.0)
        return tuple(e._replace(start_s=e.start_s - first_s, end_s=e.end_s - first_s) for e in found)

    def _run(self, number: int, *arrays: Any) -> Sequence[Any]:
        self._asked_s[number] = time.perf_counter()
        made = self._plain[number].run(*arrays)
        self._ended_s[number] = time.perf_counter()
        self._pool.submit(self._wait, number, made)
        return made

    def _wait(self, number: int, made: Sequence[Any]) -> None:
        for array in made:
            with suppress(Exception):  # an array that is still to arrive; one that the next program was given already
                array.block_until_ready()
                self._ended_s[number] = time.perf_counter()
