"""A step as data: operations in the order they run, calls inlined, with regions for loops, branches and checkpoints.

Every operation has an *id*, which the plan, the graph and whatever runs the step know it by. Ids are given once, when
the program is made of a jaxpr. An operation with regions takes an id for each operation in them and, for a loop or a
conditional, one for each value that enters or leaves: the plan decides how each of those is split, too. They follow
one another in this order:

* a scan: its carries, the slices that a trip reads, its body, the stacks of what trips return;
* a while loop: its carries, its condition, its body;
* a conditional: its branches, the results in which they merge;
* a checkpoint: its body, and nothing else.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple

from meshwright import jax_compat
from meshwright.program.text import program_text

#: The first id of operations that no plan knows: those that were added to a program after it was planned.
UNPLANNED = 1 << 40
SCAN, WHILE, COND = "scan", "while", "cond"


class Operation(NamedTuple):
    """One operation.

    Attributes:
        id: The first of its ids.
        equation: The JAX equation: primitive, parameters, source.
        inputs: Numbers of the values read.
        outputs: Numbers of the values computed.
        calls: The equations of the calls around it, outermost first, which are inlined.
        scope: Name scopes around it, outermost first.
        regions: The programs that it runs: the body of a loop or checkpoint, a condition and a body, or branches.
        num_ids: How many ids it takes, its regions included.
        kept_ids: Those of its carries, slices and results, where a pass has left some out.
    """

    id: int
    equation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    calls: tuple[Any, ...] = ()
    scope: str = ""
    regions: tuple["Program", ...] = ()
    num_ids: int = 1
    kept_ids: tuple[Sequence[int], Sequence[int], Sequence[int]] | None = None

    @property
    def name(self) -> str:
        """The name of its primitive."""
        return str(self.equation.primitive.name)

    @property
    def stack(self) -> tuple[Any, ...]:
        """The name stacks of the calls around it."""
        return tuple(map(jax_compat.name_stack, self.calls))

    @property
    def source(self) -> str:
        """Where the user wrote it, or the call around it; empty where JAX does not know."""
        lines = map(jax_compat.source_line, (self.equation, *reversed(self.calls)))
        return next((line for line in lines if line), "")  # functions of JAX itself are only known by their caller

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is a `jax.checkpoint`."""
        return self.name in jax_compat.CHECKPOINTS

    @property
    def num_consts(self) -> int:
        """How many of a scan's operands are the same for all trips."""
        return jax_compat.scan_counts(self.equation)[0]

    @property
    def num_carry(self) -> int:
        """How many values a loop hands from trip to trip."""
        if self.name == SCAN:
            return jax_compat.scan_counts(self.equation)[1]
        return len(self.outputs) if self.name == WHILE else 0

    @property
    def num_choosing(self) -> int:
        """How many operands come before those of its branches: of a conditional, the number of the branch."""
        return 1 if self.name == COND else 0

    @property
    def carry_ids(self) -> Sequence[int]:
        """The ids of a loop's carries."""
        if self.kept_ids is not None:
            return self.kept_ids[0]
        return range(self.id, self.id + self.num_carry)

    @property
    def slice_ids(self) -> Sequence[int]:
        """The ids of the slices that each trip of a scan reads."""
        if self.kept_ids is not None:
            return self.kept_ids[1]
        first = self.id + self.num_carry
        count = len(self.inputs) - self.num_consts - self.num_carry if self.name == SCAN else 0
        return range(first, first + count)

    @property
    def result_ids(self) -> Sequence[int]:
        """The ids of what a scan stacks, or of the results in which branches merge."""
        if self.kept_ids is not None:
            return self.kept_ids[2]
        if self.name not in (SCAN, COND):
            return range(0)
        end = self.id + self.num_ids
        return range(end - len(self.outputs) + self.num_carry, end)

    def trimmed(self, used: Sequence[bool]) -> "Operation":
        """An operation that computes some of the results; a loop then computes only what leads to them."""
        reads, equation = jax_compat.trimmed(self.equation, used)
        if equation is self.equation:
            return self
        numbers = {id(var): value for var, value in zip(self.equation.outvars, self.outputs, strict=True)}
        inputs = tuple(value for value, is_read in zip(self.inputs, reads, strict=True) if is_read)
        outputs = tuple(numbers[id(var)] for var in equation.outvars)
        regions = tuple(Program.of(body, UNPLANNED) for body in bodies_of(equation))
        stays = [value in outputs for value in self.outputs]
        slices = list(reads)[len(self.inputs) - len(self.slice_ids) :]
        kept_ids = (
            list(compress(self.carry_ids, stays)),
            list(compress(self.slice_ids, slices)),
            list(compress(self.result_ids, stays[self.num_carry :])),
        )
        return self._replace(equation=equation, inputs=inputs, outputs=outputs, regions=regions, kept_ids=kept_ids)

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Its results, computed by JAX on these operands."""
        return jax_compat.bind(self.equation, operands, self.stack)

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


@dataclass(frozen=True)
class Program:
    """A step, or a region of one: values are numbered anew in each region, and its inputs come first.

    Attributes:
        types: The type of each value.
        inputs: Numbers of the arguments.
        operations: The operations, in the order they run.
        outputs: Numbers of the results.
        constants: The values that are known, by number.
        donated: The arguments that the user's own calls donate.
        sharded_calls: The equations of inlined calls, in regions too, that have shardings of their own.
    """

    types: list[Any] = field(default_factory=list)
    inputs: range = range(0)
    operations: list[Operation] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    constants: dict[int, Any] = field(default_factory=dict)
    donated: set[int] = field(default_factory=set)
    sharded_calls: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, closed: Any, first_id: int = 0) -> "Program":
        """The program of a closed jaxpr.

        Args:
            closed: The jaxpr.
            first_id: The id of its first operation.
        """
        reading = _Reading(first_id)
        program = reading.region(closed, "")
        program.sharded_calls.extend(reading.sharded_calls)
        return program

    def copy(self) -> "Program":
        """A program of its own, for a pass that changes it; its regions are shared."""
        return Program(
            list(self.types),
            self.inputs,
            list(self.operations),
            list(self.outputs),
            dict(self.constants),
            set(self.donated),
            list(self.sharded_calls),
        )

    @property
    def input_types(self) -> list[Any]:
        """The types of the arguments."""
        return [self.types[value] for value in self.inputs]

    @property
    def output_types(self) -> list[Any]:
        """The types of the results."""
        return [self.types[value] for value in self.outputs]

    @property
    def num_ids(self) -> int:
        """How many ids its operations take, those in regions included."""
        return sum(operation.num_ids for operation in self.operations)

    def walk(self) -> Iterable[Operation]:
        """All operations, those in regions too, each before those inside of it."""
        for operation in self.operations:
            yield operation
            for region in operation.regions:
                yield from region.walk()

    def run(self, arguments: Sequence[Any]) -> list[Any]:
        """The results, computed by JAX as the user's function does."""
        values = self.constants | dict(zip(self.inputs, arguments, strict=True))
        self.run_some(self.operations, values)
        return [values[number] for number in self.outputs]

    def run_some(self, operations: Iterable[Operation], values: dict[int, Any]) -> None:
        """Runs some operations on values that are known by number, and adds their results to those."""
        for operation in operations:
            results = operation.run([values[number] for number in operation.inputs])
            values.update(zip(operation.outputs, results, strict=True))

    @cached_property
    def with_effects(self) -> list[Operation]:
        """The operations that have effects: they print, or call the user's functions."""
        return [operation for operation in self.operations if operation.equation.effects]

    def ancestors(self, values: Iterable[int]) -> list[int]:
        """The positions of the operations that must run to compute some values, in order."""
        needed, wanted = [], set(values)
        for position in reversed(range(len(self.operations))):
            operation = self.operations[position]
            if not wanted.isdisjoint(operation.outputs):
                needed.append(position)
                wanted.update(operation.inputs)
        return needed[::-1]

    def needed(self, values: Iterable[int]) -> list[Operation]:
        """What must run to compute some values, in order; of a loop, what leads to the results that are needed."""
        needed, wanted = [], set(values)
        for position in reversed(self.ancestors(wanted)):
            operation = self.operations[position]
            used = [value in wanted for value in operation.outputs]
            if any(used):
                operation = operation.trimmed(used)
                needed.append(operation)
                wanted.update(operation.inputs)
        return needed[::-1]

    @property
    def live(self) -> set[int]:
        """The positions of the operations that have effects or on which results depend."""
        effects = [n for n, operation in enumerate(self.operations) if operation.equation.effects]
        read = (value for n in effects for value in self.operations[n].inputs)
        return {*effects, *self.ancestors([*self.outputs, *read])}

    def leading_to(self, positions: Collection[int]) -> set[int]:
        """Some operations, by position, and all on which they depend."""
        return {*positions, *self.ancestors(value for n in positions for value in self.operations[n].inputs)}

    def depending_on(self, position: int) -> set[int]:
        """An operation, by position, and all that depend on it."""
        dependent, computed = {position}, set(self.operations[position].outputs)
        for n, operation in enumerate(self.operations):
            if not computed.isdisjoint(operation.inputs):
                dependent.add(n)
                computed.update(operation.outputs)
        return dependent

    def add_value(self, aval: Any) -> int:
        """The number of a new value, for a pass that builds a program."""
        self.types.append(aval)
        return len(self.types) - 1

    def add_constant(self, value: Any, aval: Any = None) -> int:
        """The number of a new constant; its type is that of the value unless it is given."""
        number = self.add_value(jax_compat.abstract(value) if aval is None else aval)
        self.constants[number] = value
        return number

    def __str__(self) -> str:
        return program_text(self)


