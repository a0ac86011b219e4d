"""How pieces of arrays get to other devices: one contract, with one class for each way.

A transport is made once for a list of moves, and called once for each array that is moved. All processes that send or
receive one of the moves make the same transports, and call them in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jax.sharding import SingleDeviceSharding

from meshwright import jax_compat


@dataclass(frozen=True)
class Piece:
    """A piece of an array that goes from one device to another one.

    Attributes:
        shape: The shape of the piece.
        source: The device that has it.
        target: The device that needs it.
    """

    shape: tuple[int, ...]
    source: Any
    target: Any


class Transport(Protocol):
    """A way to move pieces of arrays."""

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """Sends pieces and receives others.

        Args:
            sent: The pieces, each on its source, that this process sends, in the order of the moves.

        Returns:
            The pieces that this process receives, each on its target, in the order of the moves. They may still be on
            their way: call `wait` before they are trusted.

        Raises:
            ProcessError: Another process ended, or did not answer in time.
        """

    def wait(self, received: Sequence[Any]) -> None:
        """Waits until pieces from other processes have arrived.

        Raises:
            ProcessError: Another process ended, or did not send in time; the message names it.
        """


class SameProcess:
    """Copies between devices of this process; any number of copies may be in flight."""

    def __init__(self, pieces: Sequence[Piece]):
        self._shardings = [SingleDeviceSharding(piece.target) for piece in pieces]

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        return jax_compat.copy_shards(sent, self._shardings)

    def wait(self, received: Sequence[Any]) -> None:
        """Nothing to wait for: an error of a copy is raised where its result is used."""
