"""Compiles the programs of a pipeline's stages, side by side; equal programs are compiled once.

Stages of equal layers are equal programs on other devices. The first of them is compiled, and the others are loaded
from it where the backend allows that. Programs for devices that are only described (`jax.experimental.topologies`)
never run: one stands for all that are equal, and they are compiled one at a time, as XLA may crash otherwise.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from meshwright import jax_devices
from meshwright.runtime.stages.lowering.lowered import Lowered

log = logging.getLogger("meshwright")


def compile_programs(
    programs: Sequence[Lowered],
    say: Callable[[str], None] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Any]:
    """The compiled programs.

    Args:
        programs: The programs.
        say: Called with a sentence on the progress.
        options: XLA's options by name, besides those of each program.
    """
    # What a thread's JAX settings change is lowered here: the threads below have settings of their own.
    lowered = [one.jitted.lower(*one.types) for one in programs]
    like: dict[tuple[str, Any], list[int]] = {}
    for number, (one, module) in enumerate(zip(programs, lowered, strict=True)):
        like.setdefault((module.as_text(), one.devices[0].device_kind), []).append(number)
    found: list[Any] = [None] * len(programs)
    can_run = _are_here(programs[0].devices) if programs else True

    def compile_like(numbers: Sequence[int]) -> int:
        """Compiles programs that are equal but for their devices."""
        first, own = numbers[0], programs[numbers[0]].devices
        made = {own: lowered[first].compile(compiler_options=dict(options or {}))}
        for number in numbers:
            devices = programs[number].devices
            if devices not in made and not can_run:
                made[devices] = made[own]
            elif devices not in made:
                loaded = jax_devices.load_for(made[own], own, devices)
                if loaded is None:
                    log.info("equal stages are compiled once each: their program cannot be loaded onto other devices")
                made[devices] = loaded or lowered[number].compile(compiler_options=dict(options or {}))
            found[number] = made[devices]
        return len(numbers)

    done = 0
    with ThreadPoolExecutor(None if can_run else 1) as pool:
        for count in pool.map(compile_like, like.values()):
            done += count
            if say is not None:
                say(f"compiling the stages: {done} of {len(programs)} programs, {len(like)} of them different")
    return found


def _are_here(devices: Sequence[Any]) -> bool:
    """Whether devices exist, and are not only described."""
    try:
        return devices[0] in jax.devices(devices[0].platform)
    except RuntimeError:  # JAX has no backend of this platform
        return False
