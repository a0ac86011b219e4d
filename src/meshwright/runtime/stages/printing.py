"""What a pipelined step prints or hands to the user's functions, once a step: its stages compute the values, and the
process that has them calls back when all stages have run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.program.program import Program
from meshwright.runtime.microbatches.batch_parts import PRINTING


def returning_printed(program: Program) -> Program:
    """The program with the values that it prints among its results, after its own.

    Raises:
        ShardingError: It calls back for a value, or from inside of a loop: stages may run that again.
    """
    for unit in program.with_effects:
        if unit.outputs or unit.name not in PRINTING:
            raise ShardingError(
                f"{unit} has side effects, which a pipeline's stages could repeat: call it outside of the step, or "
                "plan the step without stages, such as with mw.Auto()"
            )
    printed = [value for unit in program.with_effects for value in unit.inputs]
    return replace(program, outputs=[*program.outputs, *printed])


class Printing:
    """Carries out what a step prints, given the values of all, in order; of several processes, the one that has them.

    Args:
        program: The step, before `returning_printed`.
    """

    def __init__(self, program: Program):
        self.units, self.inputs = program.with_effects, program.inputs

    def given(self, leaves: Sequence[Any]) -> dict[int, Any]:
        """The arguments that are printed: the step may give their memory to its results."""
        return {v: _on_host(leaves[v]) for unit in self.units for v in unit.inputs if v in self.inputs}

    def run(self, given: dict[int, Any], values: Sequence[Any]) -> None:
        left = iter(values)
        for unit in self.units:
            found = [given.get(v, value) for v, value in zip(unit.inputs, left, strict=False)]
            if all(not isinstance(x, jax.Array) or x.is_fully_addressable for x in found):
                unit.run([_on_host(x) for x in found])


def _on_host(value: Any) -> np.ndarray | jax.Array:
    """A value as an ordered effect takes it, which may have no arrays of several devices."""
    is_here = isinstance(value, jax.Array) and value.is_fully_addressable
    return jax.device_get(value) if is_here and not jax_compat.is_key_dtype(value.dtype) else value
