"""Flattens a program: regions in line, loop bodies once with tied carries, every value a number of the whole."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from meshwright import jax_compat
from meshwright.graph.graph import Tie, While
from meshwright.graph.tracing.trips import trips_of
from meshwright.program.program import COND, SCAN, WHILE, Operation, Program
from meshwright.rules.base import Signature, TensorType
from meshwright.rules.families.kernel_work import Table
from meshwright.rules.families.pallas import tables_of

_LARGEST_TABLE = 2**18  # elements of a constant whose contents are kept for the kernels that look them up


class Names:
    """The types, signatures and scopes that all parts of one program share, each with a number."""

    def __init__(self) -> None:
        self.kinds: list[TensorType] = []
        self.signatures: list[Signature] = []
        self.scopes: list[str] = [""]
        self.known: dict[Any, tuple[int, list[int]]] = {}  # signatures of equations, and the types of their results
        self.met: dict[int, tuple[int, list[int], Any]] = {}  # the same by identity: functions are called repeatedly
        self._kinds: dict[TensorType, int] = {}
        self._signatures: dict[Any, int] = {}
        self._scopes: dict[str, int] = {"": 0}
        # JAX shares equal types: most are found by identity. They are kept alive so that no identity is reused.
        self._avals: dict[int, tuple[int, Any]] = {}

    def kind(self, aval: Any) -> int:
        """The number of an abstract value's type."""
        found = self._avals.get(id(aval))
        if found is None:
            found = self._avals[id(aval)] = (self.number(_type(aval)), aval)
        return found[0]

    def number(self, kind: TensorType) -> int:
        """The number of a type."""
        return _intern(kind, self._kinds, self.kinds)

    def signature(self, name: str, params: dict[str, Any], ins: Sequence[int], outs: Sequence[int]) -> int:
        """The number of a signature, given the numbers of its types; equal operations share one."""
        key = (name, _hashable(params), tuple(ins), tuple(outs))
        found = self._signatures.setdefault(key, len(self.signatures))
        if found == len(self.signatures):
            operands, results = (tuple([self.kinds[k] for k in numbers]) for numbers in (ins, outs))
            self.signatures.append(Signature(name, params, operands, results))
        return found

    def equation(self, eqn: Any, ins: Sequence[int]) -> tuple[int, list[int]]:
        """The numbers of an equation's signature and of its results' types."""
        name, params, avals = eqn.primitive.name, eqn.params, [v.aval for v in eqn.outvars]
        key = (name, *params.items(), *ins, *map(id, avals))
        try:
            met = self.known.get(key)
        except TypeError:  # a parameter that cannot be hashed, such as those of custom derivatives
            outs = [self.kind(aval) for aval in avals]
            return self.signature(name, params, ins, outs), outs
        if met is None:
            outs = [self.kind(aval) for aval in avals]
            met = self.known[key] = (self.signature(name, params, ins, outs), outs)
        return met

    def scope(self, text: str) -> int:
        """The number of a scope."""
        return _intern(text, self._scopes, self.scopes)


def _hashable(params: dict[str, Any]) -> tuple[Any, ...] | int:
    """Parameters as a key; if one cannot be hashed, their identity."""
    found = tuple(params.items())
    try:
        hash(found)
    except TypeError:
        return id(params)
    return found


def _intern(item: Any, numbers: dict[Any, int], items: list[Any]) -> int:
    found = numbers.get(item)
    if found is None:
        found = numbers[item] = len(items)
        items.append(item)
    return found


def _table(constant: Any) -> Table | None:
    """The contents of a constant that a kernel may look up: a small array of integers."""
    shape, kind = getattr(constant, "shape", ()), getattr(getattr(constant, "dtype", None), "kind", "")
    if not shape or kind not in ("i", "u") or prod(shape) > _LARGEST_TABLE:
        return None
    return Table.of(np.asarray(constant)) if getattr(constant, "is_fully_addressable", True) else None


def signature_of(eqn: Any) -> Signature:
    """The part of an equation that rules may use."""
    operands, results = (tuple(_type(v.aval) for v in side) for side in (eqn.invars, eqn.outvars))
    return Signature(eqn.primitive.name, eqn.params, operands, results)


def _type(aval: Any) -> TensorType:
    dtype = getattr(aval, "dtype", None)
    if dtype is None:  # tokens and the like hold no data
        return TensorType((), "token", 0)
    return _of(aval.shape, dtype, jax_compat.is_on_host(aval))


