"""The program that runs for each part of a batch: which operations run, on which parts of their operands, in order.

It is derived backwards from the wanted values. A value is wanted as it is, or *cut along a dim* where it is alike but
an operation on examples reads only a part's rows of it. Rows of a value that is cheap to compute (a broadcast mask) are
computed for the part; rows of other values are taken from the whole.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.program.program import Operation, Program
from meshwright.program.regions import with_regions
from meshwright.runtime.microbatches.batch_parts import ALIKE, Analysis, Body, Branches
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut, Form, form_to, is_half, shrunk, widened
from meshwright.runtime.microbatches.part import INDEX, Key, Piece, Writing
from meshwright.runtime.microbatches.part_bits import part_bits


class PartStep(Protocol):
    """One step of the program for a part.

    Attributes:
        unit: The operation of which it is; None where it only takes rows.
        reads_index: Whether it depends on the number of the part.
        ins, outs: The values that it reads and computes.
    """

    reads_index: bool
    outs: list[Key]

    @property
    def unit(self) -> Operation | None: ...

    @property
    def ins(self) -> list[Key]: ...

    def write(self, part: Writing) -> None:
        """Adds its operations to a program."""


class PartProgram:
    """Which steps the program for a part has.

    Attributes:
        steps: The steps, in order.
        entering: The values that the program must be given: as they are (None), or cut along dims.
    """

    def __init__(
        self,
        analysis: Analysis,
        wanted: Iterable[Key],
        *,
        outside: Collection[int] = (),
        cut_outside: Collection[int] = (),
    ):
        """Derives the steps.

        Args:
            analysis: How the program's values depend on the batch.
            wanted: The values that the program must compute.
            outside: Values that are available from outside, whole and cut.
            cut_outside: Inputs that are given cut where they are wanted cut.
        """
        self.analysis = analysis
        self.outside = outside
        self.steps: list[PartStep] = []
        self.entering: dict[int, set[int | None]] = defaultdict(set)
        for key in wanted:
            self._want(key)
        for number in reversed(range(len(analysis.program.operations))):
            self._unit(number, analysis.program.operations[number])
        for value in sorted(self.entering.keys() - {*outside, *cut_outside}):
            for dim in sorted(self.entering[value] - {None}, key=str):
                self._take((value, dim))
        self.steps.reverse()

    @property
    def keys(self) -> list[Key]:
        """The values that must be given, in order; constants are known, as long as they are not cut."""
        known = self.analysis.program.constants
        return _in_order((v, d) for v, dims in self.entering.items() for d in dims if d is not None or v not in known)

    @property
    def reads_index(self) -> bool:
        """Whether the program depends on the number of the part."""
        return any(step.reads_index for step in self.steps)

    def pieces(self, part: Writing) -> list[Piece]:
        """Writes the program; what it computes of each operation of the step."""
        found = []
        for step in self.steps:
            begin = len(part.program.operations)
            step.write(part)
            assert step.unit is not None, "rows of a step's values are taken outside of its parts"
            found.append(Piece(step.unit, tuple(step.ins), tuple(step.outs), tuple(part.program.operations[begin:])))
        return found

    def written(self, inputs: Sequence[Key], dtypes: Sequence[Any], outputs: Iterable[Key]) -> Program:
        """The program of a region, given the dtypes of its inputs."""
        part = Writing(self.analysis, inputs, dtypes)
        for step in self.steps:
            step.write(part)
        part.program.outputs.extend(map(part.number, outputs))
        return part.program

    def _want(self, key: Key) -> None:
        self.entering[key[0]].add(key[1])

    def _unit(self, number: int, unit: Operation) -> None:
        body = self.analysis.bodies.get(number)
        if isinstance(body, Branches):
            return self._branches(unit, body)
        if body is not None:
            return self._loop(unit, body)
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
        self.steps.append(_Take(value, dim, self.analysis.cut))

    def _emit(self, unit: Operation, form: Form | None, outs: Sequence[Key]) -> None:
        """Adds an operation whose results are `outs`; its alike operands are cut as its form says."""
        dims = form.operands if form is not None else (None,) * len(unit.inputs)
        pairs = zip(unit.inputs, dims, strict=True)
        ins: list[Key] = [(v, d if self.analysis.status[v] == ALIKE else None) for v, d in pairs]
        emit = _Draw if form is not None and unit.name == "random_bits" and form.operands[0] is None else _Operation
        self.steps.append(emit(unit, form, ins, outs, self.analysis))
        for value, dim in outs:
            self.entering[value].discard(dim)
        for key in ins:
            self._want(key)

    def _loop(self, unit: Operation, body: Body) -> None:
        """Adds a loop; its alike results may be wanted cut."""
        results: dict[Key, Key] = {}
        for place, (value, made) in enumerate(zip(unit.outputs, body.analysis.program.outputs, strict=True)):
            is_carry, early = place < body.num_carry, value in self.analysis.early
            for dim in sorted(d for d in self.entering[value] if d is not None):
                if early or is_carry or dim == 0:
                    self._take((value, dim))
                else:
                    results[value, dim] = (made, dim - 1)
            if None in self.entering[value] and value not in self.outside:
                results[value, None] = body.carry_key(place) if is_carry else (made, None)
        if results:
            self._add(_Loop(unit, body, results, self))

    def _branches(self, unit: Operation, body: Branches) -> None:
        """Adds a conditional or a checkpoint; its alike results may be wanted cut."""
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
            self._add(_Branches(unit, body, results))

    def _add(self, step: PartStep) -> None:
        self.steps.append(step)
        for value, dim in step.outs:
            self.entering[value].discard(dim)
        for key in step.ins:
            self._want(key)


class _Take:
    """Takes the part's rows of a whole value."""

    unit: Operation | None = None
    reads_index = True

    def __init__(self, value: int, dim: int, cut: Cut):
        self.dim, self.cut = dim, cut
        self.ins: list[Key] = [(value, None)]
        self.outs: list[Key] = [(value, dim)]

    def write(self, part: Writing) -> None:
        def rows(whole: Any, index: Any) -> list[Any]:
            return [lax.dynamic_index_in_dim(self.cut.parts(whole, self.dim), index, keepdims=False)]

        (part.numbers[self.outs[0]],) = part.add_computed(rows, [part.number(self.ins[0]), part.number(INDEX)])


