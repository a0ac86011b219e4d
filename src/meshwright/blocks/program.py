"""A segment as a program of its own: a function from the values that it reads to the values that others read of it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright import jax_compat
from meshwright.blocks.numbering import number_values
from meshwright.graph import Graph, Op


@dataclass(frozen=True)
class SegmentProgram:
    """Some operations of a traced program, to be planned, compiled and run alone.

    Attributes:
        function: The function; it takes and returns flat sequences of arrays.
        types: The types of its arguments.
        inputs: The values of the whole program that its arguments are.
        outputs: The values of the whole program that its results are.
        operations: The operations that it runs: those asked for, and what they need that depends on no input.
    """

    function: Callable[..., list[Any]]
    types: tuple[Any, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    operations: tuple[int, ...]


def segment_program(graph: Graph, operations: Sequence[int]) -> SegmentProgram:
    """The program of some operations, such as a segment's.

    The body of a loop is run once. What a forward loop stacked up for a backward one is handed on directly. What is
    recomputed reads its operands through barriers, as under `jax.checkpoint`: else XLA would compute it once.
    """
    ops, numbers = graph.ops, number_values(graph)
    alias = _handed_on(graph)
    members = _with_constants(graph, {index for index in operations if ops[index].equation is not None}, alias)
    own_values = {value for index in members for value in ops[index].outputs}
    types: dict[int, Any] = {}
    equal: dict[tuple[int, str], int] = {}  # what a block before recomputes is what it computed
    for index in members:
        for value, variable in zip(ops[index].inputs, ops[index].equation.invars, strict=True):
            source = alias.get(value, value)
            if source not in own_values and not isinstance(variable, jax_compat.Literal):
                alias[value] = equal.setdefault((numbers[source], str(variable.aval)), source)
                types.setdefault(alias[value], variable.aval)
    outputs = _read_outside(graph, members, own_values, alias)

    def function(*arrays: Any) -> list[Any]:
        values = dict(zip(types, arrays, strict=True))
        again: dict[int, Any] = {}  # what recomputed operations read
        for index in members:
            results = _run(ops[index], values, again, alias)
            values.update(zip(ops[index].outputs, results, strict=True))
            if ops[index].recomputed:
                again.update(zip(ops[index].outputs, results, strict=True))
        return [values[value] for value in outputs]

    import jax

    given = tuple(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in types.values())
    return SegmentProgram(function, given, tuple(types), outputs, members)


def _run(op: Op, known: dict[int, Any], again: dict[int, Any], alias: dict[int, int]) -> list[Any]:
    import jax

    operands = []
    with jax.named_scope(op.scope or "segment"):  # phases are told by scopes
        for value, variable in zip(op.inputs, op.equation.invars, strict=True):
            if isinstance(variable, jax_compat.Literal):
                operands.append(variable.val)
                continue
            source = alias.get(value, value)
            if op.recomputed and source not in again:
                again[source] = jax.lax.optimization_barrier(known[source])
            operands.append((again if op.recomputed else known)[source])
        return jax_compat.bind(op.equation, operands)


def _handed_on(graph: Graph) -> dict[int, int]:
    """Slices of what a loop stacked up: one trip's slice is the value that the trip stacked.

    Two loops that slice one array, such as stacked weights, read one slice.
    """
    ops, producer, stacked_value = graph.ops, graph.columns.producer, dict[int, int]()
    slices: dict[int, int] = {}
    for op in ops:
        if op.primitive != "loop_slice":
            continue
        maker = producer[op.inputs[0]]
        stacked = maker >= 0 and ops[maker].primitive == "loop_stack"
        source = ops[maker].inputs[0] if stacked else slices.setdefault(op.inputs[0], op.outputs[0])
        if source != op.outputs[0]:
            stacked_value[op.outputs[0]] = stacked_value.get(source, source)
    return stacked_value


def _with_constants(graph: Graph, own: set[int], alias: dict[int, int]) -> tuple[int, ...]:
    """The operations with what they read that depends on no input, such as masks: as arguments it would be stored."""
    ops, producer = graph.ops, graph.columns.producer
    given = set(graph.inputs)
    for op in ops:
        if op.equation is None or not given.isdisjoint(op.inputs):
            given.update(op.outputs)
    members, waiting = set(own), list(own)
    while waiting:
        for value in ops[waiting.pop()].inputs:
            maker = int(producer[alias.get(value, value)])
            if maker >= 0 and maker not in members and value not in given:
                members.add(maker)
                waiting.append(maker)
    return tuple(sorted(members))


def _read_outside(graph: Graph, own: Iterable[int], made: set[int], alias: dict[int, int]) -> tuple[int, ...]:
    """The values that are results of the whole program, or that operations outside of the segment read."""
    inside, ops = set(own), graph.ops
    wanted = set(graph.outputs) | {tie.made for tie in graph.ties}
    for index, op in enumerate(ops):
        # What is stacked up for a slice is read by the slice's readers.
        if index not in inside and op.primitive != "loop_stack":
            wanted.update(alias.get(value, value) for value in op.inputs)
        elif op.primitive == "loop_stack" and index not in inside:
            wanted.update(value for value in op.inputs if value not in alias.values())
    return tuple(sorted(wanted & made))
