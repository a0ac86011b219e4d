"""Cuts a step into microbatches: the parts of a batch run one after the other, with the numbers of the whole.

The function is traced twice, with the whole batch and with a part of it, and both programs are walked side by side. The
rules say what becomes of the batch in each operation, as if an axis split it: a value is

* *split*: each part of the batch has its own part of the value, along a dim;
* *alike*: the same for all parts;
* partial (``sum``, ``max``, …): each part contributes, and the contributions combine;
* *whole*: known only when all parts have run.

What is split runs inside a loop over the parts, on the second program with the numbers (such as one over the batch
size) of the first; contributions are added up from part to part; and what reads their sums runs once, afterwards. So
gradients of a mean loss, metrics and a clipped update come out as they would for the whole batch. Where an operation on
examples needs what only the whole batch can tell (batch norm), the step cannot be cut; unless that is cheap to have
beforehand (how many tokens are no padding).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_leaves, tree_map

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.call import Call, call_abstractly
from meshwright.graph.flatten import signature_of
from meshwright.rules import LoopNest, loop_nest
from meshwright.rules.base import REDUCING

Status = int | str  # the dim that is split, or one of the words below, or how contributions combine
ALIKE, WHOLE = "alike", "whole"

# Operations that may be applied to contributions before they are added up, inside the body of a user's own loop.
_LINEAR = frozenset(
    "neg convert_element_type transpose reshape squeeze broadcast_in_dim reduce_sum copy slice mul div".split()  # noqa: SIM905
)
_ADDING = frozenset({"add", "add_any", "sub"})
_SUMMING = frozenset({"dot_general", "reduce_sum", "conv_general_dilated", "scatter-add", "ragged_dot_general"})
_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "max": jnp.max,
    "min": jnp.min,
    "prod": jnp.prod,
    "and": jnp.all,
    "or": jnp.any,
}
_LOOPS = ("scan", "while", "cond")


class CannotCut(Exception):
    """Why a step cannot be cut into microbatches without changing its numbers."""


def accumulated(
    function: Callable[..., Any], args: tuple[Any, ...], batch: Sequence[int], count: int
) -> Callable[..., Any]:
    """The function with its batch cut into parts that run one after the other.

    Args:
        function: A step.
        args: Arguments to trace it with: arrays or types.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        count: The number of parts.

    Returns:
        A function of like arguments and results.

    Raises:
        ShardingError: The batch does not divide into so many parts.
        CannotCut: The numbers would change.
    """
    size = _batch_size(args, batch, count)
    whole = call_abstractly(function, args)
    parts = [tree_map(lambda x: _part_type(x, count), arg) if i in batch else arg for i, arg in enumerate(args)]
    part = call_abstractly(function, tuple(parts))
    is_batch = [i in batch for i, arg in enumerate(args) for _ in tree_leaves(arg)]
    pairs = zip(is_batch, whole.arguments.positions, strict=True)
    examples = [given for given, position in pairs if position is not None]
    try:
        step = _Step(whole, part, examples, _Cut(count, size // count))
    except CannotCut:  # examples may be grouped in some way that parts of neighbours respect
        step = _Step(whole, part, examples, _Cut(count, 1))

    def cut(*args: Any) -> Any:
        pairs = zip(tree_leaves(args), whole.arguments.positions, strict=True)
        return whole.results.fill(step.run([leaf for leaf, position in pairs if position is not None]))

    return cut


def _batch_size(args: Sequence[Any], batch: Sequence[int], count: int) -> int:
    leaves = [x for i in batch if i < len(args) for x in tree_leaves(args[i]) if getattr(x, "shape", ())]
    sizes = sorted({x.shape[0] for x in leaves})
    if not sizes:
        raise ShardingError(
            f"there is no batch to cut into {count} microbatches: batch_argnums {tuple(batch)} hold no arrays"
        )
    if len(sizes) > 1:
        raise ShardingError(
            f"the batch has first dims of {' and '.join(map(str, sizes))}; all its leaves must be stacks of the same "
            "examples to be cut into microbatches (batch_argnums says which arguments are the batch)"
        )
    if sizes[0] % count:
        raise ShardingError(
            f"a batch of {sizes[0]} does not divide into {count} microbatches; give a batch of a multiple of {count}, "
            "or another number of microbatches"
        )
    return int(sizes[0])


def _part_type(leaf: Any, count: int) -> Any:
    if not getattr(leaf, "shape", ()):
        return leaf
    kind = jax_compat.abstract(leaf)
    return jax.ShapeDtypeStruct((kind.shape[0] // count, *kind.shape[1:]), kind.dtype)


@dataclass(frozen=True)
class _Cut:
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
class _Constant:
    """A literal or closed-over array, in both programs."""

    whole: Any
    part: Any


@dataclass(frozen=True)
class _Unit:
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
class _Program:
    """Two jaxprs side by side, calls inlined.

    Attributes:
        units: The operations.
        inputs: Numbers of the inputs.
        outputs: Numbers of the results, or constants.
        count: How many values there are.
    """

    units: list[_Unit] = field(default_factory=list)
    inputs: range = range(0)
    outputs: list[Any] = field(default_factory=list)
    count: int = 0

    @classmethod
    def of(cls, whole: Any, part: Any) -> "_Program":
        program = cls(inputs=range(len(whole.jaxpr.invars)), count=len(whole.jaxpr.invars))
        program.outputs = program._walk(whole, part, list(program.inputs), ())
        return program

    def ancestors(self, refs: Iterable[Any]) -> tuple[list[int], set[int]]:
        """The units that must run to have some values, in order; and all values on the way, inputs among them."""
        found, wanted = [], {ref for ref in refs if not isinstance(ref, _Constant)}
        for number in reversed(range(len(self.units))):
            unit = self.units[number]
            if not wanted.isdisjoint(unit.outs):
                found.append(number)
                wanted.update(ref for ref in unit.ins if not isinstance(ref, _Constant))
        return found[::-1], wanted

    def _walk(self, whole: Any, part: Any, inputs: Sequence[Any], stack: tuple[Any, ...]) -> list[Any]:
        if len(whole.jaxpr.eqns) != len(part.jaxpr.eqns):
            raise CannotCut("the function does something else for a smaller batch")
        env: dict[Any, Any] = dict(zip(whole.jaxpr.invars, inputs, strict=True))
        constants = zip(whole.jaxpr.constvars, whole.consts, part.consts, strict=True)
        env |= {v: _Constant(of_whole, of_part) for v, of_whole, of_part in constants}

        def read(v: Any, other: Any) -> Any:
            return _Constant(v.val, other.val) if isinstance(v, jax_compat.Literal) else env[v]

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
                self.units.append(_Unit(eqn, other, tuple(ins), tuple(made), stack))
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v, w) for v, w in zip(whole.jaxpr.outvars, part.jaxpr.outvars, strict=True)]


class _TooLate(Exception):
    """An operation on examples reads values that are not known before all parts have run."""

    def __init__(self, unit: _Unit, values: list[Any]):
        super().__init__(str(unit))
        self.unit = unit
        self.values = values


class _Analysis:
    """What becomes of the batch in every value of a program.

    Attributes:
        status: By value.
        zero: Values that are known to be zero: they may stand for a sum of contributions.
        outside: Units that make values sized by the batch out of nothing but what is alike: made for the whole batch.
        draws: By unit, the operands that are keys of bits drawn for examples: each part must draw its own.
    """

    def __init__(
        self,
        program: _Program,
        inputs: Sequence[Status],
        cut: "_Cut",
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
        if not isinstance(ref, _Constant):
            return self.status[ref]
        return (
            ALIKE if jnp.shape(ref.whole) == jnp.shape(ref.part) else self._split_dim(ref.whole, ref.part, "a constant")
        )

    def _unit(self, number: int, unit: _Unit) -> list[Status]:
        given = [self.of(ref) for ref in unit.ins]
        late = [i for i, s in enumerate(given) if s == WHOLE or s in REDUCING]
        split = any(isinstance(s, int) for s in given)
        if split and late:
            raise _TooLate(unit, [unit.ins[i] for i in late])
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
        if unit.name in _LOOPS:
            raise CannotCut(f"{unit}: while loops and branches over examples are not cut")
        inner = jax_compat.called_jaxpr(unit.whole)
        if inner is not None:
            return self._body(inner, jax_compat.called_jaxpr(unit.part), given, number)
        return self._operation(unit, given)

    def _operation(self, unit: _Unit, given: list[Status]) -> list[Status]:
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
            if status == "sum" and not self._sums(unit, given):
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

    def _sums(self, unit: _Unit, given: list[Status]) -> bool:
        """Whether the sum of what the parts give is the whole's: what is added to must be nothing."""
        if unit.name == "scatter-add":
            return self._known_zero(unit.ins[0])
        return unit.name in _SUMMING

    def _is_linear(self, unit: _Unit, given: list[Status]) -> bool:
        """Whether a unit of one result may run on contributions instead of their sum."""
        sums = [s == "sum" for s in given]
        if len(unit.outs) != 1 or any(s != "sum" and s != ALIKE for s in given):
            return False
        if unit.name in _ADDING:
            return all(s or self._known_zero(ref) for s, ref in zip(sums, unit.ins, strict=True))
        return unit.name in _LINEAR and sum(sums) == 1 and (unit.name != "div" or sums[0])

    def _known_zero(self, ref: Any) -> bool:
        if isinstance(ref, _Constant):
            return not jnp.any(jnp.asarray(ref.whole)) if jnp.ndim(ref.whole) == 0 else False
        return ref in self.zero

    def _is_zero(self, unit: _Unit) -> bool:
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

    def _join(self, before: Status, after: Status, zero: bool, unit: _Unit) -> Status:
        if before == after or after == ALIKE:
            return before
        if before == ALIKE and after == "sum" and zero:
            return after
        raise CannotCut(f"{unit} carries along what only the whole batch can tell")

    def _body(self, whole: Any, part: Any, given: list[Status], number: int, zero: Iterable[int] = ()) -> list[Status]:
        """The results of a jaxpr that is one unit."""
        unit, program = self.program.units[number], _Program.of(whole, part)
        try:
            inner = _Analysis(program, given, self.cut, zero=zero, top=False)
        except _TooLate as error:
            raise CannotCut(f"{error.unit} needs what only the whole batch can tell") from None
        made = [inner.of(ref) for ref in program.outputs]
        if WHOLE in made:
            raise CannotCut(f"{unit} computes with what only the whole batch can tell")
        if inner.draws:
            self.draws[number] = inner.keys_drawn_with(made, unit)
        return made

    def keys_drawn_with(self, made: list[Status], unit: _Unit) -> set[int]:
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

    def _shape_status(self, whole: Any, part: Any, unit: _Unit) -> Status:
        return ALIKE if whole.shape == part.shape else self._split_dim(whole, part, str(unit))

    def _split_dim(self, whole: Any, part: Any, what: str) -> int:
        sizes = list(zip(jnp.shape(whole), jnp.shape(part), strict=True))
        found = [d for d, (n, m) in enumerate(sizes) if n != m]
        if len(found) != 1 or sizes[found[0]][0] != self.cut.count * sizes[found[0]][1]:
            raise CannotCut(f"{what} pairs examples with each other, or is sized by the batch in its own way")
        return found[0]


