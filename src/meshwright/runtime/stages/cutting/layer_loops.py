"""Splits loops over layers at the cuts between stages, arrays that are stacked over layers, and conditional updates.

A scan over layers is one operation, and a stack of the layers' weights one array; a pipeline gives each virtual stage
some of the layers, not always equally many. In the new step such a scan is replaced by one for each virtual stage that
has some of its layers, and stacks are in pieces. An operation on a stack (a cast before the loop,
the optimizer's after it) runs piece by piece where its rule allows that, and otherwise on the pieces put together. What
a loop only adds up over its layers (an auxiliary loss, the gradient of a weight of all layers), each piece adds up from
zero, and the sums are added up in the end: so what is a sum over the examples goes from stage to stage once a step.

An update in branches (`optax.apply_if_finite`, `optax.MultiSteps`) is one operation on the state of all stages. Its
branches are evaluated and their results selected, so that each stage updates its own state and the stages exchange
single numbers; a branch that computes products or loops, which should not run in vain, stays one operation.

The result is a program in which operations and pieces of them have the ids of what they were.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.program.parts import added
from meshwright.program.program import COND, SCAN, Operation, Program
from meshwright.runtime.microbatches.batch_parts import ALIKE
from meshwright.runtime.microbatches.cut_operations import (
    COMBINE,
    CannotCut,
    Cut,
    Status,
    form_of,
    is_expensive,
    shrunk,
)
from meshwright.runtime.microbatches.cut_step import analyse
from meshwright.runtime.microbatches.running_sums import begun_at_zero, running_sums
from meshwright.runtime.stages.cutting.assignment import Assignment, Parts


@dataclass(frozen=True)
class Pieces:
    """A value in pieces along a dim, which begins with the layers: one piece for each virtual stage that has some."""

    dim: int
    parts: Parts
    values: tuple[int, ...]


Value: TypeAlias = int | Pieces  # the number of a value of the new step, or of its pieces


@dataclass(frozen=True)
class _Share(Cut):
    """How a dim that begins with ``count`` layers shrinks to ``size`` of them."""

    size: int = 1

    def shape(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        return tuple(n * self.size // self.count if d == dim else n for d, n in enumerate(shape))


def _shares(parts: Parts) -> list[_Share]:
    return [_Share(parts[-1][2], 1, end - begin) for _, begin, end in parts]


@dataclass(frozen=True)
class SplitStep:
    """A step whose loops over layers and conditional updates are split.

    Attributes:
        program: The step. An operation, or a piece of one, has the ids of the operation that it was; what cuts values
            and puts them together has none of the plan's.
        assignment: Where its units and arguments belong.
        leaves: For each leaf of the step, the leaf of the user's arguments and the number of the piece; -1 for all of
            it.
        results: The same for its results.
    """

    program: Program
    assignment: Assignment
    leaves: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]


def split_layers(program: Program, assignment: Assignment, examples: Sequence[bool] = (), count: int = 1) -> SplitStep:
    """A step with its loops over layers and conditional updates split; itself where it has none.

    Args:
        program: The step.
        assignment: Where its operations and leaves belong.
        examples: Which leaves are part of the batch.
        count: Into how many parts the batch is to be cut.

    Raises:
        ShardingError: A loop over layers of several stages cannot be split.
        CannotCut: The batch cannot be cut.
    """
    if not assignment.spans and not any(map(_is_cheap_choice, program.operations, assignment.is_update)):
        whole = [(i, -1) for i in program.inputs]
        return SplitStep(program, assignment, whole, [(i, -1) for i in range(len(program.outputs))])
    _check_loops(program, assignment)
    sums = _sums_over_layers(program, assignment, examples, count) if count > 1 else {}
    splitting = _Splitting(program, assignment, sums)
    results = splitting.run()
    return SplitStep(splitting.split, splitting.new_assignment(results), splitting.leaves, results)


def _is_loop(unit: Operation, parts: Parts | None) -> bool:
    """Whether a unit loops over layers of several stages; a loop of another length works on all layers at once."""
    return parts is not None and unit.name == SCAN and unit.equation.params["length"] == parts[-1][2]


def _sums_over_layers(
    program: Program, assignment: Assignment, examples: Sequence[bool], count: int
) -> dict[int, set[int]]:
    """The carries to which loops over layers only add, by unit and place; not those that have a row for each example.

    Raises:
        CannotCut: The batch cannot be cut.
    """
    loops = [n for n, parts in assignment.spans.items() if _is_loop(program.operations[n], parts)]
    sums = {n: found for n in loops if (found := running_sums(program.operations[n]))}
    if not sums:
        return {}
    other, own = begun_at_zero(program, sums)
    inputs: list[Status] = [0 if given and program.types[i].shape else ALIKE for i, given in enumerate(examples)]
    status = analyse(other, inputs, Cut(count, 1)).status
    return {
        n: {i for i in some if not isinstance(status[own[program.operations[n].outputs[i]]], int)}
        for n, some in sums.items()
    }


def _check_loops(program: Program, assignment: Assignment) -> None:
    """Refuses loops over layers that would run on one stage, whatever the plan says."""
    for number, parts in assignment.spans.items():
        unit = program.operations[number]
        layers = f"layers of {len(parts)} stages"
        if unit.is_checkpoint and _has_loop(unit, parts[-1][2]):
            raise ShardingError(
                f"{unit} is a checkpoint around a loop over {layers}, which is one operation and cannot be split: call "
                "jax.checkpoint on the function of one layer, inside of the loop"
            )
        if unit.name == "scan" and unit.equation.params["reverse"] and assignment.is_forward[number]:
            raise ShardingError(
                f"{unit} loops over {layers} from the last to the first: stack them in the order in which they run, "
                "and leave reverse=True out"
            )


def _has_loop(unit: Operation, length: int) -> bool:
    inner = [one for region in unit.regions for one in region.operations]
    return any(one.name == SCAN and one.equation.params["length"] == length for one in inner)


def _is_cheap_choice(unit: Operation, is_update: bool) -> bool:
    """Whether a unit is a conditional of the update whose branches are cheap enough to run all of them."""
    if unit.name != COND or not is_update or unit.equation.effects:
        return False
    inner = [one for branch in unit.regions for one in branch.operations]
    return all(_is_cheap_choice(one, is_update) or not is_expensive(one) for one in inner)


def _piece_type(aval: Any, share: _Share) -> jax.core.ShapedArray:
    return aval.update(shape=share.shape(aval.shape, 0))


class _Splitting:
    """Makes a step some of whose arguments are in pieces, operation by operation.

    Attributes:
        split: The new step.
        units: For each of its operations, the number of the operation that it is for, and the virtual stage of the
            piece; -1 where it is for all.
        leaves: As in `SplitStep`.
    """

    def __init__(self, program: Program, assignment: Assignment, sums: Mapping[int, Collection[int]]):
        self.program, self.assignment, self.sums = program, assignment, sums
        self.units: list[tuple[int, int]] = []
        stacked = assignment.stacked
        self.leaves = [(i, k) for i in program.inputs for k in (range(len(stacked[i])) if i in stacked else (-1,))]
        types = [
            program.types[i] if k < 0 else _piece_type(program.types[i], _shares(stacked[i])[k]) for i, k in self.leaves
        ]
        self.split = Program(types, range(len(types)))
        numbers = {leaf: number for number, leaf in enumerate(self.leaves)}
        self.given: dict[int, Value] = {
            i: Pieces(0, stacked[i], tuple(numbers[i, k] for k in range(len(stacked[i]))))
            if i in stacked
            else numbers[i, -1]
            for i in program.inputs
        }
        self.split.donated.update(n for n, (i, _) in enumerate(self.leaves) if i in program.donated)

    def run(self) -> list[tuple[int, int]]:
        """Makes the step, and returns for each result the number of the result of the whole step and of its piece."""
        env = self.given | self._constants(self.program)
        for number, unit in enumerate(self.program.operations):
            made = self._unit(number, unit, [env[v] for v in unit.inputs])
            env.update(zip(unit.outputs, made, strict=True))
        last, where = len(self.program.operations) - 1, list[tuple[int, int]]()
        for place, value in enumerate(self.program.outputs):
            leaf, made_of = self.assignment.state.get(place), env[value]
            if leaf is not None and leaf in self.assignment.stacked:
                values = self._pieces(made_of, self.assignment.stacked[leaf], last).values
                self.split.outputs.extend(values)
                where += [(place, k) for k in range(len(values))]
            else:
                self.split.outputs.append(self._whole(made_of, last))
                where.append((place, -1))
        return where

    def _constants(self, region: Program) -> dict[int, Value]:
        return {v: self.split.add_constant(value, region.types[v]) for v, value in region.constants.items()}

    def _unit(self, number: int, unit: Operation, ins: Sequence[Value]) -> Sequence[Value]:
        if _is_loop(unit, self.assignment.spans.get(number)):
            return self._scan(number, unit, ins)
        if _is_cheap_choice(unit, self.assignment.is_update[number]):
            return self._choice(number, unit, ins)
        if any(isinstance(x, Pieces) for x in ins):
            made = self._piecewise(number, unit, ins)
            if made is not None:
                return made
        inputs = tuple(self._whole(x, number) for x in ins)
        outputs = tuple(self.split.add_value(v.aval) for v in unit.equation.outvars)
        self._append(number, -1, unit._replace(inputs=inputs, outputs=outputs))
        return outputs

    def _append(self, number: int, virtual: int, operation: Operation) -> None:
        self.split.operations.append(operation)
        self.units.append((number, virtual))

    def _add(self, number: int, virtual: int, function: Callable[..., Any], operands: Sequence[int]) -> list[int]:
        """Adds what a function computes of some values, for an operation and a virtual stage; its results."""
        operations, results = added(self.split, function, operands)
        for one in operations:
            self._append(number, virtual, one)
        return results

    def _choice(self, number: int, unit: Operation, ins: Sequence[Value]) -> list[Value]:
        """The results of a conditional: all branches are evaluated, and their results selected."""
        made = []
        for branch in unit.regions:
            env = self._constants(branch) | dict(zip(branch.inputs, ins[1:], strict=True))
            for one in branch.operations:
                one = one._replace(calls=(*unit.calls, unit.equation, *one.calls))
                env.update(zip(one.outputs, self._unit(number, one, [env[v] for v in one.inputs]), strict=True))
            made.append([env[v] for v in branch.outputs])
        which = self._whole(ins[0], number)
        return [self._selected(number, which, cases) for cases in zip(*made, strict=True)]

    def _selected(self, number: int, which: int, cases: Sequence[Value]) -> Value:
        """One of some values, in pieces where one of them is."""
        pieces = next((x for x in cases if isinstance(x, Pieces)), None)
        if pieces is None:
            (found,) = self._add(number, -1, _select, [which, *(self._whole(x, number) for x in cases)])
            return found
        whole = [self._pieces(x, pieces.parts, number) for x in cases]
        selected = [
            self._add(number, virtual, _select, [which, *(x.values[k] for x in whole)])[0]
            for k, (virtual, _, _) in enumerate(pieces.parts)
        ]
        return Pieces(0, pieces.parts, tuple(selected))

    def _piecewise(self, number: int, unit: Operation, ins: Sequence[Value]) -> list[Value] | None:
        """The results of an operation piece by piece; None where its rule does not allow that."""
        cuts = {x.parts for x in ins if isinstance(x, Pieces)}
        parts = cuts.pop()
        shares = _shares(parts)
        given: list[Status] = [x.dim if isinstance(x, Pieces) else ALIKE for x in ins]
        try:
            form = form_of(unit, given, shares[0], False)
        except CannotCut:
            return None
        if cuts or any(not isinstance(s, int) and s not in COMBINE for s in form.results):
            return None
        made: list[list[int]] = []
        for k, part in enumerate(parts):
            operands = [
                x.values[k] if isinstance(x, Pieces) else x if dim is None else self._rows(number, x, dim, parts, k)
                for x, dim in zip(ins, form.operands, strict=True)
            ]
            made.append(self._on_piece(number, part[0], unit, shrunk(unit, form, shares[k]), operands))
        found: list[Value] = []
        for status, values in zip(form.results, zip(*made, strict=True), strict=True):
            if isinstance(status, int):
                found.append(Pieces(status, parts, tuple(values)))
            else:
                combine = COMBINE[status]
                found += self._add(number, -1, lambda *some, combine=combine: [reduce(combine, some)], values)
        return found

    def _on_piece(
        self, number: int, virtual: int, unit: Operation, params: dict[str, Any], operands: Sequence[int]
    ) -> list[int]:
        """The results of an operation with other parameters on pieces of its operands."""
        equation = jax_compat.on_types(unit.equation, [self.split.types[v] for v in operands], params)
        made = [self.split.add_value(v.aval) for v in equation.outvars]
        self._append(number, virtual, unit._replace(equation=equation, inputs=tuple(operands), outputs=tuple(made)))
        return made

    def _pieces(self, x: Value, parts: Parts, number: int) -> Pieces:
        """A value in pieces along its first dim, for a unit."""
        if isinstance(x, Pieces) and x.dim == 0 and x.parts == parts:
            return x
        whole = self._whole(x, number)
        return Pieces(0, parts, tuple(self._rows(number, whole, 0, parts, k) for k in range(len(parts))))

    def _whole(self, x: Value, number: int) -> int:
        if not isinstance(x, Pieces):
            return x
        return self._add(number, -1, lambda *arrays: [jnp.concatenate(arrays, x.dim)], x.values)[0]

    def _rows(self, number: int, value: int, dim: int, parts: Parts, k: int) -> int:
        """The rows of some layers along a dim that begins with the layers."""
        virtual, begin, end = parts[k]
        step = self.split.types[value].shape[dim] // parts[-1][2]

        def rows(x: Any) -> list[Any]:
            return [lax.slice_in_dim(x, begin * step, end * step, axis=dim)]

        return self._add(number, virtual, rows, [value])[0]

    def _scan(self, number: int, unit: Operation, ins: Sequence[Value]) -> list[Value]:
        """A scan for each virtual stage: the carry goes from one to the next, what is stacked stays in pieces."""
        parts = self.assignment.spans[number]
        num_consts, num_carry = unit.num_consts, unit.num_carry
        first = num_consts + num_carry
        consts, carry = ([self._whole(x, number) for x in some] for some in (ins[:num_consts], ins[num_consts:first]))
        stacks = [self._pieces(x, parts, number) for x in ins[first:]]
        made: dict[int, list[int]] = {}
        order = range(len(parts))
        sums: dict[int, list[int]] = {i: [carry[i]] for i in self.sums.get(number, ())}
        for k in reversed(order) if unit.equation.params["reverse"] else order:
            virtual, begin, end = parts[k]
            for i in sums:
                (carry[i],) = self._add(number, virtual, lambda x: [jnp.zeros_like(x)], [carry[i]])
            operands = [*consts, *carry, *(s.values[k] for s in stacks)]
            params = jax_compat.scan_length(unit.equation, end - begin)
            outs = self._on_piece(number, virtual, unit, params, operands)
            carry, made[k] = outs[:num_carry], outs[num_carry:]
            for i, some in sums.items():
                some.append(carry[i])
        for i, some in sums.items():
            (carry[i],) = self._add(number, -1, lambda *some: [reduce(lax.add, some)], some)
        stacked = zip(*(made[k] for k in order), strict=True)
        return [*carry, *(Pieces(0, parts, tuple(values)) for values in stacked)]

    def new_assignment(self, results: Sequence[tuple[int, int]]) -> Assignment:
        """The assignment of the new step's units and leaves, given what its results are."""
        before, leaves = self.assignment, self.leaves
        places = {leaf: i for i, leaf in enumerate(leaves)}
        states = ((i, before.state.get(place), piece) for i, (place, piece) in enumerate(results))
        return replace(
            before,
            layer=[before.layer[n] if v < 0 else -2 - v for n, v in self.units],  # those of a loop have no numbers
            unit=[before.unit[n] if v < 0 else v for n, v in self.units],
            is_forward=[before.is_forward[n] for n, _ in self.units],
            is_update=[before.is_update[n] for n, _ in self.units],
            is_held=[before.is_held[n] for n, _ in self.units],
            argument=[before.argument[i] if k < 0 else before.stacked[i][k][0] % before.num_stages for i, k in leaves],
            paths=[before.paths[i] for i, _ in leaves],
            state={i: places[leaf, piece] for i, leaf, piece in states if leaf is not None},
            donated=frozenset(n for n, (i, _) in enumerate(leaves) if i in before.donated),
            spans={},
            stacked={},
            pieces=frozenset(n for n, (_, piece) in enumerate(leaves) if piece >= 0),
        )


def _select(which: Any, *cases: Any) -> list[jax.Array]:
    """The case of a number; two cases are selected by a Boolean, as `jnp.where` does."""
    index = lax.ne(which, jnp.zeros_like(which)) if len(cases) == 2 else which
    return [lax.select_n(index, *cases)]
