"""How pieces of arrays get to other devices: one contract, with one class for each way.

A transport is made once for a list of moves, and called once for each array that is moved. All processes that send or
receive one of the moves make the same transports, and call them in the same order.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.sharding import SingleDeviceSharding

from meshwright import jax_compat, jax_devices
from meshwright.runtime.transfer.routes import Move


class Transport(Protocol):
    """A way to move pieces of arrays of one type between devices.

    Args:
        moves: The moves between two devices, in the same order in all processes.
        dtype: The dtype of the pieces, which are no typed random keys.
        timeout_s: Seconds to wait for a process that exists and does not take part.

    Attributes:
        by_xla: Whether XLA itself runs what reads a piece after what sends it. Else the caller must not delete a piece
            that it sends, and waits for those that it receives.
    """

    by_xla: bool

    def __init__(self, moves: Sequence[Move], dtype: Any, timeout_s: float): ...

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


#: Makes a transport between processes for some moves.
Connect: TypeAlias = Callable[[Sequence[Move]], Transport]


class SameProcess:
    """Copies between devices of this process; any number of copies may be in flight."""

    by_xla = True

    def __init__(self, moves: Sequence[Move], dtype: Any = None, timeout_s: float = 0.0):
        del dtype, timeout_s  # copies take any dtype, and wait for nobody
        self._shardings = [SingleDeviceSharding(move.target) for move in moves]

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        return jax_devices.copy_shards(sent, self._shardings)

    def wait(self, received: Sequence[Any]) -> None:
        """Nothing to wait for: an error of a copy is raised where its result is used."""


class Puts:
    """A `Transport` between processes by `jax.device_put`, where JAX's backend sends from device to device.

    Accelerators do so on a queue of their own, beside the programs that run, without the host. Arrays of one device go
    to one device, so that JAX's condition holds that both are split alike. Both processes of a move name the array: the
    one that receives it has a handle without shards.
    """

    by_xla = True

    def __init__(self, moves: Sequence[Move], dtype: Any, timeout_s: float):
        del timeout_s  # nothing interrupts a copy
        here = jax.process_index()
        self._dtype = dtype
        self._moves: list[tuple[Move, bool, bool]] = []
        for move in moves:
            source: Any = move.source
            target: Any = move.target
            if here in (source.process_index, target.process_index):
                self._moves.append((move, source.process_index == here, target.process_index == here))
        self._targets = [SingleDeviceSharding(move.target) for move, _, _ in self._moves]

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """See `Transport`."""
        left = iter(sent)
        arrays = [next(left) if is_sent else self._absent(move) for move, is_sent, _ in self._moves]
        moved = jax.device_put(arrays, self._targets)
        return [array for array, (_, _, is_received) in zip(moved, self._moves, strict=True) if is_received]

    def wait(self, received: Sequence[Any]) -> None:
        """See `Transport`."""
        jax.block_until_ready(list(received))

    def _absent(self, move: Move) -> jax.Array:
        place = SingleDeviceSharding(move.source)
        return jax.make_array_from_single_device_arrays(move.shape, place, [], dtype=self._dtype)


class Keys:
    """A transport of typed random keys: of their bits, by another transport."""

    def __init__(self, moves: Sequence[Move], dtype: Any, connect: Connect):
        words = tuple((0, size) for size in jax_compat.key_shape(dtype))
        self._dtype = dtype
        self._bits = connect([Move((*move.box, *words), move.source, move.target) for move in moves])
        self.by_xla = self._bits.by_xla

    def exchange(self, sent: Sequence[Any]) -> list[Any]:
        """See `Transport`."""
        received = self._bits.exchange([jax.random.key_data(piece) for piece in sent])
        if not self.by_xla:
            self._bits.wait(received)  # wrapping bits that did not arrive would hide whose they are
        return [jax_compat.keys_of_bits(bits, self._dtype) for bits in received]

    def wait(self, received: Sequence[Any]) -> None:
        """See `Transport`; nothing is left to wait for."""
