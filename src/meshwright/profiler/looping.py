"""Runs a body in a loop on all devices at once: the common form of all probes.

All devices work at the same time, as they do under a plan: virtual CPU devices share their cores, and
groups of a collective share their wires. Each program is a loop whose number of trips is an argument, so that it is
compiled once, can run as long as a clock needs, and can run without a trip to show what starting it costs. On
accelerators a trip does its thing several times, since asking whether there is another trip takes microseconds there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

AXES = ("outer", "group", "inner")  # collectives run along the middle one


def looped(
    body: Callable[..., Any], arrays: Sequence[np.ndarray], view: tuple[int, int, int], unroll: int = 1
) -> Callable[[int], Any]:
    """A program that runs a body on every device's arrays again and again.

    Args:
        body: Takes and returns as many arrays as there are.
        arrays: The initial arrays of each device.
        view: Sizes of the device mesh along `AXES`.
        unroll: How often a trip runs the body.
    """
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(view), AXES)
    spec = PartitionSpec(AXES)
    spread = tuple(_spread(array, NamedSharding(mesh, spec)) for array in arrays)

    def trip(_: Any, kept: Any) -> tuple[jax.Array, ...]:
        for _ in range(unroll):
            kept = body(*kept)
        return kept

    def repeat(trips: Any, *kept: Any) -> tuple[jax.Array, ...]:
        return lax.fori_loop(0, trips, trip, kept)

    specs = (spec,) * len(spread)
    mapped = jax.shard_map(repeat, mesh=mesh, in_specs=(PartitionSpec(), *specs), out_specs=specs, check_vma=False)
    program = jax.jit(mapped)
    return lambda trips: program(np.int32(trips), *spread)


def _spread(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """An array of which every device has a copy as its part."""
    shape = (sharding.num_devices * array.shape[0], *array.shape[1:])
    return jax.make_array_from_callback(shape, sharding, lambda _: array)
