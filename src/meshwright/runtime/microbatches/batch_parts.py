"""Finds how each value of a program depends on the batch when it is cut into parts, by the sharding rules.

A value is

* *split*: each part of the batch has its own part of the value, along a dim;
* *alike*: the same for all parts, and known without running them;
* partial (``sum``, ``max``, …): each part contributes, and the contributions combine;
* *whole*: known only when all parts have run. An operation on examples that reads such a value, and leads to nothing
  expensive (the standard deviation of a metric), waits for all parts, too.

Only the program for the whole batch is analysed, so that no size or number in it can be that of a part. Where an
operation on examples reads a value that is alike for all parts but indexed by example (weights by position), each part
reads its own rows of it.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from meshwright import jax_compat
from meshwright.graph.dtypes import keeps_sums
from meshwright.program.program import COND, SCAN, WHILE, Operation, Program
from meshwright.rules.base import REDUCING
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut, Form, Status, form_of

ALIKE, WHOLE = "alike", "whole"
PRINTING = ("debug_callback", "debug_print")  # effects that may wait for the whole batch

# Operations that may be applied to contributions before they are added up, inside the body of a user's own loop.
_LINEAR = frozenset("neg transpose reshape squeeze broadcast_in_dim reduce_sum copy slice name".split())  # noqa: SIM905
_ADDING = frozenset({"add", "add_any", "sub"})
_SAME_NUMBER = ("broadcast_in_dim", "convert_element_type", "reshape", "copy")


class TooLate(Exception):
    """An operation on examples reads values that are not known before all parts have run."""

    def __init__(self, number: int, unit: Operation, values: list[int]):
        super().__init__(str(unit))
        self.number = number
        self.unit = unit
        self.values = values


@dataclass(frozen=True)
class Body:
    """A loop some of whose operands are split.

    Attributes:
        analysis: The analysis of its body.
        num_consts: Its first inputs are the same in all trips.
        num_carry: The next ones are its carry; the rest are scanned along their first dim.
    """

    analysis: "Analysis"
    num_consts: int
    num_carry: int

    def carry_key(self, place: int) -> tuple[int, int | None]:
        """A trip's result for a position of the carry; if it is alike for all parts, it is cut like the carry."""
        made, status = self.analysis.program.outputs[place], self.analysis.status
        dim = status[self.num_consts + place]
        return made, dim if isinstance(dim, int) and status[made] == ALIKE else None


@dataclass(frozen=True)
class Branches:
    """A conditional or a checkpoint some of whose operands are split.

    Attributes:
        analyses: The analysis of each branch, or of the checkpoint's body.
        results: The status of each result, whichever branch computes it.
    """

    analyses: list["Analysis"]
    results: list[Status]

    def result_key(self, branch: int, place: int) -> tuple[int, int | None]:
        """A branch's result; if it is alike for all parts there but split in another branch, it is cut likewise."""
        analysis, dim = self.analyses[branch], self.results[place]
        made = analysis.program.outputs[place]
        return made, dim if isinstance(dim, int) and analysis.status[made] == ALIKE else None


