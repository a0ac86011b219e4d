"""Checks that all processes call the same functions with the same types in the same order.

Each process counts its calls, and sends a message only when it turns to another function or to other types: a step like
the previous one costs no message. If a process receives a turn at call k that it did not take itself, and it is in call
k or past it, the two processes wait for each other for ever.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Turn:
    """From this call on, a process calls this function with these types.

    Attributes:
        call: The number of the call, from 1.
        name: The function called.
        types: The type of each array of the arguments, by path.
    """

    call: int
    name: str
    types: Mapping[str, str]

    def difference(self, process: int, other: "Turn", other_process: int) -> str:
        """How the calls of two processes differ, in one sentence."""
        if self.name != other.name:
            return (
                f"process {process} calls {self.name} as its call {self.call} of a parallelised function, and process "
                f"{other_process} calls {other.name} as its call {other.call}"
            )
        for path in (*self.types, *other.types):
            ours, theirs = self.types.get(path, "nothing"), other.types.get(path, "nothing")
            if ours != theirs:
                return (
                    f"process {process} calls {self.name} with {path} as {ours} (call {self.call}), and process "
                    f"{other_process} with {path} as {theirs}"
                )
        return (
            f"process {process} calls {self.name} as its call {self.call} of a parallelised function, and process "
            f"{other_process} as its call {other.call}"
        )


class Turns:
    """The turns of this process and of its peers that have not been found equal yet.

    Attributes:
        num_calls: How many calls this process has begun.
    """

    def __init__(self, process: int, peers: list[int]):
        self.num_calls = 0
        self._process = process
        self._here: dict[int, deque[Turn]] = {peer: deque() for peer in peers}
        self._there: dict[int, deque[Turn]] = {peer: deque() for peer in peers}
        self._ended: dict[int, int] = {}
        self._last: Turn | None = None  # that was a call
        self._said: dict[Any, int] = {}
        self._heard: dict[int, list[tuple[str, Mapping[str, str]]]] = {peer: [] for peer in peers}

    def take(self, name: str, types: Mapping[str, str], *, is_next: bool = False) -> Any | None:
        """Records a call of this process; returns the message for its peers, if the call differs from the last one.

        Args:
            name: The function called.
            types: The types of its arguments.
            is_next: Whether it belongs before the next call, and not to the current one.
        """
        turn = Turn(self.num_calls + is_next, name, types)
        if not is_next:
            if self._last is not None and (self._last.name, self._last.types) == (name, types):
                return None
            self._last = turn
        for turns in self._here.values():
            turns.append(turn)
        key = name, tuple(types.items())
        if key in self._said:
            return [turn.call, self._said[key]]
        self._said[key] = len(self._said)
        return [turn.call, name, dict(types)]

    def hear(self, peer: int, message: Any) -> None:
        """Records a peer's turn, which the message holds in full or as the number of an earlier turn."""
        call, *told = message
        if len(told) == 2:
            self._heard[peer].append((told[0], told[1]))
        name, types = self._heard[peer][told[0]] if len(told) == 1 else told
        self._there[peer].append(Turn(call, name, types))

    def end(self, peer: int, num_calls: int) -> None:
        """Notes that a peer ended, after so many calls."""
        self._ended[peer] = num_calls

    def differ(self, *, stuck_at: int) -> str | None:
        """How a peer and this process differ; None as long as no difference is known.

        Args:
            stuck_at: The call that this process has been in for so long that it would have announced a turn by now.
        """
        begun = self.num_calls  # read before the turns: all turns of the calls up to this one are recorded
        for peer, theirs in self._there.items():
            ours = self._here[peer]
            while ours and theirs:
                mine, their = ours.popleft(), theirs.popleft()
                if mine != their:
                    return their.difference(peer, mine, self._process)
            if theirs and max(begun - 1, stuck_at) >= theirs[0].call and self._last is not None:
                return theirs[0].difference(peer, self._now(theirs[0]), self._process)
            # What comes before a next call counts if the peer has not announced it, too: both may end after planning.
            if peer in self._ended and max(begun, ours[-1].call if ours else 0) > self._ended[peer]:
                doing = self._last if begun > self._ended[peer] else ours[-1]
                return (
                    f"process {peer} ended after {self._ended[peer]} calls of parallelised functions, and process "
                    f"{self._process} continues with {doing.name if doing else 'others'}"
                )
        return None

    def _now(self, their: Turn) -> Turn:
        assert self._last is not None
        return Turn(their.call, self._last.name, self._last.types)
