"""A program of a stage as JAX has it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.spmd import compiler_options
from meshwright.runtime.stages.cutting.stage_programs import StageProgram


@dataclass(frozen=True)
class Lowered:
    """A program of a stage as JAX has it.

    Attributes:
        program: What it is.
        jitted: The function, of all its arguments in a row.
        types, places: Their types and shardings.
        results, shardings: The types and shardings of its results.
        donated: The arguments whose memory results may take over.
        run: The same function, which runs one program at a time where the devices need that.
    """

    program: StageProgram
    jitted: Any
    types: Sequence[jax.ShapeDtypeStruct]
    places: Sequence[NamedSharding]
    results: Sequence[Any]
    shardings: Sequence[NamedSharding]
    donated: Sequence[int]
    run: Callable[..., Sequence[Any]]

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices that it runs on."""
        return tuple((*self.places, *self.shardings)[0].mesh.devices.flat)


def jitted(
    program: StageProgram,
    function: Callable[..., Any],
    types: Sequence[Any],
    results: Sequence[Any],
    places: Sequence[NamedSharding],
    shardings: Sequence[NamedSharding],
    donated: Sequence[int] = (),
) -> Lowered:
    """A program that is compiled when it is first called; arguments are those of `Lowered`."""
    function.__name__ = program.work  # without the stage: equal programs of stages are compiled once
    devices = (*places, *shardings)[0].mesh.devices.ravel()
    compiled = jax.jit(
        function,
        in_shardings=tuple(places),
        out_shardings=list(shardings),
        donate_argnums=tuple(donated),
        keep_unused=True,  # equal programs are compiled once, and their text shows only arguments that are kept
        compiler_options=compiler_options(devices[0].platform),
    )
    run = in_turn(compiled, devices)
    return Lowered(program, compiled, types, places, results, shardings, tuple(donated), run)