class Analysis:
    """How every value of a program depends on the batch.

    Attributes:
        status: The status of each value.
        known: Values that are one and the same number throughout.
        forms: By unit, how it runs on parts.
        bodies: By unit, the body of a loop, or of a checkpoint or the branches of a conditional, that run on parts.
        culprit: The first unit whose results are known only when all parts have run.
    """

    def __init__(
        self,
        program: Program,
        inputs: Sequence[Status],
        cut: Cut,
        *,
        early: Iterable[int] = (),
        waiting: Collection[int] = (),
        known: Mapping[int, Any] | None = None,
        top: bool = True,
    ):
        self.program = program
        self.cut = cut
        self.top = top
        self.early = frozenset(early)
        self.status: dict[int, Status] = dict.fromkeys(program.constants, ALIKE)
        self.status.update(zip(program.inputs, inputs, strict=True))
        self.known = {v: x for v, x in program.constants.items() if jnp.ndim(x) == 0 and _is_number(x)}
        self.known |= dict(known or {})
        self.forms: dict[int, Form] = {}
        self.bodies: dict[int, Body | Branches] = {}
        self.culprit: Operation | None = None
        parts = program.live.difference(waiting)  # XLA leaves out what nobody reads
        for number, unit in enumerate(program.operations):
            made = self._unit(number, unit) if number in parts else [WHOLE] * len(unit.outputs)
            self.status.update((o, ALIKE if o in self.early else s) for o, s in zip(unit.outputs, made, strict=True))
            if unit.name in _SAME_NUMBER and all(v in self.known for v in unit.inputs):
                self.known.update((o, _converted(self.known[unit.inputs[0]], unit)) for o in unit.outputs)

    def results(self) -> list[Status]:
        return [self.status[o] for o in self.program.outputs]

    def is_zero(self, value: int) -> bool:
        return self.status[value] == ALIKE and value in self.known and not self.known[value]

    def _unit(self, number: int, unit: Operation) -> list[Status]:
        given = [self.status[v] for v in unit.inputs]
        late = [i for i, s in enumerate(given) if s == WHOLE or s in REDUCING]
        split = any(isinstance(s, int) for s in given)
        if self.cut.count == 1:  # a part that is the whole batch may do anything but print, which is done once a step
            waits = bool(unit.equation.effects) or (bool(late) and not split)
            return [WHOLE if waits else 0 if split else ALIKE] * len(unit.outputs)
        if unit.equation.effects and not (self.top and not unit.outputs and unit.name in PRINTING):
            raise CannotCut(f"{unit} has side effects, which would happen once for each part")
        if unit.equation.effects:
            return []
        has_body = bool(unit.regions) and unit.name != WHILE
        if split and late and (self.top or not has_body or any(given[i] != "sum" for i in late)):
            raise TooLate(number, unit, [unit.inputs[i] for i in late])
        if late and not split:
            return self._late(unit, given)
        if not split:
            return [ALIKE] * len(unit.outputs)
        if unit.name == SCAN:
            return self._scan(number, unit, given)
        if unit.name == COND or (unit.is_checkpoint and unit.regions):
            return self._branches(number, unit, given)
        form = self.forms[number] = form_of(unit, given, self.cut, self.is_zero(unit.inputs[0]))
        return list(form.results)

    def _late(self, unit: Operation, given: list[Status]) -> list[Status]:
        if not self.top and self._is_linear(unit, given):
            return ["sum"]
        self.culprit = self.culprit or unit
        return [WHOLE] * len(unit.outputs)

    def _is_linear(self, unit: Operation, given: list[Status]) -> bool:
        """Whether a unit may run on contributions instead of their sum, with the same result up to rounding."""
        sums = [s == "sum" for s in given]
        if len(unit.outputs) != 1 or any(s != "sum" and s != ALIKE for s in given):
            return False
        if unit.equation.invars[sums.index(True)].aval.dtype == jnp.float16:
            # Parts are float32 there, and stay so until all are added up: float16 may overflow for a part alone. They
            # may be moved; what else one device makes of the rounded sum, which may be infinite, no part can tell.
            return unit.name in _LINEAR and unit.equation.invars[0].aval.size == unit.equation.outvars[0].aval.size
        zeros = [is_sum or self.is_zero(v) for is_sum, v in zip(sums, unit.inputs, strict=True)]
        if unit.name in _ADDING:
            return all(zeros)
        if unit.name in ("concatenate", "pad"):
            return all(zeros) and sums[0]
        if unit.name == "convert_element_type":
            return keeps_sums(str(unit.equation.invars[0].aval.dtype), str(unit.equation.outvars[0].aval.dtype))
        if unit.name in ("mul", "div"):
            return sum(sums) == 1 and (unit.name == "mul" or sums[0]) and self._scales(unit, sums)
        return unit.name in _LINEAR and sum(sums) == 1

    def _scales(self, unit: Operation, sums: list[bool]) -> bool:
        """Whether a factor is finite: contributions of both signs times infinity, or over zero, add up to NaN."""
        factor = self.known.get(unit.inputs[sums.index(False)])
        if factor is None or not np.isfinite(factor):
            return False
        return unit.name == "mul" or (bool(factor) and jnp.issubdtype(unit.equation.outvars[0].aval.dtype, jnp.inexact))

    def _scan(self, number: int, unit: Operation, given: list[Status]) -> list[Status]:
        num_consts, num_carry = unit.num_consts, unit.num_carry
        consts, carry = given[:num_consts], given[num_consts : num_consts + num_carry]
        xs: list[Status] = []
        for s in given[num_consts + num_carry :]:
            if s == 0:
                raise CannotCut(f"{unit} runs over the examples")
            xs.append(s - 1 if isinstance(s, int) else s)
        numbers = {i: self.known[v] for i, v in enumerate(unit.inputs[:num_consts]) if v in self.known}
        zero = {i for i in range(num_carry) if self.is_zero(unit.inputs[num_consts + i])}
        while True:
            known = numbers | {num_consts + i: 0 for i in zero if carry[i] == ALIKE}
            inner = self._inside(unit, unit.regions[0], [*consts, *carry, *xs], known)
            joined = [self._join(inner, i, carry[i], i in zero, unit) for i in range(num_carry)]
            if any(
                s == "sum" and v.aval.dtype == jnp.float16 for s, v in zip(joined, unit.equation.outvars, strict=False)
            ):
                raise CannotCut(f"{unit} adds up float16 from trip to trip, where sums of parts may overflow")
            stays = {i for i in zero if joined[i] == "sum"}
            if joined == carry and stays == zero:
                self.bodies[number] = Body(inner, num_consts, num_carry)
                return [*carry, *(s + 1 if isinstance(s, int) else s for s in inner.results()[num_carry:])]
            carry, zero = joined, stays

    def _join(self, inner: "Analysis", position: int, before: Status, zero: bool, unit: Operation) -> Status:
        """The status of a carry that has one status before a trip and another after it."""
        made = inner.program.outputs[position]
        after = inner.status[made]
        if before == after or (isinstance(before, int) and after == ALIKE):
            return before
        if before == ALIKE and (isinstance(after, int) or (after == "sum" and zero)):
            return after
        if before == "sum" and inner.is_zero(made):
            return before
        raise CannotCut(f"{unit} carries a value that is known only after the whole batch has run")

    def _branches(self, number: int, unit: Operation, given: list[Status]) -> list[Status]:
        """The statuses of the results of a conditional, the number of whose branch is alike for all parts, or of a
        checkpoint."""
        first = unit.num_choosing
        known = {i: self.known[v] for i, v in enumerate(unit.inputs[first:]) if v in self.known}
        analyses = [self._inside(unit, branch, given[first:], known) for branch in unit.regions]
        results = [self._either(analyses, place, unit) for place in range(len(unit.outputs))]
        self.bodies[number] = Branches(analyses, results)
        return results

    def _either(self, analyses: Sequence["Analysis"], place: int, unit: Operation) -> Status:
        """The status of a result that may have another in each branch."""
        found = {analysis.results()[place] for analysis in analyses}
        if len(found) == 1:
            return found.pop()
        if "sum" in found and unit.equation.outvars[place].aval.dtype == jnp.float16:
            raise CannotCut(f"{unit} adds up float16 in one branch alone, where sums of parts may overflow")
        split = found - {ALIKE}
        other = split.pop()
        zeros = [a.is_zero(a.program.outputs[place]) for a in analyses if a.results()[place] == ALIKE]
        if split or not (isinstance(other, int) or (other == "sum" and all(zeros))):
            raise CannotCut(f"{unit} has branches whose results depend on the batch in different ways")
        return other

    def _inside(self, unit: Operation, program: Program, given: list[Status], known: Mapping[int, Any]) -> "Analysis":
        """The analysis of a jaxpr that is one unit."""
        try:
            inner = Analysis(program, given, self.cut, known=known, top=False)
        except TooLate as error:
            raise CannotCut(f"{error.unit} needs a value that is known only after the whole batch has run") from None
        if WHOLE in inner.results():
            where = "a checkpoint" if unit.is_checkpoint else f"a {unit.name}"
            raise CannotCut(f"{inner.culprit} in {where} uses a value that is known only after the whole batch has run")
        return inner


def _is_number(x: Any) -> bool:
    return not jax_compat.is_key_dtype(x.dtype) if hasattr(x, "dtype") else isinstance(x, bool | int | float | complex)


def _converted(number: Any, unit: Operation) -> np.generic | np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(number).astype(unit.equation.outvars[0].aval.dtype)[()]
