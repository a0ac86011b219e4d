"""Moves between processes by `jax.device_put`, where JAX's backend sends from device to device without the host.

Accelerators do so on a queue of their own, beside the programs that run. Arrays of one device go to one device, so that
JAX's condition holds that both are split alike. Both processes of a move name the array: the one that receives it has a
handle without shards.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from meshwright.runtime.transfer.routes import Move


class Puts:
    """A `Transport` between processes by JAX's own copies from device to device."""

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
