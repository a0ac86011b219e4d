"""Splits loops over layers at the cuts between stages, arrays that are stacked over layers, and conditional updates.

A scan over layers is one operation, and a stack of the layers' weights one array; a pipeline gives each virtual stage
some of the layers, not always equally many. The step is evaluated once, with such a scan replaced by one for each
virtual stage that has some of its layers, and with stacks in pieces. An operation on a stack (a cast before the loop,
the optimizer's after it) runs piece by piece where its rule allows that, and otherwise on the pieces put together. What
a loop only adds up over its layers (an auxiliary loss, the gradient of a weight of all layers), each piece adds up from
zero, and the sums are added up in the end: so what is a sum over the examples goes from stage to stage once a step.

An update in branches (`optax.apply_if_finite`, `optax.MultiSteps`) is one operation on the state of all stages. Its
branches are evaluated and their results selected, so that each stage updates its own state and the stages exchange
single numbers; a branch that computes products or loops, which should not run in vain, stays one operation.

The result is an ordinary jaxpr. Names of the operations' scopes tell which operation of the step, and which virtual
stage's piece of it, an equation is.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.tracing.call import Call
from meshwright.program.program import COND, SCAN, UNPLANNED, Operation, Program
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
from meshwright.runtime.microbatches.microbatches import analyse
from meshwright.runtime.microbatches.running_sums import begun_at_zero, running_sums
from meshwright.runtime.stages.cutting.assignment import Assignment, Parts

_TAG = re.compile(r"^mw(\d+)(?:p(\d+))?(/\+)?(?:/|$)")
_ADDED = "+"  # the scope of operations that the plan knows nothing of: they cut pieces or put them together


@dataclass(frozen=True)
class Pieces:
    """A value in pieces along a dim, which begins with the layers: one piece for each virtual stage that has some."""

    dim: int
    parts: Parts
    arrays: tuple[Any, ...]


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
        jaxpr: The step.
        program: The same as a program.
        assignment: Where its units and arguments belong.
        leaves: For each leaf of the step, the leaf of the user's arguments and the number of the piece; -1 for all of
            it.
        results: The same for its results.
    """

    jaxpr: Any
    program: Program
    assignment: Assignment
    leaves: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]


