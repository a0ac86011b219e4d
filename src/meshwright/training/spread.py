"""Arrays that only some processes have, such as those of a pipeline's stages, spread over all to be saved and restored.

Orbax reads and writes arrays of which every process has a part.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.stages.cutting.layer_stack import spread_sharding
from meshwright.runtime.transfer.reshard import reshard


def of_some_processes(arrays: Sequence[Any]) -> list[bool]:
    """Which arrays only some processes have; all processes must ask together.

    An array that is on each process's own devices, the same in all of them, is none of these: the processes then name
    different devices.
    """
    local_counts = np.array([_first_and_count(array) for array in arrays], np.int32).reshape(-1, 2)
    partly = (local_counts[:, 1] > 0) & (local_counts[:, 1] < jax.process_count())
    if not partly.any():  # the processes agree on this: an array that all have is one of all in each of them
        return [False] * len(arrays)
    gathered_counts = gathered(local_counts)
    return (partly & (gathered_counts == gathered_counts[:1]).all(axis=(0, 2))).tolist()


def gathered(own: Any) -> np.ndarray:
    """An array of each process, stacked, in all of them; all must ask together."""
    gather = in_turn(process_allgather, jax.devices())
    return np.asarray(gather(own)).reshape(-1, *own.shape)


def _first_and_count(array: Any) -> tuple[int, int]:
    """The first process that has some of an array, and how many have."""
    if not isinstance(array, jax.Array):
        return -1, 0
    devices: set[Any] = array.sharding.device_set
    processes = {device.process_index for device in devices}
    return min(processes), len(processes)


def spread(array: Any) -> jax.Array:
    """An array of some processes, spread over all."""
    return reshard(array, spread_sharding(array.shape))


def is_everywhere(sharding: Any) -> bool:
    """Whether all processes have some of a sharding's devices."""
    return len({device.process_index for device in sharding.device_set}) == jax.process_count()
