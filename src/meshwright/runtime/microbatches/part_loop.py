"""Writes a step that is cut as one program: what runs before the parts, a loop over them, and what runs after."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.program.numbering import Changed, numbered
from meshwright.program.parts import Moving, added, folded, part_of
from meshwright.program.program import UNPLANNED, Operation, Program
from meshwright.program.regions import with_regions
from meshwright.runtime.microbatches.cut_operations import is_half
from meshwright.runtime.microbatches.cut_step import CutStep

_SCOPE = "microbatches"
_COMBINE: dict[str, Callable[..., Any]] = {
    "max": lax.reduce_max,
    "min": lax.reduce_min,
    "prod": lax.reduce_prod,
    "and": lax.reduce_and,
    "or": lax.reduce_or,
}


def in_loop(step: CutStep) -> Changed:
    """The step with its parts one after the other, in a loop."""
    return numbered(_Writing(step).whole())


class _Writing:
    """Writes the program.

    Attributes:
        program: The program.
        moving: Moves operations of the step into it.
        sums, others: The contributions of the parts that are added up in the loop, and those that are combined after.
    """

    def __init__(self, step: CutStep):
        self.step, self.types, self.status = step, step.program.types, step.analysis.status
        self.program = Program(step.program.input_types, step.program.inputs)
        self.program.donated.update(step.program.donated)
        self.program.sharded_calls.extend(step.program.sharded_calls)
        self.moving = Moving(step.program.copy(), self.program, {value: value for value in step.program.inputs})
        self.sums = [value for value in step.contributions if self.status[value] == "sum"]
        self.others = [value for value in step.contributions if self.status[value] != "sum"]

    def whole(self) -> Program:
        self._add_as_they_are(self.step.before)
        if self.step.made:
            self._add_loop()
        self._add_as_they_are(self.step.program.operations[n] for n in self.step.after)
        self.program.outputs.extend(map(self.moving.number, self.step.program.outputs))
        return self.program

    def _add_as_they_are(self, operations: Iterable[Operation]) -> None:
        self.program.operations.extend(map(self.moving.operation, folded(self.moving.source, operations)))

    def _add(self, function: Callable[..., list[Any]], operands: Sequence[int]) -> list[int]:
        """Adds what a function computes of some values."""
        operations, made = added(self.program, function, operands)
        self.program.operations.extend(operations)
        return made

    def _add_loop(self) -> None:
        """Adds the loop, which adds up sums and stacks the rest of what the parts make, and what combines the rest."""
        sliced = self._add(self._in_parts, [self.moving.number(value) for value, _ in self.step.sliced])
        totals = self._add(lambda: list(map(self._zeros, self.sums)), ())
        (index,) = self._add(self._counting, ())
        shared, body = self._body([self.program.types[total] for total in totals])
        num_ids = 1 + len(sliced) + len(body.outputs)
        like = Operation(UNPLANNED, jax_compat.empty_loop(_SCOPE, self.step.cut.count), (), (), num_ids=num_ids)
        operands = [*map(self.moving.number, shared), *totals, index, *sliced]
        loop = with_regions(self.program, like, [body], operands, (len(shared), len(totals)))
        self.program.operations.append(loop)
        made = self._add(self._whole, loop.outputs)
        self.moving.numbers.update(zip((*self.sums, *self.others, *self.step.stacked), made, strict=True))

    def _body(self, kinds: Sequence[Any]) -> tuple[list[int], Program]:
        """What runs for one part: the values that it is given alike for all parts, in the order in which it reads them
        first, as in JAX's loops; and the region, which takes them, totals of these types, its number and its slices."""
        step = self.step
        region = step.part.region(step.part.pieces, [*step.shared, *step.sliced], step.made)
        index, *given = region.inputs
        values = dict(zip(given, (value for value, _ in step.shared), strict=False))
        read = dict.fromkeys(value for operation in region.operations for value in operation.inputs)
        shared = [number for number in read if number in values]
        made = dict(zip(step.made, region.outputs, strict=True))
        totals = [region.add_value(kind) for kind in kinds]
        adding, sums = added(region, self._added, [*totals, *(made[v, None] for v in self.sums)])
        inputs = [*shared, *totals, index, *given[len(step.shared) :]]
        rest = [made[v, None] for v in (*self.others, *step.stacked)]
        body = part_of(region, inputs, [*region.operations, *adding], [*sums, *rest])
        return [values[number] for number in shared], body

    def _in_parts(self, *values: Any) -> list[Any]:
        """The values that are cut, as stacks of their parts."""
        keys = zip(values, self.step.sliced, strict=True)
        return [self.step.cut.parts(x, self._dim(v) if d is None else d) for x, (v, d) in keys]

    def _zeros(self, value: int) -> jax.Array:
        """What a sum begins with; sums of half precision are wider."""
        kind = self.types[value]
        return jnp.zeros(kind.shape, jnp.float32 if is_half(kind.dtype) else kind.dtype)

    def _counting(self) -> list[Any]:
        with jax.named_scope(_SCOPE):
            return [jnp.arange(self.step.cut.count)]

    def _added(self, *values: Any) -> list[Any]:
        """The totals, with what a part contributes to each."""
        pairs = zip(values[: len(self.sums)], values[len(self.sums) :], strict=True)
        return [
            lax.add(total, mine if mine.dtype == total.dtype else mine.astype(total.dtype)) for total, mine in pairs
        ]

    def _whole(self, *values: Any) -> list[Any]:
        """The values of the whole batch, of what the loop returns."""
        totals, rest = values[: len(self.sums)], values[len(self.sums) :]
        sums = [total.astype(self.types[v].dtype) for v, total in zip(self.sums, totals, strict=True)]
        others = [_COMBINE[str(self.status[v])](x, (0,)) for v, x in zip(self.others, rest, strict=False)]
        joined = zip(self.step.stacked, rest[len(self.others) :], strict=True)
        return [*sums, *others, *(self.step.cut.join(x, self._dim(v)) for v, x in joined)]

    def _dim(self, value: int) -> int:
        dim = self.status[value]
        assert isinstance(dim, int)
        return dim
