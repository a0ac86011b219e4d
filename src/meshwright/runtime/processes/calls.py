"""Whether all processes call the same functions with the same types in the same order.

Each process counts its calls, and says only when it turns to another function or to other types: a step like the last
one costs no message. A process that hears of a turn at call k which it did not take itself, though it is in call k or
past it, knows that both wait for each other for ever.
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
        name: What is called.
        types: The type of each array of the arguments, by path.
    """

    call: int
    name: str
    types: Mapping[str, str]

    def difference(self, process: int, other: "Turn", other_process: int) -> str:
        """How two processes that should do the same differ."""
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
    """The turns of this process and of its peers, as far as they were not found equal yet.

    Attributes:
        num_calls: How many calls this process began.
    """

    def __init__(self, process: int, peers: list[int]):
        self.num_calls = 0
        self._process = process
        self._here: dict[int, deque[Turn]] = {peer: deque() for peer in peers}
        self._there: dict[int, deque[Turn]] = {peer: deque() for peer in peers}
        self._ended: dict[int, int] = {}
        self._last: Turn | None = None  # that was a call
        self._latest: Turn | None = None
        self._said: dict[Any, int] = {}
        self._heard: dict[int, list[tuple[str, Mapping[str, str]]]] = {peer: [] for peer in peers}

    def take(self, name: str, types: Mapping[str, str], *, is_next: bool = False) -> Any | None:
        """Notes what this process calls; what to tell its peers, if it is another thing than before.

        Args:
            name: What is called.
            types: With which types.
            is_next: It comes before the next call, and not in the current one.
        """
        turn = Turn(self.num_calls + is_next, name, types)
        if not is_next:
            if self._last is not None and (self._last.name, self._last.types) == (name, types):
                return None
            self._last = turn
        self._latest = turn
        for turns in self._here.values():
            turns.append(turn)
        key = name, tuple(types.items())
        if key in self._said:
            return [turn.call, self._said[key]]
        self._said[key] = len(self._said)
        return [turn.call, name, dict(types)]

    def hear(self, peer: int, message: Any) -> None:
        """Notes a peer's turn: the whole of it, or the number of an earlier one."""
        call, *told = message
        if len(told) == 2:
            self._heard[peer].append((told[0], told[1]))
        name, types = self._heard[peer][told[0]] if len(told) == 1 else told
        self._there[peer].append(Turn(call, name, types))

    def end(self, peer: int, num_calls: int) -> None:
        """Notes that a peer ended, after so many calls."""
        self._ended[peer] = num_calls

    def differ(self, *, stuck_at: int) -> str | None:
        """How a peer and this process differ; None as long as nothing shows.

        Args:
            stuck_at: The call that this process has been in for so long that it would have said if it took a turn.
        """
        begun = self.num_calls  # before the turns are looked at: by the time of a later call, they are all there
        for peer, theirs in self._there.items():
            ours = self._here[peer]
            while ours and theirs:
                mine, their = ours.popleft(), theirs.popleft()
                if mine != their:
                    return their.difference(peer, mine, self._process)
            if theirs and max(begun - 1, stuck_at) >= theirs[0].call and self._last is not None:
                return theirs[0].difference(peer, self._now(theirs[0]), self._process)
            if peer in self._ended and max(begun, self._latest.call if self._latest else 0) > self._ended[peer]:
                doing = self._last if begun > self._ended[peer] else self._latest
                return (
                    f"process {peer} ended after {self._ended[peer]} calls of parallelised functions, and process "
                    f"{self._process} goes on with {doing.name if doing else 'others'}"
                )
        return None

    def _now(self, their: Turn) -> Turn:
        assert self._last is not None
        return Turn(their.call, self._last.name, self._last.types)