def split_layers(call: Call, assignment: Assignment, examples: Sequence[bool] = (), count: int = 1) -> SplitStep:
    """A step with its loops over layers and conditional updates split; itself where it has none.

    Args:
        call: The step.
        assignment: Where its operations and leaves belong.
        examples: Which leaves are part of the batch.
        count: Into how many parts the batch is to be cut.

    Raises:
        ShardingError: A loop over layers of several stages cannot be split.
        CannotCut: The batch cannot be cut.
    """
    program, stacked = call.program, assignment.stacked
    whole = [(i, -1) for i in program.inputs]
    if not assignment.spans and not any(map(_is_cheap_choice, program.operations, assignment.is_update)):
        return SplitStep(call.jaxpr, program, assignment, whole, [(i, -1) for i in range(len(program.outputs))])
    _check_loops(program, assignment)
    sums = _sums_over_layers(program, assignment, examples, count) if count > 1 else {}
    splitting = _Splitting(program, assignment, sums)
    leaves = [(i, k) for i, _ in whole for k in (range(len(stacked[i])) if i in stacked else (-1,))]
    types = [program.types[i] if k < 0 else _piece_type(program.types[i], _shares(stacked[i])[k]) for i, k in leaves]
    results: list[tuple[int, int]] = []

    def step(*arrays: Any) -> list[Any]:
        given: dict[int, Any] = {}
        for (leaf, piece), array in zip(leaves, arrays, strict=True):
            if piece < 0:
                given[leaf] = array
            else:
                before = given[leaf].arrays if piece else ()
                given[leaf] = Pieces(0, stacked[leaf], (*before, array))
        made, where = splitting.run(given)
        results[:] = where
        return made

    new = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types))
    split = Program.of(new)
    return SplitStep(new, split, _renumbered(assignment, split, leaves, results), leaves, results)


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
    sums = {n: found for n in loops if (found := running_sums(program.operations[n].equation))}
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
    """Evaluates a step with some arguments in pieces."""

    def __init__(self, program: Program, assignment: Assignment, sums: Mapping[int, Collection[int]]):
        self.program, self.assignment, self.sums = program, assignment, sums

    def run(self, given: dict[int, Any]) -> tuple[list[Any], list[tuple[int, int]]]:
        """The results, and for each the number of the result of the whole step and of its piece."""
        env: dict[int, Any] = {**self.program.constants, **given}
        for number, unit in enumerate(self.program.operations):
            made = self._unit(number, unit, [env[v] for v in unit.inputs])
            env.update(zip(unit.outputs, made, strict=True))
        found: list[Any] = []
        where: list[tuple[int, int]] = []
        for place, value in enumerate(self.program.outputs):
            leaf, made = self.assignment.state.get(place), env[value]
            if leaf is not None and leaf in self.assignment.stacked:
                arrays = self._pieces(made, self.assignment.stacked[leaf], len(self.program.operations) - 1).arrays
                found += arrays
                where += [(place, k) for k in range(len(arrays))]
            else:
                with jax.named_scope(f"mw{len(self.program.operations) - 1}"):
                    found.append(self._whole(made))
                where.append((place, -1))
        return found, where

    def _unit(self, number: int, unit: Operation, ins: list[Any]) -> Sequence[Any]:
        if _is_loop(unit, self.assignment.spans.get(number)):
            return self._scan(number, unit, ins)
        if _is_cheap_choice(unit, self.assignment.is_update[number]):
            return self._choice(number, unit, ins)
        if any(isinstance(x, Pieces) for x in ins):
            made = self._piecewise(number, unit, ins)
            if made is not None:
                return made
        with jax.named_scope(f"mw{number}"):
            return unit.run([self._whole(x) for x in ins])

    def _choice(self, number: int, unit: Operation, ins: list[Any]) -> list[Any]:
        """The results of a conditional: all branches are evaluated, and their results selected."""
        made = []
        for branch in unit.regions:
            env: dict[int, Any] = {**branch.constants, **dict(zip(branch.inputs, ins[1:], strict=True))}
            for one in branch.operations:
                one = one._replace(calls=(*unit.calls, unit.equation, *one.calls))
                env.update(zip(one.outputs, self._unit(number, one, [env[v] for v in one.inputs]), strict=True))
            made.append([env[v] for v in branch.outputs])
        return [self._selected(number, ins[0], cases) for cases in zip(*made, strict=True)]

    def _selected(self, number: int, which: Any, cases: Sequence[Any]) -> Pieces | jax.Array:
        """One of some values, in pieces where one of them is."""
        pieces = next((x for x in cases if isinstance(x, Pieces)), None)
        if pieces is None:
            with jax.named_scope(f"mw{number}"), jax.named_scope(_ADDED):
                return _select(which, cases)
        whole = [self._pieces(x, pieces.parts, number) for x in cases]
        found = []
        for k, (virtual, _, _) in enumerate(pieces.parts):
            with jax.named_scope(f"mw{number}p{virtual}"), jax.named_scope(_ADDED):
                found.append(_select(which, [x.arrays[k] for x in whole]))
        return Pieces(0, pieces.parts, tuple(found))

    def _piecewise(self, number: int, unit: Operation, ins: list[Any]) -> list[Any] | None:
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
        made: list[list[Any]] = []
        for k, (virtual, begin, end) in enumerate(parts):
            eqn = unit.equation.replace(params=shrunk(unit, form, shares[k]))
            with jax.named_scope(f"mw{number}p{virtual}"):
                operands = [
                    x.arrays[k] if isinstance(x, Pieces) else x if dim is None else _rows(x, dim, begin, end, parts)
                    for x, dim in zip(ins, form.operands, strict=True)
                ]
                made.append(jax_compat.bind(eqn, operands, unit.stack))
        found: list[Any] = []
        for status, arrays in zip(form.results, zip(*made, strict=True), strict=True):
            if isinstance(status, int):
                found.append(Pieces(status, parts, tuple(arrays)))
                continue
            with jax.named_scope(f"mw{number}"), jax.named_scope(_ADDED):
                found.append(reduce(COMBINE[status], arrays))
        return found

    def _pieces(self, x: Any, parts: Parts, number: int) -> Pieces:
        """A value in pieces along its first dim, for a unit."""
        if isinstance(x, Pieces) and x.dim == 0 and x.parts == parts:
            return x
        with jax.named_scope(f"mw{number}"):
            whole, found = self._whole(x), []
        for virtual, begin, end in parts:
            with jax.named_scope(f"mw{number}p{virtual}"):
                found.append(_rows(whole, 0, begin, end, parts))
        return Pieces(0, parts, tuple(found))

    def _whole(self, x: Any) -> jax.Array:
        with jax.named_scope(_ADDED):
            return jnp.concatenate(x.arrays, x.dim) if isinstance(x, Pieces) else x

    def _scan(self, number: int, unit: Operation, ins: list[Any]) -> list[Any]:
        """A scan for each virtual stage: the carry goes from one to the next, what is stacked stays in pieces."""
        parts = self.assignment.spans[number]
        num_consts, num_carry = unit.num_consts, unit.num_carry
        first = num_consts + num_carry
        with jax.named_scope(f"mw{number}"):
            consts, carry = ([self._whole(x) for x in some] for some in (ins[:num_consts], ins[num_consts:first]))
        stacks = [self._pieces(x, parts, number) for x in ins[first:]]
        made: dict[int, list[Any]] = {}
        order = range(len(parts))
        sums: dict[int, list[Any]] = {i: [carry[i]] for i in self.sums.get(number, ())}
        for k in reversed(order) if unit.equation.params["reverse"] else order:
            virtual, begin, end = parts[k]
            eqn = unit.equation.replace(params=jax_compat.scan_length(unit.equation, end - begin))
            with jax.named_scope(f"mw{number}p{virtual}"):
                with jax.named_scope(_ADDED):
                    carry = [jnp.zeros_like(x) if i in sums else x for i, x in enumerate(carry)]
                outs = jax_compat.bind(eqn, [*consts, *carry, *(s.arrays[k] for s in stacks)], unit.stack)
            carry, made[k] = outs[:num_carry], outs[num_carry:]
            for i, some in sums.items():
                some.append(carry[i])
        with jax.named_scope(f"mw{number}"), jax.named_scope(_ADDED):
            carry = [reduce(lax.add, sums[i]) if i in sums else x for i, x in enumerate(carry)]
        stacked = zip(*(made[k] for k in order), strict=True)
        return [*carry, *(Pieces(0, parts, tuple(arrays)) for arrays in stacked)]


