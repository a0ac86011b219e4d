"""A traced program as a flat list of operations on numbered values, for the analysis of microbatches."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright import jax_compat


@dataclass(frozen=True)
class Unit:
    """One operation; a checkpoint or loop counts as one.

    Attributes:
        eqn: Its equation.
        ins: Numbers of the values read.
        outs: Numbers of the values computed.
        stack: The name stacks of the calls around it.
        source: Where the user wrote it, or the call around it; empty where JAX does not know.
    """

    eqn: Any
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    stack: tuple[Any, ...]
    source: str = ""

    @property
    def name(self) -> str:
        return str(self.eqn.primitive.name)

    def trimmed(self, used: Sequence[bool]) -> "Unit":
        """What computes some of its results; of a loop, what leads to them."""
        reads, eqn = jax_compat.trimmed(self.eqn, used)
        if eqn is self.eqn:
            return self
        numbers = {id(var): v for var, v in zip(self.eqn.outvars, self.outs, strict=True)}
        ins = tuple(v for v, is_read in zip(self.ins, reads, strict=True) if is_read)
        return replace(self, eqn=eqn, ins=ins, outs=tuple(numbers[id(var)] for var in eqn.outvars))

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


@dataclass
class Units:
    """A closed jaxpr, calls inlined.

    Attributes:
        units: The operations.
        inputs: Numbers of the inputs.
        outputs: Numbers of the results.
        constants: Literals and closed-over arrays by number.
        types: The type of each value.
    """

    units: list[Unit] = field(default_factory=list)
    inputs: range = range(0)
    outputs: list[int] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    types: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, closed: Any) -> "Units":
        program = cls(inputs=range(len(closed.jaxpr.invars)), types=[v.aval for v in closed.jaxpr.invars])
        program.outputs = program._walk(closed, list(program.inputs), ())
        return program

    @property
    def calling_back(self) -> list["Unit"]:
        """The units that have effects: they print, or call the user's functions."""
        return [unit for unit in self.units if unit.eqn.effects]

    def ancestors(self, values: Iterable[int]) -> list[int]:
        """The units that must run to compute some values, in order."""
        found, wanted = [], set(values)
        for number in reversed(range(len(self.units))):
            unit = self.units[number]
            if not wanted.isdisjoint(unit.outs):
                found.append(number)
                wanted.update(unit.ins)
        return found[::-1]

    def needed(self, values: Iterable[int]) -> list[Unit]:
        """What must run to compute some values, in order; of a loop, what leads to the results that are needed."""
        found, wanted = [], set(values)
        for number in reversed(self.ancestors(wanted)):
            unit = self.units[number]
            used = [v in wanted for v in unit.outs]
            if any(used):
                unit = unit.trimmed(used)
                found.append(unit)
                wanted.update(unit.ins)
        return found[::-1]

    @property
    def live(self) -> set[int]:
        """The units that have effects or on which results depend."""
        effects = [n for n, unit in enumerate(self.units) if unit.eqn.effects]
        return {*effects, *self.ancestors([*self.outputs, *(v for n in effects for v in self.units[n].ins)])}

    def leading_to(self, numbers: Iterable[int]) -> set[int]:
        """Some units, and all on which they depend."""
        found = set(numbers)
        return found | set(self.ancestors(v for n in found for v in self.units[n].ins))

    def depending_on(self, number: int) -> set[int]:
        """A unit, and all that depend on it."""
        found, made = {number}, set(self.units[number].outs)
        for n, unit in enumerate(self.units):
            if not made.isdisjoint(unit.ins):
                found.add(n)
                made.update(unit.outs)
        return found

    def _walk(self, closed: Any, inputs: Sequence[int], stack: tuple[Any, ...], source: str = "") -> list[int]:
        env: dict[Any, int] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            env[v] = self.constant(value, v.aval)

        def read(v: Any) -> int:
            return self.constant(v.val, v.aval) if isinstance(v, jax_compat.Literal) else env[v]

        for eqn in closed.jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            inner = jax_compat.called_jaxpr(eqn)
            here = jax_compat.source_line(eqn) or source  # functions of JAX itself are only known by their caller
            if inner is not None and eqn.primitive.name not in jax_compat.CHECKPOINTS:
                around = (*stack, jax_compat.name_stack(eqn))
                made = self._walk(inner, list(jax_compat.call_operands(eqn, ins)), around, here)
            else:
                made = [self.number(v.aval) for v in eqn.outvars]
                self.units.append(Unit(eqn, tuple(ins), tuple(made), stack, here))
            env.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in closed.jaxpr.outvars]

    def number(self, aval: Any) -> int:
        """The number of a new value."""
        self.types.append(aval)
        return len(self.types) - 1

    def constant(self, value: Any, aval: Any = None) -> int:
        """The number of a new constant; its type is that of the value unless it is given."""
        aval = jax_compat.abstract(value) if aval is None else aval
        number = self.number(aval)
        self.constants[number] = value
        return number
