"""Carries of loops to which each trip only adds: an auxiliary loss, a counter, the gradient of a weight of all layers.

Such a sum may begin with zero anywhere in the loop: what was there before is added afterwards. So each stage of a
pipeline makes a sum of its own layers, and nobody waits for that of the layers before.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend import core as jex_core

from meshwright import jax_compat
from meshwright.program.program import UNPLANNED, Operation, Program

_ADDING = ("add", "add_any")


def running_sums(eqn: Any) -> frozenset[int]:
    """The places, among the carries of a scan, of those to which each trip only adds, and which nothing else reads."""
    num_consts, num_carry = jax_compat.scan_counts(eqn)
    body = jax_compat.close(eqn.params["jaxpr"]).jaxpr
    return frozenset(i for i in range(num_carry) if _sum_with(body, num_consts + i) == i)


def _sum_with(jaxpr: Any, place: int) -> int | None:
    """The place of the one result that is an input plus something; None if anything else depends on that input."""
    var = jaxpr.invars[place]
    while True:
        readers = [(eqn, i) for eqn in jaxpr.eqns for i, operand in enumerate(eqn.invars) if operand is var]
        results = [i for i, result in enumerate(jaxpr.outvars) if result is var]
        if len(readers) + len(results) != 1:
            return None
        if results:
            return results[0]
        made = _made_by(*readers[0])
        if made is None:
            return None
        var = made


def _made_by(eqn: Any, place: int) -> jex_core.Var | None:
    """The result of an equation that is an operand plus something; None if there is none."""
    name = eqn.primitive.name
    if name in _ADDING or (name == "sub" and place == 0):
        return eqn.outvars[0]
    if name == "scan":
        carry = place - jax_compat.scan_counts(eqn)[0]
        return eqn.outvars[carry] if carry in running_sums(eqn) else None
    if name == "cond":
        ends = {_sum_with(jax_compat.close(branch).jaxpr, place - 1) for branch in eqn.params["branches"] if place}
        end = ends.pop() if len(ends) == 1 else None
        return None if end is None else eqn.outvars[end]
    inner = jax_compat.called_jaxpr(eqn)
    if inner is None:
        return None
    operands = jax_compat.call_operands(eqn, range(len(eqn.invars)))
    end = _sum_with(inner.jaxpr, list(operands).index(place)) if place in operands else None
    return None if end is None else eqn.outvars[end]


def begun_at_zero(program: Program, sums: Mapping[int, Collection[int]]) -> tuple[Program, dict[int, int]]:
    """A program some of whose loops begin sums with zero, to which what was there before is added afterwards.

    Args:
        program: A program.
        sums: By unit, the places of such sums among the carries.

    Returns:
        The program, and for each result of such a loop what the loop itself adds up.
    """
    found = replace(program, operations=[], types=[*program.types], constants={**program.constants})
    own: dict[int, int] = {}
    for number, unit in enumerate(program.operations):
        first = jax_compat.scan_counts(unit.equation)[0] if number in sums else 0
        ins, outs, after = [*unit.inputs], [*unit.outputs], list[Operation]()
        for i in sorted(sums.get(number, ())):
            total, aval = unit.outputs[i], program.types[unit.outputs[i]]
            ins[first + i], outs[i] = found.add_constant(np.zeros((), aval.dtype)), found.add_value(aval)
            if aval.shape:
                spread = jax.make_jaxpr(partial(lax.broadcast, sizes=aval.shape))(np.zeros((), aval.dtype))
                made = (found.add_value(aval),)
                found.operations.append(Operation(UNPLANNED, spread.eqns[0], (ins[first + i],), made, unit.calls))
                ins[first + i] = made[0]
            add = jax.make_jaxpr(lax.add)(*[jax.ShapeDtypeStruct(aval.shape, aval.dtype)] * 2)
            after.append(Operation(UNPLANNED, add.eqns[0], (unit.inputs[first + i], outs[i]), (total,), unit.calls))
            own[total] = outs[i]
        found.operations.extend([unit._replace(inputs=tuple(ins), outputs=tuple(outs)), *after])
    return found, own
