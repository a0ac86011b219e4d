"""The program that runs for each part of a batch: which operations run, on which parts of their operands, in order.

It is derived backwards from the wanted values. A value is wanted as it is, or *cut along a dim* where it is alike but
an operation on examples reads only a part's rows of it. Rows of a value that is cheap to compute (a broadcast mask) are
computed for the part; rows of other values are taken from the whole.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.program.program import Operation
from meshwright.runtime.microbatches.batch_parts import ALIKE, Analysis, Body, Branches
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut, Form, form_to, is_half, shrunk, widened
from meshwright.runtime.microbatches.part_bits import part_bits

Key = tuple[int, int | None]  # a value as it is for a part; or an alike value, cut along a dim
Env = dict[Key, Any]


class Instruction(Protocol):
    """One step of the program for a part: computes values of an environment, for the part with some index.

    Attributes:
        unit: The operation that it runs; None where it only takes rows.
        ins, outs: The values that it reads and computes.
    """

    outs: list[Key]

    @property
    def unit(self) -> Operation | None: ...

    @property
    def ins(self) -> list[Key]: ...

    def __call__(self, env: Env, index: Any) -> None: ...


class PartProgram:
    """The instructions for one part.

    Attributes:
        entering: The values that `run` must be given: as they are (None), or cut along dims. Constants are known.
    """

    def __init__(
        self,
        analysis: Analysis,
        wanted: Iterable[Key],
        *,
        outside: Collection[int] = (),
        cut_outside: Collection[int] = (),
    ):
        """Derives the instructions.

        Args:
            analysis: How the program's values depend on the batch.
            wanted: The values that `run` must compute.
            outside: Values that are available from outside, whole and cut.
            cut_outside: Inputs that are given cut where they are wanted cut.
        """
        self.analysis = analysis
        self.outside = outside
        self.instructions: list[Instruction] = []
        self.entering: dict[int, set[int | None]] = defaultdict(set)
        for key in wanted:
            self._want(key)
        for number in reversed(range(len(analysis.program.operations))):
            self._unit(number, analysis.program.operations[number])
        for value in sorted(self.entering.keys() - {*outside, *cut_outside}):
            for dim in sorted(self.entering[value] - {None}, key=str):
                self._take((value, dim))
        self.instructions.reverse()

    @property
    def keys(self) -> list[Key]:
        """The keys of the values that must be given, in order."""
        return sorted(
            ((v, d) for v, dims in self.entering.items() for d in dims), key=lambda key: (key[0], str(key[1]))
        )

    def run(self, given: Env, index: Any) -> Env:
        """All values of the part with this index, the wanted ones included."""
        env: Env = {(v, None): x for v, x in self.analysis.program.constants.items()}
        env.update(given)
        for instruction in self.instructions:
            instruction(env, index)
        return env

    def _want(self, key: Key) -> None:
        self.entering[key[0]].add(key[1])

    def _unit(self, number: int, unit: Operation) -> None:
        body = self.analysis.bodies.get(number)
        if isinstance(body, Branches):
            self._branches(unit, body)
            return
        if body is not None:
            self._body(unit, body)
            return
        for value in unit.outputs:
            for dim in sorted(d for d in self.entering[value] if d is not None):
                if dim in self.entering[value]:  # not computed yet along with another result
                    self._piece(unit, value, dim)
        made = [o for o in unit.outputs if o not in self.outside]
        if any(None in self.entering[o] for o in made):
            form = self.analysis.forms.get(number)
            self._emit(unit, form, [(o, None) for o in made])

    def _piece(self, unit: Operation, value: int, dim: int) -> None:
        """Computes a part's rows of an alike value, or takes them from the whole value."""
        form = None
        if self.analysis.early.isdisjoint(unit.outputs):
            form = form_to(unit, unit.outputs.index(value), dim, self.analysis.cut)
        if form is None:
            self._take((value, dim))
            return
        keys = [(o, d) for o, d in zip(unit.outputs, form.results, strict=True) if isinstance(d, int)]
        self._emit(unit, form, keys)

    def _take(self, key: Key) -> None:
        """Takes rows from the whole value; from outside, if it is available there."""
        value, dim = key
        if value in self.outside:
            return
        assert dim is not None
        self.entering[value].discard(dim)
        self._want((value, None))
        self.instructions.append(_Take(value, dim, self.analysis.cut))

    def _emit(self, unit: Operation, form: Form | None, outs: Sequence[Key]) -> None:
        """Adds an operation whose results are `outs`; its alike operands are cut as its form says."""
        dims = form.operands if form is not None else (None,) * len(unit.inputs)
        pairs = zip(unit.inputs, dims, strict=True)
        ins: list[Key] = [(v, d if self.analysis.status[v] == ALIKE else None) for v, d in pairs]
        emit = _Draw if form is not None and unit.name == "random_bits" and form.operands[0] is None else _Operation
        self.instructions.append(emit(unit, form, ins, outs, self.analysis))
        for value, dim in outs:
            self.entering[value].discard(dim)
        for key in ins:
            self._want(key)

    def _body(self, unit: Operation, body: Body) -> None:
        """Adds a checkpoint or loop; its alike results may be wanted cut."""
        results: dict[Key, Key] = {}
        for place, (value, made) in enumerate(zip(unit.outputs, body.analysis.program.outputs, strict=True)):
            is_carry, early = place < body.num_carry, value in self.analysis.early
            for dim in sorted(d for d in self.entering[value] if d is not None):
                if early or (body.is_loop and (is_carry or dim == 0)):
                    self._take((value, dim))
                else:
                    results[value, dim] = (made, dim - 1 if body.is_loop else dim)
            if None in self.entering[value] and value not in self.outside:
                results[value, None] = body.carry_key(place) if is_carry else (made, None)
        if results:
            self._add((_Loop if body.is_loop else _Checkpoint)(unit, body, results, self))

    def _branches(self, unit: Operation, body: Branches) -> None:
        """Adds a conditional; its alike results may be wanted cut."""
        results: dict[Key, list[Key]] = {}
        for place, value in enumerate(unit.outputs):
            for dim in sorted(d for d in self.entering[value] if d is not None):
                if value in self.analysis.early:
                    self._take((value, dim))
                else:
                    results[value, dim] = [(branch.program.outputs[place], dim) for branch in body.analyses]
            if None in self.entering[value] and value not in self.outside:
                results[value, None] = [body.result_key(branch, place) for branch in range(len(body.analyses))]
        if results:
            self._add(_Conditional(unit, body, results))

    def _add(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        for value, dim in instruction.outs:
            self.entering[value].discard(dim)
        for key in instruction.ins:
            self._want(key)


class Whole:
    """Runs an operation that does not depend on the part."""

    def __init__(self, unit: Operation):
        self.unit = unit
        self.ins: list[Key] = [(v, None) for v in unit.inputs]
        self.outs: list[Key] = [(v, None) for v in unit.outputs]

    def __call__(self, env: Env, index: Any) -> None:
        made = self.unit.run([env[key] for key in self.ins])
        env.update(zip(self.outs, made, strict=True))


class _Take:
    """Takes the part's rows of a whole value."""

    unit: Operation | None = None

    def __init__(self, value: int, dim: int, cut: Cut):
        self.dim, self.cut = dim, cut
        self.ins: list[Key] = [(value, None)]
        self.outs: list[Key] = [(value, dim)]

    def __call__(self, env: Env, index: Any) -> None:
        parts = self.cut.parts(jnp.asarray(env[self.ins[0]]), self.dim)
        env[self.outs[0]] = lax.dynamic_index_in_dim(parts, index, keepdims=False)


class _Operation:
    """Runs one equation on a part."""

    def __init__(self, unit: Operation, form: Form | None, ins: list[Key], outs: Sequence[Key], analysis: Analysis):
        self.unit, self.ins, self.outs = unit, ins, list(outs)
        self.params, self.shapes, self.widens = dict(unit.equation.params), None, False
        if form is not None:
            cut = analysis.cut
            self.params = shrunk(unit, form, cut)
            pairs = zip(unit.equation.outvars, form.results, strict=True)
            self.shapes = [cut.shape(v.aval.shape, s if isinstance(s, int) else None) for v, s in pairs]
            made = unit.equation.outvars[0].aval.dtype
            # In a body bfloat16, which overflows nowhere, stays as narrow as the loop carries it.
            widens = is_half(made) if analysis.top else made == jnp.float16
            self.widens = form.results == ("sum",) and widens

    def __call__(self, env: Env, index: Any) -> None:
        operands = [env[key] for key in self.ins]
        params = self.params
        if self.widens:
            params, operands = widened(params, operands)
        try:
            made = jax_compat.bind(self.unit.equation.replace(params=params), operands, self.unit.stack)
        except (TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CannotCut(f"{self.unit} does not run on a part of the batch: {reason}") from error
        if self.shapes is not None and self.shapes != [x.shape for x in made]:
            raise CannotCut(f"{self.unit} gives {[x.shape for x in made]} for a part of the batch, not {self.shapes}")
        values = dict(zip(self.unit.outputs, made, strict=True))
        env.update((key, values[key[0]]) for key in self.outs)


class _Draw:
    """Draws the random bits of a part's examples."""

    def __init__(self, unit: Operation, form: Form | None, ins: list[Key], outs: Sequence[Key], analysis: Analysis):
        self.unit: Operation | None = unit
        self.ins, self.outs, self.cut = ins, list(outs), analysis.cut
        dim = self.outs[0][1]
        assert dim is not None
        self.dim = dim - len(unit.equation.invars[0].aval.shape)

    def __call__(self, env: Env, index: Any) -> None:
        assert self.unit is not None
        eqn = self.unit.equation
        shape = eqn.params["shape"]
        with jax_compat.in_place_of(eqn, self.unit.stack):
            rows = self.cut.rows(shape[self.dim], index)
            env[self.outs[0]] = part_bits(env[self.ins[0]], eqn.params["bit_width"], shape, rows, self.dim)


class _Loop:
    """Runs a scan on a part."""

    def __init__(self, unit: Operation, body: Body, results: dict[Key, Key], around: PartProgram):
        self.unit, self.results, self.outs = unit, results, list(results)
        first, inner = body.num_consts + body.num_carry, body.analysis
        self.carried = range(body.num_consts, first)
        self.left = [body.carry_key(i) for i in range(body.num_carry)]
        self.stacked = [key for key in results if unit.outputs.index(key[0]) >= body.num_carry]
        wanted = [*self.left, *(results[key] for key in self.stacked)]
        fixed = {*inner.program.inputs} - {*self.carried}
        self.program = PartProgram(inner, wanted, cut_outside=fixed)
        keys = [key for key in self.program.keys if key[0] in inner.program.inputs]
        self.consts = [key for key in keys if key[0] < body.num_consts]
        self.xs = [key for key in keys if key[0] >= first]
        status = around.analysis.status
        self.starts: list[Key] = []
        for i in self.carried:
            dim = inner.status[i]
            alike = status[unit.inputs[i]] == ALIKE
            self.starts.append((unit.inputs[i], dim if alike and isinstance(dim, int) else None))
        self.of_consts: list[Key] = [(unit.inputs[v], d) for v, d in self.consts]
        self.of_xs: list[Key] = [(unit.inputs[v], None if d is None else d + 1) for v, d in self.xs]

    @property
    def ins(self) -> list[Key]:
        return [*self.of_consts, *self.starts, *self.of_xs]

    def __call__(self, env: Env, index: Any) -> None:
        params = self.unit.equation.params
        fixed = dict(zip(self.consts, [env[key] for key in self.of_consts], strict=True))

        def trip(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
            here = fixed | dict(zip([(i, None) for i in self.carried], carry, strict=True))
            here = self.program.run(here | dict(zip(self.xs, xs, strict=True)), index)
            return [here[key] for key in self.left], [here[self.results[key]] for key in self.stacked]

        with jax_compat.in_place_of(self.unit.equation, self.unit.stack):
            options = {name: params[name] for name in ("length", "reverse", "unroll")}
            starts, xs = ([env[key] for key in keys] for keys in (self.starts, self.of_xs))
            carry, stacked = lax.scan(trip, starts, xs, **options)
        env.update(zip(self.stacked, stacked, strict=True))
        env.update((key, carry[self.unit.outputs.index(key[0])]) for key in self.results if key not in self.stacked)


class _Checkpoint:
    """Runs a checkpoint on a part."""

    def __init__(self, unit: Operation, body: Body, results: dict[Key, Key], around: PartProgram):
        self.unit, self.results, self.outs = unit, results, list(results)
        inner = body.analysis.program
        self.program = PartProgram(body.analysis, results.values(), cut_outside=inner.inputs)
        keys = self.program.keys
        self.given = [key for key in keys if key[0] in inner.inputs]
        self.ins: list[Key] = [(unit.inputs[v], d) for v, d in self.given]
        self.arrays = [(v, d) for v, d in keys if v in inner.constants and jnp.ndim(inner.constants[v])]

    def __call__(self, env: Env, index: Any) -> None:
        keys = [*self.given, *self.arrays]  # a checkpoint has no constants of its own

        def function(index: Any, *values: Any) -> list[Any]:
            here = self.program.run(dict(zip(keys, values, strict=True)), index)
            return [here[key] for key in self.results.values()]

        constants = self.program.analysis.program.constants
        operands = [index, *(env[key] for key in self.ins), *(jnp.asarray(constants[v]) for v, _ in self.arrays)]
        made = jax_compat.bind_checkpoint(self.unit.equation, function, operands, self.unit.stack)
        env.update(zip(self.results, made, strict=True))


class _Conditional:
    """Runs one branch of a conditional on a part."""

    def __init__(self, unit: Operation, body: Branches, results: dict[Key, list[Key]]):
        self.unit, self.outs = unit, list(results)
        self.made = [list(keys) for keys in zip(*results.values(), strict=True)]  # for each branch
        self.programs = [
            PartProgram(analysis, keys, cut_outside=analysis.program.inputs)
            for analysis, keys in zip(body.analyses, self.made, strict=True)
        ]
        inputs = body.analyses[0].program.inputs
        self.given = sorted({k for p in self.programs for k in p.keys if k[0] in inputs}, key=str)
        self.ins: list[Key] = [(unit.inputs[0], None), *((unit.inputs[1 + v], d) for v, d in self.given)]

    def __call__(self, env: Env, index: Any) -> None:
        def branch(program: PartProgram, keys: list[Key]) -> Callable[[Any, list[Any]], list[Any]]:
            def run(index: Any, values: list[Any]) -> list[Any]:
                here = program.run(dict(zip(self.given, values, strict=True)), index)
                return [here[key] for key in keys]

            return run

        branches = [branch(program, keys) for program, keys in zip(self.programs, self.made, strict=True)]
        with jax_compat.in_place_of(self.unit.equation, self.unit.stack):
            chosen, *values = (env[key] for key in self.ins)
            made = lax.switch(chosen, branches, index, values)
        env.update(zip(self.outs, made, strict=True))