def _select(which: Any, cases: Sequence[Any]) -> jax.Array:
    """The case of a number; two cases are selected by a Boolean, as `jnp.where` does."""
    index = lax.ne(which, jnp.zeros_like(which)) if len(cases) == 2 else which
    return lax.select_n(index, *map(jnp.asarray, cases))


def _rows(x: Any, dim: int, begin: int, end: int, parts: Parts) -> jax.Array:
    """The rows of some layers along a dim that begins with the layers."""
    step = jnp.shape(x)[dim] // parts[-1][2]
    with jax.named_scope(_ADDED):
        return lax.slice_in_dim(jnp.asarray(x), begin * step, end * step, axis=dim)


def _renumbered(
    before: Assignment, program: Program, leaves: Sequence[tuple[int, int]], results: Sequence[tuple[int, int]]
) -> Assignment:
    """The assignment of the new step's units and leaves."""
    serial, layer, virtual, forward, update, held = [], [], [], [], [], []
    for unit in program.operations:
        found = _TAG.match(unit.scope)
        assert found is not None, f"an operation without a name: {unit.scope}"
        number, piece = int(found[1]), -1 if found[2] is None else int(found[2])
        serial.append(UNPLANNED if found[3] else before.serial[number])
        forward.append(before.is_forward[number])
        update.append(before.is_update[number])
        held.append(before.is_held[number])
        layer.append(before.layer[number] if piece < 0 else -2 - piece)  # layers of a loop have no numbers of their own
        virtual.append(before.unit[number] if piece < 0 else piece)
    places = {leaf: i for i, leaf in enumerate(leaves)}
    state = {}
    for i, (place, piece) in enumerate(results):
        leaf = before.state.get(place)
        if leaf is not None:
            state[i] = places[leaf, piece]
    return replace(
        before,
        serial=serial,
        layer=layer,
        unit=virtual,
        is_forward=forward,
        is_update=update,
        is_held=held,
        argument=[before.argument[i] if k < 0 else before.stacked[i][k][0] % before.num_stages for i, k in leaves],
        paths=[before.paths[i] for i, _ in leaves],
        state=state,
        donated=frozenset(n for n, (i, _) in enumerate(leaves) if i in before.donated),
        spans={},
        stacked={},
        pieces=frozenset(n for n, (_, piece) in enumerate(leaves) if piece >= 0),
    )
