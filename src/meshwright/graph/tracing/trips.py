"""How often `while` loops run: from what they count, if it starts and ends at numbers that are known.

A loop ``i < n`` runs a known number of times where `n` is a number of the program, or follows from integers of the
arguments that the user gave as arrays. One that also ends when something holds, ``(i < n) & (error > tolerance)``, runs
at most so often, and is planned as if it always did: such bounds are written to be reached. Of all others nothing is
known.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import jax
import numpy as np

from meshwright.program.program import Operation, Program
from meshwright.rules.base import AT_MOST, EXACT, GIVEN, UNKNOWN

_MOST = 2**20  # elements that are computed to find out
_COMPARISONS = {"lt": (1, 0), "le": (1, 1), "gt": (-1, 0), "ge": (-1, 1)}  # the sign of a step, and trips at the limit
_SAME = ("convert_element_type", "broadcast_in_dim", "reshape", "squeeze", "copy")
_SWAPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}


def trips_of(
    region: Program, loop: Operation, arguments: Mapping[int, Any], seen: Mapping[int, float]
) -> tuple[float, str]:
    """How often a loop runs, and how that is known.

    Args:
        region: The program that runs it.
        loop: The loop.
        arguments: The contents of the region's inputs, where they are known.
        seen: Trips that followed from arguments before the program was changed, by the id of the loop.
    """
    condition, num_cond = loop.regions[0], loop.equation.params["cond_nconsts"]
    conjuncts = list(_conjuncts(condition, condition.outputs[0]))
    found = []
    for conjunct in conjuncts:
        with suppress(_NotKnown):
            found.append(_counted(region, loop, num_cond, conjunct, arguments))
    if not found:
        return (seen[loop.id], GIVEN) if loop.id in seen else (1.0, UNKNOWN)
    trips, from_arguments = min(found)
    if len(conjuncts) > 1:
        return trips, AT_MOST
    return trips, GIVEN if from_arguments else EXACT


class _NotKnown(Exception):
    """A loop does not count, or not between known numbers."""


def _maker(program: Program, value: int) -> Operation | None:
    """The operation that makes a value, seen through conversions; None for inputs and constants."""
    return next((one for one in program.operations if value in one.outputs), None)


def _plain(program: Program, value: int) -> int:
    """The value that a value is a copy of, in another type or shape."""
    maker = _maker(program, value)
    while maker is not None and maker.name in _SAME:
        value = maker.inputs[0]
        maker = _maker(program, value)
    return value


def _conjuncts(condition: Program, value: int) -> Iterator[Operation | None]:
    """The comparisons that must all hold for another trip; None for anything else."""
    maker = _maker(condition, _plain(condition, value))
    if maker is not None and maker.name == "and":
        for part in maker.inputs:
            yield from _conjuncts(condition, part)
    elif maker is not None and maker.name == "reduce_or":  # of the examples of a batch
        yield from _conjuncts(condition, maker.inputs[0])
    else:
        yield maker if maker is not None and maker.name in _COMPARISONS else None


def _counted(
    region: Program, loop: Operation, num_cond: int, conjunct: Operation | None, arguments: Mapping[int, Any]
) -> tuple[float, bool]:
    """The trips until a comparison fails, and whether that follows from arguments."""
    if conjunct is None:
        raise _NotKnown
    condition, name = loop.regions[0], conjunct.name
    left, right = (_plain(condition, value) for value in conjunct.inputs)
    step = _step(loop, num_cond, left)
    if step is None:
        left, right, name = right, left, _SWAPPED[name]
        step = _step(loop, num_cond, left)
    sign, at_limit = _COMPARISONS[name]
    is_carried = right in condition.inputs and right >= num_cond
    if step is None or step * sign <= 0 or (is_carried and not _is_kept(loop, right - num_cond)):
        raise _NotKnown
    start, from_start = _content(region, _outside(loop, num_cond, left), arguments)
    if right in condition.inputs:
        limit, from_limit = _content(region, _outside(loop, num_cond, right), arguments)
    else:
        limit, from_limit = _content(condition, right, {})
    steps = (np.asarray(limit, float) - np.asarray(start, float)) / step
    trips = np.floor(steps) + 1 if at_limit else np.ceil(steps)
    return max(float(trips.max()), 1.0), from_start or from_limit


def _outside(loop: Operation, num_cond: int, value: int) -> int:
    """The value, outside of a loop, with which an input of its condition starts."""
    skipped = 0 if value < num_cond else loop.equation.params["body_nconsts"]
    return loop.inputs[value + skipped]


def _step(loop: Operation, num_cond: int, value: int) -> float | None:
    """What each trip adds to a carry that the condition reads as this input; None where it is no such number."""
    if value not in loop.regions[0].inputs or value < num_cond:
        return None
    body, number = loop.regions[1], value - num_cond
    carry = body.inputs[loop.equation.params["body_nconsts"] + number]
    maker = _maker(body, _plain(body, body.outputs[number]))
    if maker is not None and maker.name == "select_n":  # examples of a batch that are done keep what they have
        others = [value for value in maker.inputs[1:] if _plain(body, value) != carry]
        maker = _maker(body, _plain(body, others[0])) if len(others) == 1 else None
    if maker is None or maker.name not in ("add", "sub"):
        return None
    sides = [_plain(body, value) for value in maker.inputs]
    if maker.name == "add" and sides[1] == carry:
        sides.reverse()
    added = body.constants.get(sides[1])
    if sides[0] != carry or added is None or np.size(added) != 1:
        return None
    return float(np.ravel(added)[0]) * (1 if maker.name == "add" else -1)


def _is_kept(loop: Operation, number: int) -> bool:
    """Whether every trip hands on a carry as it was."""
    body = loop.regions[1]
    carry, made = body.inputs[loop.equation.params["body_nconsts"] + number], _plain(body, body.outputs[number])
    maker = _maker(body, made)
    if maker is not None and maker.name == "select_n":
        return all(_plain(body, value) == carry for value in maker.inputs[1:])
    return made == carry


def _content(program: Program, value: int, arguments: Mapping[int, Any]) -> tuple[Any, bool]:
    """A value that follows from constants and from known arguments, and whether it does from the latter."""
    known = {**program.constants, **arguments}
    needed = [program.operations[position] for position in program.ancestors([value])]
    read = {number for one in needed for number in one.inputs} - {number for one in needed for number in one.outputs}
    read |= {value} if not needed else set()
    computed = (program.types[number] for one in needed for number in one.outputs)
    sizes = sum(prod(getattr(kind, "shape", ())) for kind in computed)
    if not read <= known.keys() or sizes > _MOST or any(one.regions or one.equation.effects for one in needed):
        raise _NotKnown
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        values = {number: known[number] for number in read}
        program.run_some(needed, values)
    return np.asarray(values[value]), bool(read & arguments.keys())
