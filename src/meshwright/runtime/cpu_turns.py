"""Programs of several CPU devices run one after another.

XLA's CPU client has about one thread per device, and the part of a program that waits for other devices keeps its
thread. Two independent programs in flight may each hold threads that the other needs: both wait until XLA ends the
process. `docs/compiler-faults.md` has the program in plain JAX. Accelerators have their own queues, so programs on them
run without waiting.
"""

import os
import re
from collections.abc import Callable, Collection
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import jax

from meshwright.profiler.survey import num_cpus

P = ParamSpec("P")
T = TypeVar("T")

_VIRTUAL = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_MOST_THREADS = 64
_turn = Lock()  # batches are placed by another thread than the one that calls the function


def in_turn(run: Callable[P, T], devices: Collection[Any]) -> Callable[P, T]:
    """A function that runs a program on some devices; on several CPU devices it waits for the program's results."""
    if len(devices) == 1 or next(iter(devices)).platform != "cpu":
        return run

    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _turn:
            return jax.block_until_ready(run(*args, **kwargs))

    return alone


def put_in_turn(arrays: list[Any], shardings: list[Any]) -> list[Any]:
    """`jax.device_put` in turn: JAX runs a program to move an array that has another sharding already."""
    if not shardings:
        return []
    put = in_turn(jax.device_put, shardings[0].device_set)
    if put is jax.device_put:
        return jax.device_put(arrays, shardings)
    return [put(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]


def add_threads(num_processes: int) -> None:
    """Gives XLA's CPU client spare threads, where JAX is told to use CPUs and has not started yet.

    A program that waits in a collective for another process keeps a thread for each of its devices. By default these
    are all there are, so that nothing can be sent to a third process meanwhile, which the other may be waiting for. One
    program waits at a time between the same processes (see `in_turn` and `transfer/permutes.py`), so one for each
    process is enough. More would cost time: XLA cuts every operation into as many parts as there are threads.
    """
    platforms: str | None = jax.config.jax_platforms  # type: ignore[attr-defined]
    if (platforms or "").split(",")[0] == "cpu":
        num_devices = int(jax.config.jax_num_cpu_devices)  # type: ignore[attr-defined]
        if num_devices < 0:
            num_devices = max(map(int, _VIRTUAL.findall(os.environ.get("XLA_FLAGS", ""))), default=1)
        spare = min(num_devices * num_processes, max(_MOST_THREADS, num_devices))
        # XLA reads it when its client starts, which is later and once: so it stays set, and a user's own value counts.
        os.environ.setdefault("NPROC", str(num_cpus() + spare))
