"""Splits loops over layers at the cuts between stages, and the arrays that are stacked over layers with them.

A scan over layers is one operation, and a stack of the layers' weights one array; a pipeline gives each stage some of
the layers. The step is evaluated once, with such a scan replaced by one for each stage, and with stacks in pieces. An
operation on a stack (a cast before the loop, the optimizer's after it) runs piece by piece where its rule allows that,
and otherwise on the pieces put together. The result is an ordinary jaxpr. Names of the operations' scopes tell which
operation of the step, and which piece of it, an equation is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut, Status, form_of, shrunk
from meshwright.runtime.microbatches.units import Unit, Units
from meshwright.runtime.stages.assignment import Assignment

_TAG = re.compile(r"^mw(\d+)(?:p(\d+))?(?:/|$)")
_WHOLE = "alike"  # the status of a value that is not in pieces


@dataclass(frozen=True)
class Pieces:
    """A value in pieces along a dim, one for each stage that has some of the layers."""

    dim: int
    arrays: tuple[Any, ...]


@dataclass(frozen=True)
class SplitStep:
    """A step whose loops over layers are split.

    Attributes:
        jaxpr: The step.
        assignment: Where its units and arguments belong.
        leaves: For each leaf of the step, the leaf of the user's arguments and the number of the piece; -1 for all of
            it.
        results: The same for its results.
        num_pieces: Into how many pieces stacks are split.
    """

    jaxpr: Any
    assignment: Assignment
    leaves: Sequence[tuple[int, int]]
    results: Sequence[tuple[int, int]]
    num_pieces: int = 1


def split_layers(closed: Any, assignment: Assignment) -> SplitStep:
    """A step with its loops over layers split; itself where no loop spans stages.

    Raises:
        ShardingError: The stages do not have equally many of the layers.
    """
    whole = [(i, -1) for i in range(len(closed.jaxpr.invars))]
    if not assignment.spans:
        return SplitStep(closed, assignment, whole, [(i, -1) for i in range(len(closed.jaxpr.outvars))])
    count = _num_pieces(assignment)
    program = Units.of(closed)
    splitting = _Splitting(program, assignment, count)
    leaves = [(i, k) for i, _ in whole for k in (range(count) if i in assignment.stacked else (-1,))]
    types = [_piece_type(program.types[i], count) if k >= 0 else program.types[i] for i, k in leaves]
    results: list[tuple[int, int]] = []

    def step(*arrays: Any) -> list[Any]:
        given: dict[int, Any] = {}
        for (leaf, piece), array in zip(leaves, arrays, strict=True):
            if piece < 0:
                given[leaf] = array
            else:
                before = given[leaf].arrays if piece else ()
                given[leaf] = Pieces(0, (*before, array))
        made, where = splitting.run(given)
        results[:] = where
        return made

    new = jax.make_jaxpr(step)(*(jax.ShapeDtypeStruct(t.shape, t.dtype, weak_type=t.weak_type) for t in types))
    return SplitStep(new, _renumbered(assignment, program, new, leaves, results, count), leaves, results, count)


def _num_pieces(assignment: Assignment) -> int:
    """The number of stages that share the loops, each of which must have equally many layers."""
    for parts in (*assignment.spans.values(), *assignment.stacked.values()):
        sizes = [end - begin for _, begin, end in parts]
        stages = [virtual for virtual, _, _ in parts]
        if len(set(sizes)) > 1 or stages != list(range(len(stages))) or len(stages) != assignment.num_stages:
            held = " and ".join(map(str, sizes))
            raise ShardingError(
                f"the step loops over its layers, of which the stages have {held}: arrays that are stacked over layers "
                "are split evenly, one part for each stage and without interleaving; choose such stages with "
                "mw.ThreeD(…), or unroll the loop"
            )
    return assignment.num_stages


def _piece_type(aval: Any, count: int) -> Any:
    return aval.update(shape=Cut(count, 1).shape(aval.shape, 0))


class _Splitting:
    """Evaluates a step with some arguments in pieces."""

    def __init__(self, program: Units, assignment: Assignment, count: int):
        self.program, self.assignment, self.cut = program, assignment, Cut(count, 1)

    def run(self, given: dict[int, Any]) -> tuple[list[Any], list[tuple[int, int]]]:
        """The results, and for each the number of the result of the whole step and of its piece."""
        env: dict[int, Any] = {**self.program.constants, **given}
        for number, unit in enumerate(self.program.units):
            made = self._unit(number, unit, [env[v] for v in unit.ins])
            env.update(zip(unit.outs, made, strict=True))
        found: list[Any] = []
        where: list[tuple[int, int]] = []
        for place, value in enumerate(self.program.outputs):
            leaf, made = self.assignment.state.get(place), env[value]
            if leaf in self.assignment.stacked:
                found += self._pieces(made, len(self.program.units) - 1).arrays
                where += [(place, k) for k in range(self.cut.count)]
            else:
                with jax.named_scope(f"mw{len(self.program.units) - 1}"):
                    found.append(self._whole(made))
                where.append((place, -1))
        return found, where

    def _unit(self, number: int, unit: Unit, ins: list[Any]) -> Sequence[Any]:
        if number in self.assignment.spans and unit.name == "scan":
            return self._scan(number, unit, ins)
        if any(isinstance(x, Pieces) for x in ins):
            made = self._piecewise(number, unit, ins)
            if made is not None:
                return made
        with jax.named_scope(f"mw{number}"):
            return jax_compat.bind(unit.eqn, [self._whole(x) for x in ins], unit.stack)

    def _piecewise(self, number: int, unit: Unit, ins: list[Any]) -> list[Any] | None:
        """The results of an operation piece by piece; None where its rule does not allow that."""
        given: list[Status] = [x.dim if isinstance(x, Pieces) else _WHOLE for x in ins]
        try:
            form = form_of(unit, given, self.cut, False)
        except CannotCut:
            return None
        if any(not isinstance(s, int) and s != "sum" for s in form.results):
            return None
        eqn = unit.eqn.replace(params=shrunk(unit, form, self.cut))
        made: list[list[Any]] = []
        for k in range(self.cut.count):
            with jax.named_scope(f"mw{number}p{k}"):
                operands = [self._piece(x, dim, k) for x, dim in zip(ins, form.operands, strict=True)]
                made.append(jax_compat.bind(eqn, operands, unit.stack))
        found: list[Any] = []
        for status, arrays in zip(form.results, zip(*made, strict=True), strict=True):
            if isinstance(status, int):
                found.append(Pieces(status, tuple(arrays)))
                continue
            with jax.named_scope(f"mw{number}"):
                total = arrays[0]
                for array in arrays[1:]:
                    total = total + array
            found.append(total)
        return found

    def _piece(self, x: Any, dim: int | None, k: int) -> Any:
        if isinstance(x, Pieces):
            return x.arrays[k]
        return x if dim is None else self._rows(x, dim, k)

    def _rows(self, x: Any, dim: int, k: int) -> Any:
        size = jnp.shape(x)[dim] // self.cut.count
        return lax.slice_in_dim(jnp.asarray(x), k * size, (k + 1) * size, axis=dim)

    def _pieces(self, x: Any, number: int) -> Pieces:
        """A value in pieces along its first dim, for a unit."""
        if isinstance(x, Pieces) and x.dim == 0:
            return x
        with jax.named_scope(f"mw{number}"):
            whole, found = self._whole(x), []
        for k in range(self.cut.count):
            with jax.named_scope(f"mw{number}p{k}"):
                found.append(self._rows(whole, 0, k))
        return Pieces(0, tuple(found))

    def _whole(self, x: Any) -> Any:
        return jnp.concatenate(x.arrays, x.dim) if isinstance(x, Pieces) else x

    def _scan(self, number: int, unit: Unit, ins: list[Any]) -> list[Any]:
        """A scan for each stage: the carry goes from one to the next, what is stacked stays in pieces."""
        params = unit.eqn.params
        num_consts, num_carry = jax_compat.scan_counts(unit.eqn)
        first = num_consts + num_carry
        with jax.named_scope(f"mw{number}"):
            consts, carry = ([self._whole(x) for x in some] for some in (ins[:num_consts], ins[num_consts:first]))
        stacks = [self._pieces(x, number) for x in ins[first:]]
        eqn = unit.eqn.replace(params=jax_compat.scan_length(unit.eqn, params["length"] // self.cut.count))
        made: dict[int, list[Any]] = {}
        for k in reversed(range(self.cut.count)) if params["reverse"] else range(self.cut.count):
            with jax.named_scope(f"mw{number}p{k}"):
                outs = jax_compat.bind(eqn, [*consts, *carry, *(s.arrays[k] for s in stacks)], unit.stack)
            carry, made[k] = outs[:num_carry], outs[num_carry:]
        stacked = zip(*(made[k] for k in range(self.cut.count)), strict=True)
        return [*carry, *(Pieces(0, tuple(arrays)) for arrays in stacked)]


def _renumbered(
    before: Assignment,
    program: Units,
    closed: Any,
    leaves: Sequence[tuple[int, int]],
    results: Sequence[tuple[int, int]],
    count: int,
) -> Assignment:
    """The assignment of the new step's units and leaves."""
    serial, layer, virtual, forward, update, held = [], [], [], [], [], []
    for unit in Units.of(closed).units:
        names = "/".join(filter(None, map(str, (*unit.stack, jax_compat.name_stack(unit.eqn)))))
        found = _TAG.match(names)
        assert found is not None, f"an operation without a name: {names}"
        number, piece = int(found[1]), -1 if found[2] is None else int(found[2])
        serial.append(before.serial[number])
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
        argument=[before.argument[i] if k < 0 else k for i, k in leaves],
        paths=[before.paths[i] for i, _ in leaves],
        state=state,
        donated=frozenset(n for n, (i, _) in enumerate(leaves) if i in before.donated),
        spans={},
        stacked={},
    )
