"""Carries of loops to which each trip only adds: an auxiliary loss, a counter, the gradient of a weight of all layers.

Such a sum may begin with zero anywhere in the loop: what was there before is added afterwards. So each stage of a
pipeline makes a sum of its own layers, and nobody waits for that of the layers before.
"""

from collections.abc import Collection, Mapping

import jax.numpy as jnp
from jax import lax

from meshwright.program.parts import added
from meshwright.program.program import COND, SCAN, Operation, Program

_ADDING = ("add", "add_any")


def running_sums(loop: Operation) -> frozenset[int]:
    """The places, among the carries of a scan, of those to which each trip only adds, and which nothing else reads."""
    (body,), first = loop.regions, loop.num_consts
    return frozenset(i for i in range(loop.num_carry) if _sum_with(body, first + i) == i)


def _sum_with(region: Program, value: int) -> int | None:
    """The place of the one result that is an input plus something; None if anything else depends on that input."""
    while True:
        readers = [(one, i) for one in region.operations for i, operand in enumerate(one.inputs) if operand == value]
        results = [i for i, result in enumerate(region.outputs) if result == value]
        if len(readers) + len(results) != 1:
            return None
        if results:
            return results[0]
        made = _made_by(*readers[0])
        if made is None:
            return None
        value = made


def _made_by(operation: Operation, place: int) -> int | None:
    """The result of an operation that is an operand plus something; None if there is none."""
    if operation.name in _ADDING or (operation.name == "sub" and place == 0):
        return operation.outputs[0]
    if operation.name == SCAN:
        carry = place - operation.num_consts
        return operation.outputs[carry] if carry in running_sums(operation) else None
    first = operation.num_choosing
    if not (operation.name == COND or operation.is_checkpoint) or place < first:
        return None
    ends = {_sum_with(region, place - first) for region in operation.regions}
    end = ends.pop() if len(ends) == 1 else None
    return None if end is None else operation.outputs[end]


def begun_at_zero(program: Program, sums: Mapping[int, Collection[int]]) -> tuple[Program, dict[int, int]]:
    """A program some of whose loops begin sums with zero, to which what was there before is added afterwards.

    Args:
        program: A program.
        sums: By unit, the places of such sums among the carries.

    Returns:
        The program, and for each result of such a loop what the loop itself adds up.
    """
    found, own = program.copy(), dict[int, int]()
    found.operations.clear()
    for number, unit in enumerate(program.operations):
        first = unit.num_consts if number in sums else 0
        ins, outs, after = [*unit.inputs], [*unit.outputs], list[Operation]()
        for i in sorted(sums.get(number, ())):
            kind = program.types[unit.outputs[i]]
            before, (ins[first + i],) = added(found, lambda kind=kind: [jnp.zeros(kind.shape, kind.dtype)], ())
            outs[i] = own[unit.outputs[i]] = found.add_value(kind)
            (total,), _ = added(found, lambda *both: [lax.add(*both)], (unit.inputs[first + i], outs[i]))
            found.operations.extend(before)
            after.append(total._replace(outputs=(unit.outputs[i],)))
        found.operations.extend([unit._replace(inputs=tuple(ins), outputs=tuple(outs)), *after])
    return found, own
