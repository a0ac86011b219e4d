"""Flattens a jaxpr: calls inlined, loop bodies once with tied carries, every value a number.

A function that is called repeatedly (a layer, an activation) is one jaxpr in JAX: it is walked once, and copied for
each further call with new value numbers.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from meshwright import jax_compat
from meshwright.graph.graph import Tie
from meshwright.rules.base import Signature, TensorType
from meshwright.rules.kernel_work import Table
from meshwright.rules.pallas import tables_of

_LARGEST_TABLE = 2**18  # elements of a constant whose contents are kept for the kernels that look them up


class Names:
    """The types, signatures and scopes that all parts of one program share, each with a number."""

    def __init__(self) -> None:
        self.kinds: list[TensorType] = []
        self.signatures: list[Signature] = []
        self.scopes: list[str] = [""]
        self.parts: dict[int, Program | None] = {}  # by identity of the jaxpr; None after its first call
        self.known: dict[Any, tuple[int, list[int]]] = {}  # signatures of equations, and the types of their results
        self._kinds: dict[TensorType, int] = {}
        self._signatures: dict[Any, int] = {}
        self._scopes: dict[Any, int] = {"": 0}
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
        """The numbers of an equation's signature and of its results' types; `known` has them from now on."""
        name, params, avals = eqn.primitive.name, eqn.params, [v.aval for v in eqn.outvars]
        outs = [self.kind(aval) for aval in avals]
        found = (self.signature(name, params, ins, outs), outs)
        if isinstance(_hashable(params), tuple):
            self.known[name, *params.items(), *ins, *map(id, avals)] = found
        return found

    def scope(self, outer: int, stack: Any) -> int:
        """The number of a scope, given the number of the scope around it and a name stack within that."""
        found = self._scopes.get((outer, stack))
        if found is None:
            text = "/".join(part for part in (self.scopes[outer], str(stack)) if part)
            found = self._scopes[outer, stack] = _intern(text, self._scopes, self.scopes)
        return found


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
    return TensorType(tuple(int(d) for d in aval.shape), str(dtype), jax_compat.itemsize(dtype))


class Program:
    """A jaxpr as flat lists, one entry an operation; values made later have higher numbers.

    Attributes:
        kind: For each value the number of its type in `names`; inputs come first.
        num_inputs: How many inputs there are.
        outputs: The values of the results.
        signature: Number of each operation's signature.
        reads: The values that operations read, one operation after another.
        first_made: The first value that each operation makes; the others follow it.
        scope: Number of each operation's scope.
        trips, equation: As in `Op`.
        constants: By type, the value that represents all constants, since their contents do not matter to a plan; by
            type and contents, those that may be tables of kernels.
        ties: Loop carries.
        loops: Ranges of operations that repeat.
        whiles: The loops that repeat an unknown number of times.
        branches: Ranges of operations that are alternatives, of which one runs.
        donated: Inputs that a call donates.
    """

    def __init__(self, closed: Any, names: Names):
        self.names = names
        self.kind: list[int] = [names.kind(v.aval) for v in closed.jaxpr.invars]
        self.num_inputs = len(self.kind)
        self.signature: list[int] = []
        self.reads: list[int] = []
        self.first_made: list[int] = []
        self.scope: list[int] = []
        self.trips: list[float] = []
        self.equation: list[Any] = []
        self.constants: dict[int | tuple[int, Table], int] = {}
        self.ties: list[Tie] = []
        self.loops: list[tuple[int, int]] = []
        self.whiles: list[tuple[int, int]] = []
        self.branches: list[tuple[int, int]] = []
        self.donated: set[int] = set()
        self.outputs = self._walk(closed, range(self.num_inputs), 0, 1.0)

    def _walk(self, closed: Any, inputs: Sequence[int], scope: int, trips: float) -> list[int]:
        jaxpr, literal, constant = closed.jaxpr, jax_compat.Literal, self._constant
        known, kind, reads, scopes = self.names.known, self.kind, self.reads, dict[Any, int]()
        add_signature, add_first, add_scope = self.signature.append, self.first_made.append, self.scope.append
        add_trips, add_equation = self.trips.append, self.equation.append
        env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
        env |= {v: constant(v.aval, _table(x)) for v, x in zip(jaxpr.constvars, closed.consts, strict=True)}
        last_stack, where = None, -1
        for eqn in jaxpr.eqns:  # plain loops, as this is most of the work on a deep model
            first_read, outvars, stack = len(reads), eqn.outvars, jax_compat.name_stack(eqn)
            key = [eqn.primitive.name, *eqn.params.items()]
            for var in eqn.invars:
                value = env[var] if type(var) is not literal else constant(var.aval)
                reads.append(value)
                key.append(kind[value])
            for var in outvars:
                key.append(id(var.aval))
            if stack is not last_stack:  # rare: neighbours share a scope
                last_stack, where = stack, scopes.get(stack, -1)
                if where < 0:
                    where = scopes[stack] = self.names.scope(scope, stack)
            try:
                found = known.get(tuple(key))
            except TypeError:  # a parameter that cannot be hashed, such as those of custom derivatives
                found = None
            if found is None:  # not met before, or it runs other jaxprs
                ins = reads[first_read:]
                del reads[first_read:]
                env.update(zip(outvars, self._equation(eqn, ins, where, trips), strict=True))
                continue
            value = len(kind)
            add_signature(found[0])
            add_first(value)
            add_scope(where)
            add_trips(trips)
            add_equation(eqn)
            kind += found[1]
            for var in outvars:
                env[var] = value
                value += 1
        return [env[v] if type(v) is not literal else constant(v.aval) for v in jaxpr.outvars]

    def _equation(self, eqn: Any, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        name, inner = eqn.primitive.name, jax_compat.called_jaxpr(eqn)
        if inner is not None:
            self._give_away(v for v, donated in zip(ins, jax_compat.donated(eqn), strict=False) if donated)
            return self._call(inner, jax_compat.call_operands(eqn, ins), scope, trips)
        if name == "scan":
            return self._scan(eqn, ins, scope, trips)
        if name == "while":
            return self._while(eqn, ins, scope, trips)
        if name == "cond":
            return self._cond(eqn, ins, scope, trips)
        signature, made = self.names.equation(eqn, [self.kind[v] for v in ins])
        return self._add(signature, ins, made, scope, trips, eqn)

    def _add(self, signature: int, ins: list[int], made: list[int], scope: int, trips: float, eqn: Any) -> range:
        """Adds one operation that computes new values of some types."""
        first = len(self.kind)
        self.signature.append(signature)
        self.reads += ins
        self.first_made.append(first)
        self.scope.append(scope)
        self.trips.append(trips)
        self.equation.append(eqn)
        self.kind += made
        return range(first, len(self.kind))

    def _constant(self, aval: Any, table: Table | None = None) -> int:
        number = self.names.kind(aval)
        found = self.constants.setdefault(number if table is None else (number, table), len(self.kind))
        if found == len(self.kind):
            self.kind.append(number)
        return found

    def look_into_tables(self) -> None:
        """Gives the kernels that look up constants by position their contents, which say how much work there is."""
        known = {value: key[1] for key, value in self.constants.items() if isinstance(key, tuple)}
        numbers: dict[Any, int] = {}
        first = 0
        for index, number in enumerate(self.signature):
            op, start = self.names.signatures[number], first
            first += len(op.operands)
            if op.primitive != "pallas_call" or not known:
                continue
            tables = tuple(known.get(self.reads[start + place]) for place in tables_of(op))
            if any(tables):
                if (number, tables) not in numbers:
                    numbers[number, tables] = len(self.names.signatures)
                    self.names.signatures.append(replace(op, params={**op.params, "tables": tables}))
                self.signature[index] = numbers[number, tables]

    def _call(self, closed: Any, ins: Sequence[int], scope: int, trips: float) -> Sequence[int]:
        """Inlines a jaxpr: its first call is walked in place, and from the second on it is a part to be copied."""
        parts, which = self.names.parts, id(closed.jaxpr)
        if which not in parts:
            parts[which] = None
            return self._walk(closed, ins, scope, trips)
        part = parts[which] or Program(closed, self.names)
        parts[which] = part
        return self._copy(part, ins, scope, trips)

    def _copy(self, part: "Program", ins: Sequence[int], scope: int, trips: float) -> Sequence[int]:
        """Appends a copy of a part, with its inputs replaced and its other values numbered anew."""
        start, first = len(self.signature), len(self.kind)
        self.kind += part.kind[part.num_inputs :]
        table = np.array([*ins, *range(first, len(self.kind))], np.int64)
        for number, value in part.constants.items():
            table[value] = self.constants.setdefault(number, int(table[value]))
        scopes = {inner: self.names.scope(scope, self.names.scopes[inner]) for inner in set(part.scope)}
        self.signature += part.signature
        self.reads += table[part.reads].tolist()
        self.first_made += table[part.first_made].tolist()
        self.scope += [scopes[inner] for inner in part.scope]
        self.trips += [trips * n for n in part.trips] if trips != 1 else part.trips
        self.equation += part.equation
        self.ties += [Tie(int(table[t.made]), int(table[t.carry]), trips * t.trips) for t in part.ties]
        self.loops += [(start + a, start + b) for a, b in part.loops]
        self.whiles += [(start + a, start + b) for a, b in part.whiles]
        self.branches += [(start + a, start + b) for a, b in part.branches]
        self._give_away(table[list(part.donated)].tolist())
        return table[part.outputs].tolist()

    def _give_away(self, values: Iterable[int]) -> None:
        self.donated.update(v for v in values if v < self.num_inputs)

    def _scan(self, eqn: Any, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        length = eqn.params["length"]
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        consts, init, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        start, inner = len(self.signature), trips * length
        carry = [self._pseudo("loop_carry", [v], scope, trips) for v in init]
        slices = [self._pseudo("loop_slice", [v], scope, inner, self._shape(v)[1:]) for v in xs]
        made = self._call(jax_compat.close(eqn.params["jaxpr"]), [*consts, *carry, *slices], scope, inner)
        stacked = [self._pseudo("loop_stack", [v], scope, inner, (length, *self._shape(v))) for v in made[num_carry:]]
        self._tie(made[:num_carry], carry, inner, start)
        return [*carry, *stacked]

    def _while(self, eqn: Any, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        """A while loop's length is not known before it runs: one trip is assumed."""
        params = eqn.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        start = len(self.signature)
        carry = [self._pseudo("loop_carry", [v], scope, trips) for v in ins[num_cond + num_body :]]
        self._call(jax_compat.close(params["cond_jaxpr"]), [*ins[:num_cond], *carry], scope, trips)
        consts = ins[num_cond : num_cond + num_body]
        made = self._call(jax_compat.close(params["body_jaxpr"]), [*consts, *carry], scope, trips)
        self._tie(made, carry, trips, start)
        self.whiles.append(self.loops[-1])
        return carry

    def _cond(self, eqn: Any, ins: list[int], scope: int, trips: float) -> Sequence[int]:
        found: list[Sequence[int]] = []
        for branch in eqn.params["branches"]:
            start = len(self.signature)
            found.append(self._call(jax_compat.close(branch), ins[1:], scope, trips))
            self.branches.append((start, len(self.signature)))
        return [self._pseudo("branch_merge", list(made), scope, trips) for made in zip(*found, strict=True)]

    def _tie(self, made: Sequence[int], carry: Sequence[int], trips: float, start: int) -> None:
        self.ties += [Tie(m, c, trips) for m, c in zip(made, carry, strict=True) if m != c]
        self.loops.append((start, len(self.signature)))

    def _shape(self, value: int) -> tuple[int, ...]:
        return self.names.kinds[self.kind[value]].shape

    def _pseudo(self, name: str, ins: list[int], scope: int, trips: float, shape: tuple[int, ...] | None = None) -> int:
        """Adds one of the tracer's own operations, with one result of the first operand's type or another shape."""
        number = self.kind[ins[0]]
        if shape is not None:
            kind = self.names.kinds[number]
            number = self.names.number(TensorType(shape, kind.dtype, kind.itemsize))
        signature = self.names.signature(name, {}, [self.kind[v] for v in ins], [number])
        return self._add(signature, ins, [number], scope, trips, None)[0]
