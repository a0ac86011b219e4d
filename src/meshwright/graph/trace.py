"""Traces a JAX function to a Graph: calls inlined, loop bodies once with tied carries, names and phases kept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshwright import jax_compat
from meshwright.graph.call import Call, call_abstractly
from meshwright.graph.graph import FORWARD, Graph, Op, Tie
from meshwright.graph.phases import assign_phases
from meshwright.rules.base import Signature, TensorType


@dataclass(frozen=True)
class Traced:
    """A traced function: its flat graph, and the call it was made from, with the structure of arguments and results."""

    graph: Graph
    call: Call


def trace(function: Callable[..., Any], *args: Any) -> Traced:
    """Traces ``function(*args)``; arguments are pytrees of arrays or `jax.ShapeDtypeStruct`.

    Leaves that are not arrays are kept as they are, and so are numbers that the function's Python code reads.

    Raises:
        TraceError: JAX could not trace the function; the message carries JAX's own reason in one paragraph.
    """
    call = call_abstractly(function, args)
    arguments, results = call.arguments, call.results
    return Traced(_Builder().build(call.jaxpr, arguments.paths, arguments.owners, results.paths), call)


class _Builder:
    """Walks a jaxpr once and writes the flat graph."""

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        self.kinds: list[int] = []  # number of each value's type: quicker to hash than the type
        self.ops: list[tuple[Signature, tuple[int, ...], tuple[int, ...], str, float, int, Any]] = []
        self.constants: dict[int, int] = {}
        self.ties: list[Tie] = []
        self.loops: list[tuple[int, int]] = []
        self.donated: set[int] = set()
        self.serial = 0
        self._numbers: dict[Any, int] = {}
        self._distinct: list[TensorType] = []
        self._signatures: dict[Any, Signature] = {}
        self._scopes: dict[Any, str] = {}

    def build(
        self, closed: Any, input_paths: tuple[str, ...], owners: tuple[str, ...], output_paths: tuple[str, ...]
    ) -> Graph:
        inputs = tuple(self._new(v.aval) for v in closed.jaxpr.invars)
        self._inputs = frozenset(inputs)
        outputs = self._inline(closed, inputs, "", 1.0)
        keep = self._needed(outputs)
        shift = np.searchsorted(np.array(keep, dtype=int), np.arange(len(self.ops) + 1))
        kept = [self.ops[i] for i in keep]
        recomputed = {scope: jax_compat.is_recomputed(scope) for scope in self._scopes.values()}
        ops = tuple(
            Op(sig, ins, outs, scope, phase, trips, recomputed[scope], serial, eqn)
            for (sig, ins, outs, scope, trips, serial, eqn), phase in zip(kept, assign_phases(kept), strict=True)
        )
        made = {value for op in kept for value in op[2]} | set(inputs)
        return Graph(
            types=tuple(self.types),
            ops=ops,
            inputs=inputs,
            input_paths=input_paths,
            outputs=outputs,
            output_paths=output_paths,
            constants=frozenset(range(len(self.types))) - made,
            donated=frozenset(self.donated),
            ties=tuple(t for t in self.ties if t.made in made and t.carry in made),
            loops=tuple((int(shift[a]), int(shift[b])) for a, b in self.loops if shift[a] < shift[b]),
            state=_next_values(
                input_paths, owners, output_paths, inputs, outputs, self.types, self._changing(inputs, ops)
            ),
        )

    def _changing(self, inputs: Sequence[int], ops: Sequence[Op]) -> set[int]:
        """Inputs that may be state though they are a single array: in a forward pass an equal type is mere chance."""
        return self.donated if all(op.phase == FORWARD for op in ops) else set(inputs)

    def _needed(self, outputs: Sequence[int]) -> list[int]:
        """Indices of the operations that the outputs depend on, through loop carries too."""
        producer = {value: i for i, op in enumerate(self.ops) for value in op[2]}
        tied: dict[int, list[int]] = {}
        for tie in self.ties:
            tied.setdefault(tie.carry, []).append(tie.made)
        seen: set[int] = set()
        stack = list(outputs)
        visited: set[int] = set()
        while stack:
            value = stack.pop()
            if value in visited:
                continue
            visited.add(value)
            stack.extend(tied.get(value, ()))
            i = producer.get(value)
            if i is not None and i not in seen:
                seen.add(i)
                stack.extend(self.ops[i][1])
        return sorted(seen)

    def _kind(self, aval: Any) -> int:
        """The number of an abstract value's type."""
        dtype = getattr(aval, "dtype", None)
        key = aval if dtype is None else (aval.shape, dtype)
        found = self._numbers.get(key)
        if found is None:
            if dtype is None:  # tokens and the like hold no data
                found = self._number(TensorType((), "token", 0))
            else:
                shape = tuple(int(d) for d in aval.shape)
                found = self._number(TensorType(shape, str(dtype), jax_compat.itemsize(dtype)))
            self._numbers[key] = found
        return found

    def _number(self, kind: TensorType) -> int:
        found = self._numbers.get(kind)
        if found is None:
            found = self._numbers[kind] = len(self._distinct)
            self._distinct.append(kind)
        return found

    def _add_value(self, number: int) -> int:
        self.kinds.append(number)
        self.types.append(self._distinct[number])
        return len(self.types) - 1

    def _new(self, aval: Any) -> int:
        return self._add_value(self._kind(aval))

    def _constant(self, aval: Any) -> int:
        """One value stands for all constants of a type: what they hold does not matter to a plan."""
        kind = self._kind(aval)
        if kind not in self.constants:
            self.constants[kind] = self._add_value(kind)
        return self.constants[kind]

    def _inline(self, closed: Any, inputs: Sequence[int], scope: str, trips: float) -> tuple[int, ...]:
        literal = jax_compat.Literal
        env: dict[Any, int] = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for var in closed.jaxpr.constvars:
            env[var] = self._constant(var.aval)
        for eqn in closed.jaxpr.eqns:
            ins = tuple([env[v] if type(v) is not literal else self._constant(v.aval) for v in eqn.invars])
            outs = self._equation(eqn, ins, self._scope(scope, eqn), trips)
            env.update(zip(eqn.outvars, outs, strict=True))
        return tuple([env[v] if type(v) is not literal else self._constant(v.aval) for v in closed.jaxpr.outvars])

    def _scope(self, outer: str, eqn: Any) -> str:
        key = (outer, jax_compat.name_stack(eqn))
        found = self._scopes.get(key)
        if found is None:
            found = self._scopes[key] = "/".join(part for part in (outer, str(key[1])) if part)
        return found

    def _equation(self, eqn: Any, ins: tuple[int, ...], scope: str, trips: float) -> tuple[int, ...]:
        name = eqn.primitive.name
        inner = jax_compat.called_jaxpr(eqn)
        if inner is not None:
            self.donated.update(
                v for v, d in zip(ins, jax_compat.donated(eqn), strict=False) if d and v in self._inputs
            )
            return self._inline(inner, jax_compat.call_operands(eqn, ins), scope, trips)
        if name == "scan":
            return self._scan(eqn, ins, scope, trips)
        if name == "while":
            return self._while(eqn, ins, scope, trips)
        if name == "cond":
            branches = [self._inline(jax_compat.close(b), ins[1:], scope, trips) for b in eqn.params["branches"]]
            return tuple(self._pseudo("branch_merge", made, scope, trips) for made in zip(*branches, strict=True))
        outs = tuple(self._new(v.aval) for v in eqn.outvars)
        self._add(self._signature(name, eqn.params, ins, outs), ins, outs, scope, trips, eqn)
        return outs

    def _scan(self, eqn: Any, ins: tuple[int, ...], scope: str, trips: float) -> tuple[int, ...]:
        params, length = eqn.params, eqn.params["length"]
        body = jax_compat.close(params["jaxpr"])
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        consts, init, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        start, inner = len(self.ops), trips * length
        carry = [self._pseudo("loop_carry", (v,), scope, trips) for v in init]
        slices = [self._pseudo("loop_slice", (v,), scope, inner, self.types[v].shape[1:]) for v in xs]
        made = self._inline(body, (*consts, *carry, *slices), scope, inner)
        stacked = [
            self._pseudo("loop_stack", (v,), scope, inner, (length, *self.types[v].shape)) for v in made[num_carry:]
        ]
        self._tie(made[:num_carry], carry, inner, start)
        return (*carry, *stacked)

    def _while(self, eqn: Any, ins: tuple[int, ...], scope: str, trips: float) -> tuple[int, ...]:
        """A while loop's length is not known before it runs: one trip is assumed."""
        params = eqn.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        start = len(self.ops)
        carry = [self._pseudo("loop_carry", (v,), scope, trips) for v in ins[num_cond + num_body :]]
        self._inline(jax_compat.close(params["cond_jaxpr"]), (*ins[:num_cond], *carry), scope, trips)
        consts = ins[num_cond : num_cond + num_body]
        made = self._inline(jax_compat.close(params["body_jaxpr"]), (*consts, *carry), scope, trips)
        self._tie(made, carry, trips, start)
        return tuple(carry)

    def _tie(self, made: Sequence[int], carry: Sequence[int], trips: float, start: int) -> None:
        self.ties.extend(Tie(m, c, trips) for m, c in zip(made, carry, strict=True) if m != c)
        self.loops.append((start, len(self.ops)))

    def _pseudo(
        self, name: str, ins: tuple[int, ...], scope: str, trips: float, shape: tuple[int, ...] | None = None
    ) -> int:
        """Adds one of the tracer's own operations, with one result of the first operand's type or another shape."""
        kind = self.types[ins[0]]
        number = self._number(kind if shape is None else TensorType(shape, kind.dtype, kind.itemsize))
        outs = (self._add_value(number),)
        self._add(self._signature(name, {}, ins, outs), ins, outs, scope, trips, None)
        return outs[0]

    def _add(
        self, sig: Signature, ins: tuple[int, ...], outs: tuple[int, ...], scope: str, trips: float, eqn: Any
    ) -> None:
        self.ops.append((sig, ins, outs, scope, trips, self.serial, eqn))
        self.serial += 1

    def _signature(self, name: str, params: dict[str, Any], ins: tuple[int, ...], outs: tuple[int, ...]) -> Signature:
        kinds = self.kinds
        key: Any = (name, tuple(params.items()), tuple([kinds[v] for v in (*ins, *outs)]), len(ins))
        try:
            found = self._signatures.get(key)
        except TypeError:  # a parameter that cannot be hashed: an array, say
            key, found = (name, id(params)), None
        if found is None:
            operands, results = tuple(self.types[v] for v in ins), tuple(self.types[v] for v in outs)
            found = self._signatures[key] = Signature(name, params, operands, results)
        return found