class _Operation:
    """Runs one equation on a part."""

    reads_index = False

    def __init__(self, unit: Operation, form: Form | None, ins: list[Key], outs: Sequence[Key], analysis: Analysis):
        self.unit, self.ins, self.outs = unit, ins, list(outs)
        self.params, self.widens = unit.equation.params, False
        if form is not None:
            self.params = shrunk(unit, form, analysis.cut)
            made = unit.equation.outvars[0].aval.dtype
            # In a body bfloat16, which overflows nowhere, stays as narrow as the loop carries it.
            widens = is_half(made) if analysis.top else made == jnp.float16
            self.widens = form.results == ("sum",) and widens

    def write(self, part: Writing) -> None:
        params, operands = self.params, [part.number(key) for key in self.ins]
        if self.widens:
            params, converts = widened(params)
            operands = [self._wide(part, number) if converts else number for number in operands]
        part.add_on_part(self.unit, params, operands, self.outs)

    def _wide(self, part: Writing, number: int) -> int:
        if not is_half(part.program.types[number].dtype):
            return number
        return part.add_computed(lambda x: [x.astype(jnp.float32)], [number])[0]


class _Draw:
    """Draws the random bits of a part's examples."""

    reads_index = True

    def __init__(self, unit: Operation, form: Form | None, ins: list[Key], outs: Sequence[Key], analysis: Analysis):
        self.unit, self.ins, self.outs, self.cut = unit, ins, list(outs), analysis.cut
        dim = self.outs[0][1]
        assert dim is not None
        self.dim = dim - len(unit.equation.invars[0].aval.shape)

    def write(self, part: Writing) -> None:
        equation = self.unit.equation
        shape, width = equation.params["shape"], equation.params["bit_width"]

        def bits(keys: Any, index: Any) -> list[Any]:
            with jax_compat.in_place_of(equation, self.unit.stack):
                return [part_bits(keys, width, shape, self.cut.rows(shape[self.dim], index), self.dim)]

        (part.numbers[self.outs[0]],) = part.add_computed(bits, [part.number(self.ins[0]), part.number(INDEX)])