@lru_cache(maxsize=2**14)
def _of(shape: tuple[Any, ...], dtype: Any, on_host: bool) -> TensorType:
    """A type, which thousands of values share: the name of a dtype takes NumPy a while."""
    return TensorType(tuple(int(d) for d in shape), str(dtype), jax_compat.itemsize(dtype), on_host)


class Flat:
    """A program as flat lists, one entry an operation; values made later have higher numbers.

    Attributes:
        kind: For each value the number of its type in `names`; inputs come first.
        num_inputs: How many inputs there are.
        outputs: The values of the results.
        signature: Number of each operation's signature.
        reads: The values that operations read, one operation after another.
        first_made: The first value that each operation makes; the others follow it.
        scope: Number of each operation's scope.
        trips, id, equation: As in `Op`.
        constants: By type, the value that represents all constants, since their contents do not matter to a plan; by
            type and contents, those that may be tables of kernels.
        ties: Loop carries.
        loops: Ranges of operations that repeat.
        whiles: Those of them that are `while` loops.
        branches: Ranges of operations that are alternatives, of which one runs.
        donated: Inputs that a call donates.
    """

    def __init__(
        self,
        program: Program,
        names: Names,
        given: Mapping[int, Any] | None = None,
        seen: Mapping[int, float] | None = None,
    ):
        self.names = names
        shapes = [getattr(program.types[v], "shape", ()) for v in program.inputs]
        self._given = {v: array for v, array in (given or {}).items() if array.shape == shapes[v]}
        self._seen, self._whole = seen or {}, program
        self.kind: list[int] = [names.kind(program.types[v]) for v in program.inputs]
        self.num_inputs = len(self.kind)
        self.signature: list[int] = []
        self.reads: list[int] = []
        self.first_made: list[int] = []
        self.scope: list[int] = []
        self.trips: list[float] = []
        self.id: list[int] = []
        self.equation: list[Any] = []
        self.constants: dict[int | tuple[int, Table], int] = {}
        self.ties: list[Tie] = []
        self.loops: list[tuple[int, int]] = []
        self.whiles: list[While] = []
        self.branches: list[tuple[int, int]] = []
        self.donated = program.donated
        self.outputs = self._region(program, range(self.num_inputs), 1.0)

    def _region(self, region: Program, arguments: Sequence[int], trips: float) -> list[int]:
        """Adds the operations of a region, and returns the values of its results."""
        kind, met, numbers = self.kind, self.names.met, [-1] * len(region.types)
        numbers[: len(arguments)] = arguments
        last_scope, where = None, 0
        for operation in region.operations:  # plain code, as a deep model has tens of thousands
            eqn, inputs = operation.equation, []
            for value in operation.inputs:
                number = numbers[value]
                if number < 0:
                    number = numbers[value] = self._constant(region, value)
                inputs.append(number)
            if operation.scope is not last_scope:  # neighbours share a scope
                last_scope, where = operation.scope, self.names.scope(operation.scope)
            if operation.regions:
                made = self._regions(region, operation, inputs, where, trips)
            else:
                known = met.get(id(eqn))
                if known is None:
                    known = met[id(eqn)] = (*self.names.equation(eqn, [kind[v] for v in inputs]), eqn)
                made = self._add(known[0], inputs, known[1], where, trips, operation.id, eqn)
            for value, number in zip(operation.outputs, made, strict=True):
                numbers[value] = number
        return [numbers[v] if numbers[v] >= 0 else self._constant(region, v) for v in region.outputs]

    def _regions(
        self, region: Program, operation: Operation, ins: list[int], scope: int, trips: float
    ) -> Sequence[int]:
        if operation.name == SCAN:
            return self._scan(operation, ins, scope, trips)
        if operation.name == WHILE:
            return self._while(region, operation, ins, scope, trips)
        if operation.name == COND:
            return self._cond(operation, ins, scope, trips)
        return self._region(operation.regions[0], ins, trips)

    def _add(
        self, signature: int, ins: list[int], made: list[int], scope: int, trips: float, number: int, eqn: Any
    ) -> range:
        """Adds one operation that computes new values of some types."""
        first = len(self.kind)
        self.signature.append(signature)
        self.reads += ins
        self.first_made.append(first)
        self.scope.append(scope)
        self.trips.append(trips)
        self.id.append(number)
        self.equation.append(eqn)
        self.kind += made
        return range(first, len(self.kind))

    def _constant(self, region: Program, value: int) -> int:
        """The value that represents a constant of a region."""
        kind, table = self.names.kind(region.types[value]), _table(region.constants[value])
        number = self.constants.setdefault(kind if table is None else (kind, table), len(self.kind))
        if number == len(self.kind):
            self.kind.append(kind)
        return number

    def look_into_tables(self) -> None:
        """Gives the kernels that look up constants by position their contents, which say how much work there is."""
        contents = {value: key[1] for key, value in self.constants.items() if isinstance(key, tuple)}
        numbers: dict[Any, int] = {}
        first = 0
        for index, number in enumerate(self.signature):
            op, start = self.names.signatures[number], first
            first += len(op.operands)
            if op.primitive != "pallas_call" or not contents:
                continue
            tables = tuple(contents.get(self.reads[start + place]) for place in tables_of(op))
            if any(tables):
                if (number, tables) not in numbers:
                    numbers[number, tables] = len(self.names.signatures)
                    self.names.signatures.append(replace(op, params={**op.params, "tables": tables}))
                self.signature[index] = numbers[number, tables]

    def _scan(self, operation: Operation, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        length = operation.equation.params["length"]
        num_consts, num_carry = operation.num_consts, operation.num_carry
        consts, init, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        start, inner = len(self.signature), trips * length
        carry = self._pseudo("loop_carry", operation.carry_ids, [[v] for v in init], scope, trips)
        shapes = [self._shape(v)[1:] for v in xs]
        slices = self._pseudo("loop_slice", operation.slice_ids, [[v] for v in xs], scope, inner, shapes)
        made = self._region(operation.regions[0], [*consts, *carry, *slices], inner)
        shapes = [(length, *self._shape(v)) for v in made[num_carry:]]
        stacked = [[v] for v in made[num_carry:]]
        stacks = self._pseudo("loop_stack", operation.result_ids, stacked, scope, inner, shapes)
        self._tie(made[:num_carry], carry, inner, start)
        return [*carry, *stacks]

    def _while(self, region: Program, operation: Operation, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        params = operation.equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        start, init = len(self.signature), ins[num_cond + num_body :]
        count, known = trips_of(region, operation, self._given if region is self._whole else {}, self._seen)
        carry = self._pseudo("loop_carry", operation.carry_ids, [[v] for v in init], scope, trips)
        condition, body = operation.regions
        self._region(condition, [*ins[:num_cond], *carry], trips * count)
        made = self._region(body, [*ins[num_cond : num_cond + num_body], *carry], trips * count)
        self._tie(made, carry, trips * count, start)
        self.whiles.append(While(*self.loops[-1], count, known, operation.source, operation.id))
        return carry

    def _cond(self, operation: Operation, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        results: list[Sequence[int]] = []
        for branch in operation.regions:
            start = len(self.signature)
            results.append(self._region(branch, ins[1:], trips))
            self.branches.append((start, len(self.signature)))
        merged = [list(values) for values in zip(*results, strict=True)]
        return self._pseudo("branch_merge", operation.result_ids, merged, scope, trips)

    def _tie(self, made: Sequence[int], carry: Sequence[int], trips: float, start: int) -> None:
        self.ties += [Tie(m, c, trips) for m, c in zip(made, carry, strict=True) if m != c]
        self.loops.append((start, len(self.signature)))

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.names.kinds[self.kind[value]].shape

    def _pseudo(
        self,
        name: str,
        ids: Sequence[int],
        operands: Sequence[list[int]],
        scope: int,
        trips: float,
        shapes: Sequence[tuple[int, ...]] = (),
    ) -> list[int]:
        """Adds operations of the tracer's own, each with a result of its first operand's type, or of another shape."""
        results = []
        for place, (number, ins) in enumerate(zip(ids, operands, strict=True)):
            kind = self.kind[ins[0]]
            if shapes:
                element = self.names.kinds[kind]
                kind = self.names.number(replace(element, shape=shapes[place]))
            signature = self.names.signature(name, {}, [self.kind[v] for v in ins], [kind])
            results.append(self._add(signature, ins, [kind], scope, trips, number, None)[0])
        return results