def _next_values(
    input_paths: Sequence[str],
    owners: Sequence[str],
    output_paths: Sequence[str],
    inputs: Sequence[int],
    outputs: Sequence[int],
    types: Sequence[TensorType],
    changing: set[int],
) -> dict[int, int]:
    """Pairs each result with the argument whose next value it is.

    A result is an argument's next value when the whole argument comes back: some subtree of the results has the
    argument's paths and types, leaf for leaf. An argument that is one array must be among those `changing`.
    """
    groups: dict[str, list[int]] = {}
    for i, owner in enumerate(owners):
        groups.setdefault(owner, []).append(i)
    by_path = {path: i for i, path in enumerate(output_paths)}
    prefixes = dict.fromkeys("/".join(p.split("/")[:d]) for p in output_paths for d in range(1, p.count("/") + 2))
    pairs: dict[int, int] = {}
    for name, members in groups.items():
        if input_paths[members[0]] == name and inputs[members[0]] not in changing:
            continue
        for prefix in prefixes:
            found = [by_path.get(prefix + input_paths[i][len(name) :]) for i in members]
            if any(o is None or o in pairs for o in found):
                continue
            matched = [o for o in found if o is not None]
            if all(types[outputs[o]] == types[inputs[i]] for o, i in zip(matched, members, strict=True)):
                pairs |= dict(zip(matched, members, strict=True))
                break
    return pairs