class _Loop:
    """Runs a scan on a part."""

    def __init__(self, unit: Operation, body: Body, results: dict[Key, Key], around: PartProgram):
        self.unit, self.results, self.outs = unit, results, list(results)
        first, inner = body.num_consts + body.num_carry, body.analysis
        carried = range(body.num_consts, first)
        left = [body.carry_key(i) for i in range(body.num_carry)]
        self.stacked = [key for key in results if unit.outputs.index(key[0]) >= body.num_carry]
        self.wanted = [*left, *(results[key] for key in self.stacked)]
        self.program = PartProgram(inner, self.wanted, cut_outside={*inner.program.inputs} - {*carried})
        self.reads_index = self.program.reads_index
        keys = [key for key in self.program.keys if key[0] not in carried]
        self.carry: list[Key] = [(i, None) for i in carried]
        self.consts = [key for key in keys if key[0] < body.num_consts]
        self.xs = [key for key in keys if key[0] >= first]
        self.slice_ids = [unit.slice_ids[v - first] for v, _ in self.xs]
        status = around.analysis.status
        starts: list[Key] = []
        for i in carried:
            dim = inner.status[i]
            alike = status[unit.inputs[i]] == ALIKE
            starts.append((unit.inputs[i], dim if alike and isinstance(dim, int) else None))
        of_consts: list[Key] = [(unit.inputs[v], d) for v, d in self.consts]
        of_xs: list[Key] = [(unit.inputs[v], None if d is None else d + 1) for v, d in self.xs]
        self.ins = [*of_consts, *starts, *of_xs]

    def write(self, part: Writing) -> None:
        unit, index = self.unit, [INDEX] if self.reads_index else []
        operands, inputs = [*index, *self.ins], [*index, *self.consts, *self.carry, *self.xs]
        body = self.program.written(inputs, list(map(part.dtype, operands)), self.wanted)
        num_consts, num_carry = len(index) + len(self.consts), len(self.carry)
        for place, left in zip(body.inputs[num_consts : num_consts + num_carry], body.outputs, strict=False):
            _check_alike(unit, [body.types[place], body.types[left]])
        places = [unit.outputs.index(value) for value, _ in self.stacked]
        kept = unit.carry_ids, self.slice_ids, [unit.result_ids[place - num_carry] for place in places]
        counts, read = (num_consts, num_carry), list(map(part.number, operands))
        loop = with_regions(part.program, unit._replace(kept_ids=kept), [body], read, counts)
        part.program.operations.append(loop)
        carried = dict(zip(unit.outputs, loop.outputs[:num_carry], strict=False))
        part.numbers.update((key, carried[key[0]]) for key in self.results if key not in self.stacked)
        part.numbers.update(zip(self.stacked, loop.outputs[num_carry:], strict=True))


class _Branches:
    """Runs a conditional, of which one branch runs, or a checkpoint on a part."""

    def __init__(self, unit: Operation, body: Branches, results: dict[Key, list[Key]]):
        self.unit, self.outs = unit, list(results)
        self.made = [list(keys) for keys in zip(*results.values(), strict=True)]  # for each branch
        self.programs = [
            PartProgram(analysis, keys, cut_outside=analysis.program.inputs)
            for analysis, keys in zip(body.analyses, self.made, strict=True)
        ]
        self.reads_index = any(program.reads_index for program in self.programs)
        self.given = _in_order({key for program in self.programs for key in program.keys})
        self.first: list[Key] = [(value, None) for value in unit.inputs[: unit.num_choosing]]
        self.ins = [*self.first, *((unit.inputs[unit.num_choosing + v], d) for v, d in self.given)]

    def write(self, part: Writing) -> None:
        unit, index = self.unit, [INDEX] if self.reads_index else []
        operands, inputs = [*index, *self.ins[len(self.first) :]], [*index, *self.given]
        dtypes = list(map(part.dtype, operands))
        pairs = zip(self.programs, self.made, strict=True)
        branches = [program.written(inputs, dtypes, keys) for program, keys in pairs]
        for made in zip(*([branch.types[n] for n in branch.outputs] for branch in branches), strict=True):
            _check_alike(unit, made)
        ids = dict(zip(unit.outputs, unit.result_ids, strict=False))  # a checkpoint has none for its results
        kept = (), (), [ids[value] for value, _ in self.outs if value in ids]
        read = list(map(part.number, [*self.first, *operands]))
        chosen = with_regions(part.program, unit._replace(kept_ids=kept), branches, read)
        part.program.operations.append(chosen)
        part.numbers.update(zip(self.outs, chosen.outputs, strict=True))


def _in_order(keys: Iterable[Key]) -> list[Key]:
    return sorted(keys, key=lambda key: (key[0], str(key[1])))


def _check_alike(unit: Operation, kinds: Sequence[Any]) -> None:
    """Refuses a loop or a conditional whose values have, for a part, other types before or in another branch."""
    found = {f"{kind.dtype}{list(kind.shape)}" for kind in kinds}
    if len(found) > 1:
        raise CannotCut(f"{unit} has values that are {' and '.join(sorted(found))} for a part of the batch")