class _Reading:
    """Makes programs of jaxprs, and gives ids in the order in which operations are met."""

    def __init__(self, first_id: int):
        self.next_id = first_id
        self.scopes: dict[tuple[str, Any], str] = {}
        self.sharded_calls: list[Any] = []

    def region(self, closed: Any, scope: str) -> Program:
        variables = closed.jaxpr.invars
        program = Program([v.aval for v in variables], range(len(variables)))
        program.outputs.extend(self._walk(program, closed, program.inputs, (), scope))
        return program

    def _walk(
        self, program: Program, closed: Any, arguments: Sequence[int], calls: tuple[Any, ...], scope: str
    ) -> list[int]:
        numbers: dict[Any, int] = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        for v, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            numbers[v] = program.add_constant(value, v.aval)
        literal, types, last_stack, where = jax_compat.Literal, program.types, None, scope
        add, runs_jaxprs = program.operations.append, jax_compat.RUN_JAXPRS
        for equation in closed.jaxpr.eqns:  # plain code, as a deep model has tens of thousands
            inputs = tuple(
                [numbers[v] if type(v) is not literal else program.add_constant(v.val, v.aval) for v in equation.invars]
            )
            stack = jax_compat.name_stack(equation)
            if stack is not last_stack:  # neighbours share a stack
                last_stack, where = stack, self._scope(scope, stack)
            name, first = equation.primitive.name, len(types)
            inner = jax_compat.called_jaxpr(equation) if name in runs_jaxprs else None
            if inner is not None and name not in jax_compat.CHECKPOINTS:
                outputs = self._call(program, equation, inner, inputs, calls, where)
                numbers.update(zip(equation.outvars, outputs, strict=True))
                continue
            for number, v in enumerate(equation.outvars, first):
                types.append(v.aval)
                numbers[v] = number
            whole = (self.next_id, equation, inputs, tuple(range(first, len(types))), calls, where, (), 1, None)
            operation = tuple.__new__(Operation, whole)
            self.next_id += 1
            add(self._with_regions(operation) if name in runs_jaxprs else operation)
        return [
            numbers[v] if type(v) is not literal else program.add_constant(v.val, v.aval) for v in closed.jaxpr.outvars
        ]

    def _call(
        self,
        program: Program,
        equation: Any,
        inner: Any,
        inputs: tuple[int, ...],
        calls: tuple[Any, ...],
        scope: str,
    ) -> list[int]:
        """Inlines a call."""
        donated = zip(inputs, jax_compat.donated(equation), strict=False)
        program.donated.update(v for v, is_given in donated if is_given and v < len(program.inputs))
        if jax_compat.has_shardings(equation):
            self.sharded_calls.append(equation)
        return self._walk(program, inner, jax_compat.call_operands(equation, inputs), (*calls, equation), scope)

    def _with_regions(self, operation: Operation) -> Operation:
        """An operation with what it runs, and with the ids for all of it."""
        bodies = bodies_of(operation.equation)
        if not bodies:  # a call in a form that is not known is one operation
            return operation
        self.next_id = operation.id + operation.num_carry + len(operation.slice_ids)
        regions = tuple(self.region(body, operation.scope) for body in bodies)
        if not operation.is_checkpoint:
            self.next_id += len(operation.outputs) - operation.num_carry
        return operation._replace(regions=regions, num_ids=self.next_id - operation.id)

    def _scope(self, outer: str, stack: Any) -> str:
        scope = self.scopes.get((outer, stack))
        if scope is None:
            scope = self.scopes[outer, stack] = "/".join(part for part in (outer, str(stack)) if part)
        return scope


def bodies_of(equation: Any) -> list[Any]:
    """The closed jaxprs of an equation's regions."""
    name, params = equation.primitive.name, equation.params
    if name == SCAN:
        return [jax_compat.close(params["jaxpr"])]
    if name == WHILE:
        return [jax_compat.close(params["cond_jaxpr"]), jax_compat.close(params["body_jaxpr"])]
    if name == COND:
        return [jax_compat.close(branch) for branch in params["branches"]]
    called = jax_compat.called_jaxpr(equation)
    return [] if called is None else [called]
