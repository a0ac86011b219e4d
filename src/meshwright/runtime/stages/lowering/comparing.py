"""The largest and least numbers of a stage's devices: XLA drops NaN where it compares those of several devices.

docs/compiler-faults.md has the fault.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright.program.program import Operation
from meshwright.rules.base import NARROWEST
from meshwright.runtime.program.bits import from_ordered, ordered

_REDUCE: dict[str, Callable[..., Any]] = {
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
}


def reduced(kind: str, x: Any, dims: tuple[int, ...]) -> jax.Array:
    """A reduction over dims that devices may have in parts; floats are compared as integers in their order."""
    if kind not in ("max", "min") or not jnp.issubdtype(x.dtype, jnp.floating):
        return _REDUCE[kind](x, dims)
    wide = jnp.dtype(jnp.float32) if x.dtype.itemsize < NARROWEST else x.dtype
    keys = _REDUCE[kind](ordered(x.astype(wide), kind == "max"), dims)
    return from_ordered(keys, wide, kind == "max").astype(x.dtype)


def run_once(unit: Operation, values: dict[int, Any]) -> None:
    """Runs an operation that a stage runs once a step, on arrays that its devices have in parts."""
    operands = [values[number] for number in unit.inputs]
    if unit.name in ("reduce_max", "reduce_min"):
        made = [reduced(unit.name.removeprefix("reduce_"), operands[0], unit.equation.params["axes"])]
    else:
        made = unit.run(operands)
    values.update(zip(unit.outputs, made, strict=True))
