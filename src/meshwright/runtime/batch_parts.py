"""What becomes of a batch in a program when it is cut into parts: the rules say so, as if an axis split it.

The programs for the whole batch and for a part of it are walked side by side. A value is

* *split*: each part of the batch has its own part of the value, along a dim;
* *alike*: the same for all parts;
* partial (``sum``, ``max``, …): each part contributes, and the contributions combine;
* *whole*: known only when all parts have run.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from meshwright import jax_compat
from meshwright.graph.flatten import signature_of
from meshwright.rules import LoopNest, loop_nest
from meshwright.rules.base import REDUCING

Status = int | str  # the dim that is split, or one of the words below, or how contributions combine
ALIKE, WHOLE = "alike", "whole"
LOOPS = ("scan", "while", "cond")

# Operations that may be applied to contributions before they are added up, inside the body of a user's own loop.
_LINEAR = frozenset(
    "neg convert_element_type transpose reshape squeeze broadcast_in_dim reduce_sum copy slice mul div".split()  # noqa: SIM905
)
_ADDING = frozenset({"add", "add_any", "sub"})
_SUMMING = frozenset({"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add", "ragged_dot_general"})


class CannotCut(Exception):
    """Why a step cannot be cut into microbatches without changing its numbers."""


@dataclass(frozen=True)
class Cut:
    """How a dim that begins with the examples is cut into parts: as ``(before, count, after)``, by the middle.

    With as many before as a part has examples, neighbours go to different parts: a batch that is split over devices
    then stays where it is. With 1, neighbours stay together.
    """

    count: int
    before: int

    @property
    def whole(self) -> int:
        """What must stay together for the parts to be the same ones: a loop of a multiple of this can be cut."""
        return self.count * self.before

    def parts(self, x: Any, dim: int) -> Any:
        """The parts of a value, stacked."""
        shape = x.shape
        rows = x.reshape(*shape[:dim], self.before, self.count, shape[dim] // self.whole, *shape[dim + 1 :])
        return jnp.moveaxis(rows, dim + 1, 0).reshape(self.count, *shape[:dim], -1, *shape[dim + 1 :])

    def join(self, x: Any, dim: int) -> Any:
        """Puts stacked parts together again."""
        shape = x.shape[1:]
        rows = x.reshape(self.count, *shape[:dim], self.before, -1, *shape[dim + 1 :])
        return jnp.moveaxis(rows, 0, dim + 1).reshape(*shape[:dim], -1, *shape[dim + 1 :])


@dataclass(frozen=True)
class Constant:
    """A literal or closed-over array, in both programs."""

    whole: Any
    part: Any


@dataclass(frozen=True)
class Unit:
    """One operation of both programs; a checkpoint or loop counts as one.

    Attributes:
        whole: The equation of the program for the whole batch.
        part: That of the program for a part of it.
        ins: Numbers of the values read, or constants.
        outs: Numbers of the values made.
        stack: The name stack around the equations.
    """

    whole: Any
    part: Any
    ins: tuple[Any, ...]
    outs: tuple[int, ...]
    stack: tuple[Any, ...]

    @property
    def name(self) -> str:
        return str(self.whole.primitive.name)

    def __str__(self) -> str:
        where = jax_compat.source_line(self.whole)
        return f"{self.name} at {where}" if where else self.name


@dataclass
class SideBySide:
    """Two jaxprs side by side, calls inlined.

    Attributes:
        units: The operations.
        inputs: Numbers of the inputs.
        outputs: Numbers of the results, or constants.
        count: How many values there are.
    """

    units: list[Unit] = field(default_factory=list)
    inputs: range = range(0)
    outputs: list[Any] = field(default_factory=list)
    count: int = 0

    @classmethod
    def of(cls, whole: Any, part: Any) -> "SideBySide":
        program = cls(inputs=range(len(whole.jaxpr.invars)), count=len(whole.jaxpr.invars))
        program.outputs = program._walk(whole, part, list(program.inputs), ())
        return program

    def ancestors(self, refs: Iterable[Any]) -> tuple[list[int], set[int]]:
        """The units that must run to have some values, in order; and all values on the way, inputs among them."""
        found, wanted = [], {ref for ref in refs if not isinstance(ref, Constant)}
        for number in reversed(range(len(self.units))):
            unit = self.units[number]
            if not wanted.isdisjoint(unit.outs):
                found.append(number)
                wanted.update(ref for ref in unit.ins if not isinstance(ref, Constant))
        return found[::-1], wanted

    def _walk(self, whole: Any, part: Any, inputs: Sequence[Any], stack: tuple[Any, ...]) -> list[Any]:
        if len(whole.jaxpr.eqns) != len(part.jaxpr.eqns):
            raise CannotCut("the function does something else for a smaller batch")
        env: dict[Any, Any] = dict(zip(whole.jaxpr.invars, inputs, strict=True))
        constants = zip(whole.jaxpr.constvars, whole.consts, part.consts, strict=True)
        env |= {v: Constant(of_whole, of_part) for v, of_whole, of_part in constants}

        def read(v: Any, other: Any) -> Any:
            return Constant(v.val, other.val) if isinstance(v, jax_compat.Literal) else env[v]

        for eqn, other in zip(whole.jaxpr.eqns, part.jaxpr.eqns, strict=True):
            if eqn.primitive.name != other.primitive.name or len(eqn.invars) != len(other.invars):
                raise CannotCut("the function does something else for a smaller batch")
            ins = [read(v, w) for v, w in zip(eqn.invars, other.invars, strict=True)]
            inner = jax_compat.called_jaxpr(eqn)
            if inner is not None and eqn.primitive.name not in jax_compat.CHECKPOINTS:
                around = (*stack, jax_compat.name_stack(eqn))
                operands = list(jax_compat.call_operands(eqn, ins))
                made = self._walk(inner, jax_compat.called_jaxpr(other), operands, around)
            else:
                made = list(range(self.count, self.count + len(eqn.outvars)))
                self.count += len(made)
                self.units.append(Unit(eqn, other, tuple(ins), tuple(made), stack))
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v, w) for v, w in zip(whole.jaxpr.outvars, part.jaxpr.outvars, strict=True)]


class TooLate(Exception):
    """An operation on examples reads values that are not known before all parts have run."""

    def __init__(self, unit: Unit, values: list[Any]):
        super().__init__(str(unit))
        self.unit = unit
        self.values = values


class Analysis:
    """What becomes of the batch in every value of a program.

    Attributes:
        status: By value.
        zero: Values that are known to be zero: they may stand for a sum of contributions.
        outside: Units that make values sized by the batch out of nothing but what is alike: made for the whole batch.
        draws: By unit, the operands that are keys of bits drawn for examples: each part must draw its own.
    """

    def __init__(
        self,
        program: SideBySide,
        inputs: Sequence[Status],
        cut: Cut,
        *,
        early: Iterable[int] = (),
        zero: Iterable[int] = (),
        top: bool = True,
    ):
        self.program = program
        self.cut = cut
        self.top = top
        self.early = frozenset(early)
        self.status: dict[int, Status] = dict(zip(program.inputs, inputs, strict=True))
        self.zero = set(zero)
        self.outside: set[int] = set()
        self.draws: dict[int, set[int]] = {}
        for number, unit in enumerate(program.units):
            sides = unit.whole.outvars, unit.part.outvars
            for out, status, v, w in zip(unit.outs, self._unit(number, unit), *sides, strict=True):
                self.status[out] = self._shape_status(v.aval, w.aval, unit) if out in self.early else status
            if self._is_zero(unit):
                self.zero.update(unit.outs)

    def of(self, ref: Any) -> Status:
        if not isinstance(ref, Constant):
            return self.status[ref]
        return (
            ALIKE if jnp.shape(ref.whole) == jnp.shape(ref.part) else self._split_dim(ref.whole, ref.part, "a constant")
        )

    def _unit(self, number: int, unit: Unit) -> list[Status]:
        given = [self.of(ref) for ref in unit.ins]
        late = [i for i, s in enumerate(given) if s == WHOLE or s in REDUCING]
        split = any(isinstance(s, int) for s in given)
        if split and late:
            raise TooLate(unit, [unit.ins[i] for i in late])
        if late:
            if not self.top and self._is_linear(unit, given):
                return ["sum"]
            return [WHOLE] * len(unit.outs)
        if not split:
            made = [
                self._shape_status(v.aval, w.aval, unit)
                for v, w in zip(unit.whole.outvars, unit.part.outvars, strict=True)
            ]
            if any(isinstance(s, int) for s in made) and unit.name not in ("broadcast_in_dim", "random_bits"):
                if not self.top:
                    raise CannotCut(f"{unit} makes values of the batch's size inside a loop")
                self.outside.add(number)
            elif unit.name == "random_bits" and made != [ALIKE]:
                self.draws[number] = {0}
            return made
        if unit.name == "scan":
            return self._scan(number, given)
        if unit.name in LOOPS:
            raise CannotCut(f"{unit}: while loops and branches over examples are not cut")
        inner = jax_compat.called_jaxpr(unit.whole)
        if inner is not None:
            return self._body(inner, jax_compat.called_jaxpr(unit.part), given, number)
        return self._operation(unit, given)

    def _operation(self, unit: Unit, given: list[Status]) -> list[Status]:
        """An operation on examples: one loop of its nest runs over the batch."""
        nest = loop_nest(signature_of(unit.whole))
        loops = {_major(nest, nest.operands[i][s]) for i, s in enumerate(given) if isinstance(s, int)}
        loop = loops.pop()
        if loops or loop is None or not self._can_split(nest, loop):
            raise CannotCut(f"{unit} mixes examples")
        kind = nest.loops[loop].kind
        made: list[Status] = []
        for dims, v, w in zip(nest.results, unit.whole.outvars, unit.part.outvars, strict=True):
            held = [d for d, dim in enumerate(dims) if loop in dim]
            status: Status = held[0] if held else kind
            if status == "sum" and not self._sums(unit):
                raise CannotCut(f"{unit} adds examples to something else")
            if status != (expected := self._shape_status(v.aval, w.aval, unit)) and (held or expected != ALIKE):
                raise CannotCut(f"{unit} mixes examples")
            made.append(status)
        return made

    def _can_split(self, nest: LoopNest, loop: int) -> bool:
        if nest.loops[loop].kind == "unsplittable" or nest.loops[loop].halo or nest.loops[loop].size % self.cut.whole:
            return False
        held = [dim for dims in (*nest.operands, *nest.results) for dim in dims if loop in dim]
        return all(_major(nest, dim) == loop for dim in held)

    def _sums(self, unit: Unit) -> bool:
        """Whether the sum of what the parts give is the whole's: what is added to must be nothing."""
        if unit.name == "scatter-add":
            return self._known_zero(unit.ins[0])
        return unit.name in _SUMMING

    def _is_linear(self, unit: Unit, given: list[Status]) -> bool:
        """Whether a unit of one result may run on contributions instead of their sum."""
        sums = [s == "sum" for s in given]
        if len(unit.outs) != 1 or any(s != "sum" and s != ALIKE for s in given):
            return False
        if unit.name in _ADDING:
            return all(s or self._known_zero(ref) for s, ref in zip(sums, unit.ins, strict=True))
        return unit.name in _LINEAR and sum(sums) == 1 and (unit.name != "div" or sums[0])

    def _known_zero(self, ref: Any) -> bool:
        if isinstance(ref, Constant):
            return not jnp.any(jnp.asarray(ref.whole)) if jnp.ndim(ref.whole) == 0 else False
        return ref in self.zero

    def _is_zero(self, unit: Unit) -> bool:
        passes = unit.name in ("broadcast_in_dim", "convert_element_type", "reshape", "copy")
        return passes and all(self._known_zero(ref) for ref in unit.ins)

    def _scan(self, number: int, given: list[Status]) -> list[Status]:
        unit = self.program.units[number]
        num_consts, num_carry = jax_compat.scan_counts(unit.whole)
        inner, other = (jax_compat.close(eqn.params["jaxpr"]) for eqn in (unit.whole, unit.part))
        consts, carry = given[:num_consts], given[num_consts : num_consts + num_carry]
        xs: list[Status] = []
        for s in given[num_consts + num_carry :]:
            if s == 0:
                raise CannotCut(f"{unit} runs over the examples")
            xs.append(s - 1 if isinstance(s, int) else s)
        zero = {i for i, ref in enumerate(unit.ins[num_consts : num_consts + num_carry]) if self._known_zero(ref)}
        while True:
            made = self._body(inner, other, [*consts, *carry, *xs], number, {num_consts + i for i in zero})
            joined = [self._join(*pair, i in zero, unit) for i, pair in enumerate(zip(carry, made, strict=False))]
            stays = {i for i in zero if joined[i] == "sum"}
            if joined == carry and stays == zero:
                return [*carry, *(s + 1 if isinstance(s, int) else s for s in made[num_carry:])]
            carry, zero = joined, stays

    def _join(self, before: Status, after: Status, zero: bool, unit: Unit) -> Status:
        if before == after or after == ALIKE:
            return before
        if before == ALIKE and after == "sum" and zero:
            return after
        raise CannotCut(f"{unit} carries along what only the whole batch can tell")

    def _body(self, whole: Any, part: Any, given: list[Status], number: int, zero: Iterable[int] = ()) -> list[Status]:
        """The results of a jaxpr that is one unit."""
        unit, program = self.program.units[number], SideBySide.of(whole, part)
        try:
            inner = Analysis(program, given, self.cut, zero=zero, top=False)
        except TooLate as error:
            raise CannotCut(f"{error.unit} needs what only the whole batch can tell") from None
        made = [inner.of(ref) for ref in program.outputs]
        if WHOLE in made:
            raise CannotCut(f"{unit} computes with what only the whole batch can tell")
        if inner.draws:
            self.draws[number] = inner.keys_drawn_with(made, unit)
        return made

    def keys_drawn_with(self, made: list[Status], unit: Unit) -> set[int]:
        """The inputs from which keys of examples' bits come; nothing that is alike for all parts may come from them."""
        program = self.program
        _, origins = program.ancestors(program.units[n].ins[i] for n, places in self.draws.items() for i in places)
        keys = {i for i in program.inputs if i in origins and _is_key(unit.whole.invars[i].aval)}
        alike = [ref for ref, status in zip(program.outputs, made, strict=True) if status == ALIKE]
        others = [u.ins[0] for n, u in enumerate(program.units) if u.name == "random_bits" and n not in self.draws]
        _, elsewhere = program.ancestors([*alike, *others])
        if not keys or keys & elsewhere:
            raise CannotCut(f"{unit} draws random bits for examples from a key that has other uses, too")
        return keys

    def _shape_status(self, whole: Any, part: Any, unit: Unit) -> Status:
        return ALIKE if whole.shape == part.shape else self._split_dim(whole, part, str(unit))

    def _split_dim(self, whole: Any, part: Any, what: str) -> int:
        sizes = list(zip(jnp.shape(whole), jnp.shape(part), strict=True))
        found = [d for d, (n, m) in enumerate(sizes) if n != m]
        if len(found) != 1 or sizes[found[0]][0] != self.cut.count * sizes[found[0]][1]:
            raise CannotCut(f"{what} pairs examples with each other, or is sized by the batch in its own way")
        return found[0]


def _major(nest: LoopNest, dim: tuple[int, ...]) -> int | None:
    return next((loop for loop in dim if nest.loops[loop].size > 1), None)


def _is_key(aval: Any) -> bool:
    """Whether a value holds random keys, as keys or as their words."""
    return jax_compat.is_key_dtype(aval.dtype) or (aval.dtype == jnp.uint32 and aval.shape[-1:] in ((2,), (4,)))