def _major(nest: LoopNest, dim: tuple[int, ...]) -> int | None:
    return next((loop for loop in dim if nest.loops[loop].size > 1), None)


class _Step:
    """A step cut into parts: what runs before them, for each, and after."""

    def __init__(self, whole: Call, part: Call, examples: Sequence[bool], cut: _Cut):
        part_jaxpr = jax_compat.with_literals_of(part.jaxpr, whole.jaxpr)
        if part_jaxpr is None:
            raise CannotCut("the function does something else for a smaller batch")
        self.program = _Program.of(whole.jaxpr, part_jaxpr)
        self.cut = cut
        avals = whole.jaxpr.in_avals
        self.inputs: list[Status] = [
            0 if given and aval.shape else ALIKE for given, aval in zip(examples, avals, strict=True)
        ]
        self.early: set[int] = set()
        self.analysis = self._analyse()
        self._sort_units()

    def _analyse(self) -> _Analysis:
        """Repeated until no operation on examples waits for what can be had beforehand."""
        while True:
            try:
                return _Analysis(self.program, self.inputs, self.cut, early=self.early)
            except _TooLate as error:
                wanted = {ref for ref in error.values if not isinstance(ref, _Constant)}
                if not wanted - self.early or any(self._is_dear(n) for n in self.program.ancestors(wanted)[0]):
                    raise CannotCut(f"{error.unit} needs what only the whole batch can tell") from None
                self.early |= wanted

    def _is_dear(self, number: int) -> bool:
        unit = self.program.units[number]
        inner = unit.name in _LOOPS or jax_compat.called_jaxpr(unit.whole) is not None
        return inner or loop_nest(signature_of(unit.whole)).flops > 0

    def _sort_units(self) -> None:
        """Which units run before, for each part, and after; and what they hand on."""
        units, status = self.program.units, self.analysis.status
        outputs = [ref for ref in self.program.outputs if not isinstance(ref, _Constant)]
        self.after = [n for n in self.program.ancestors(outputs)[0] if WHOLE in (status[o] for o in units[n].outs)]
        read_after = {r for n in self.after for r in units[n].ins if not isinstance(r, _Constant)} | set(outputs)
        self.contributions = sorted(r for r in read_after if status[r] in REDUCING)
        self.stacked = sorted(r for r in set(outputs) if isinstance(status[r], int))
        needed, _ = self.program.ancestors([*self.contributions, *self.stacked])
        self.inside = [n for n in needed if n not in self.analysis.outside and self._runs_inside(units[n])]
        read_inside = {r for n in self.inside for r in units[n].ins if not isinstance(r, _Constant)}
        made_inside = {o for n in self.inside for o in units[n].outs} - self.early
        entering = {*read_inside, *self.contributions, *self.stacked} - made_inside
        self.sliced = sorted(r for r in entering if isinstance(status[r], int))
        whole = {r for r in read_inside | read_after if status[r] == ALIKE} | set(self.sliced)
        self.before, _ = self.program.ancestors(whole)

    def _runs_inside(self, unit: _Unit) -> bool:
        return any(self.analysis.status[o] != ALIKE for o in unit.outs if o not in self.early)

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        env: dict[int, Any] = dict(zip(self.program.inputs, leaves, strict=True))
        units = self.program.units
        for number in self.before:
            unit = units[number]
            env.update(zip(unit.outs, _bind(unit, unit.whole, [_whole(ref, env) for ref in unit.ins]), strict=True))
        sums, stacks = self._loop(env)
        later = dict(env) | sums | stacks
        for number in self.after:
            unit = units[number]
            later.update(zip(unit.outs, _bind(unit, unit.whole, [_whole(ref, later) for ref in unit.ins]), strict=True))
        return [_whole(ref, later) for ref in self.program.outputs]

    def _loop(self, env: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """Runs the parts; gives the combined contributions, and what is split put together again."""
        status, units = self.analysis.status, self.program.units
        sums = [v for v in self.contributions if status[v] == "sum"]
        others = [v for v in self.contributions if status[v] != "sum"]
        slices = [self.cut.parts(env[v], _dim(status[v])) for v in self.sliced]

        def part(index: Any, slices: Sequence[Any]) -> dict[int, Any]:
            here = dict(env) | dict(zip(self.sliced, slices, strict=True))
            for number in self.inside:
                unit = units[number]
                operands = [self._part(ref, here, index) for ref in unit.ins]
                for place in self.analysis.draws.get(number, ()):
                    operands[place] = _fold_in(operands[place], index)
                made = _bind(unit, unit.part, operands)
                here.update((o, x) for o, x in zip(unit.outs, made, strict=True) if o not in self.early)
            return here

        def step(totals: list[Any], x: tuple[Any, list[Any]]) -> tuple[list[Any], list[Any]]:
            here = part(*x)
            added = [total + here[v].astype(total.dtype) for total, v in zip(totals, sums, strict=True)]
            return added, [here[v] for v in (*others, *self.stacked)]

        indices = jnp.arange(self.cut.count)
        zeros = [jnp.zeros(t.shape, _wide(t.dtype)) for t in self._types(sums)]
        with jax.named_scope("microbatches"):
            totals, stacked = lax.scan(step, zeros, (indices, slices))
        pairs = zip(totals, self._types(sums), strict=True)
        combined = {v: total.astype(t.dtype) for v, (total, t) in zip(sums, pairs, strict=True)}
        combined |= {v: _COMBINE[str(status[v])](x, axis=0) for v, x in zip(others, stacked, strict=False)}
        joined = stacked[len(others) :]
        return combined, {v: self.cut.join(x, _dim(status[v])) for v, x in zip(self.stacked, joined, strict=True)}

    def _types(self, values: Sequence[int]) -> list[Any]:
        made = {o: v.aval for unit in self.program.units for o, v in zip(unit.outs, unit.whole.outvars, strict=True)}
        return [made[v] for v in values]

    def _part(self, ref: Any, env: dict[int, Any], index: Any) -> Any:
        if not isinstance(ref, _Constant):
            return env[ref]
        status = self.analysis.of(ref)
        return ref.whole if status == ALIKE else self.cut.parts(jnp.asarray(ref.whole), _dim(status))[index]


def _whole(ref: Any, env: dict[int, Any]) -> Any:
    return ref.whole if isinstance(ref, _Constant) else env[ref]


def _bind(unit: _Unit, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    return jax_compat.bind(eqn, operands, unit.stack)


def _dim(status: Status) -> int:
    assert isinstance(status, int)
    return status


def _wide(dtype: Any) -> Any:
    """The dtype in which contributions are added up: many small numbers are lost in half precision."""
    return jnp.float32 if dtype in (jnp.bfloat16, jnp.float16) else dtype


def _is_key(aval: Any) -> bool:
    """Whether a value holds random keys, as keys or as their words."""
    return jax_compat.is_key_dtype(aval.dtype) or (aval.dtype == jnp.uint32 and aval.shape[-1:] in ((2,), (4,)))


def _fold_in(keys: Any, index: Any) -> Any:
    """Keys of one part of the batch."""
    if jax_compat.is_key_dtype(keys.dtype):
        flat = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1))
        return flat.reshape(keys.shape)
    kind = {2: "threefry2x32", 4: "rbg"}[keys.shape[-1]]
    return jax.random.key_data(_fold_in(jax.random.wrap_key_data(keys, impl=kind), index))
