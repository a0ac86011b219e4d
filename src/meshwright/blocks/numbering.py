"""Numbers the values of a program so that equal values share a number, whatever their layout and precision.

A recomputed value has the number of the value that it repeats, and a slice of what a scan stacked up has the number of
the value that was stacked: this is how the backward pass is recognised as reading what the forward pass computed.
"""

from typing import Any

from meshwright import jax_compat
from meshwright.graph import Graph, Op

# Operations whose result holds the elements of their first operand, in another order, shape or precision.
LAYOUT = frozenset(
    (
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "copy_p",
        "expand_dims",
        "optimization_barrier",
        "reduce_precision",
        "reshape",
        "rev",
        "squeeze",
        "stop_gradient",
        "transpose",
    )
)


def number_values(graph: Graph) -> list[int]:
    """A number for every value; values of one number hold the same elements."""
    sizes, ops, producer = graph.sizes, graph.ops, graph.columns.producer
    numbers = [-1] * graph.columns.num_values
    number_of: dict[Any, int] = {}
    for value in (*graph.inputs, *graph.constants):
        numbers[value] = number_of.setdefault(("given", value), len(number_of))
    for index, op in enumerate(ops):
        if op.primitive == "loop_slice" and producer[op.inputs[0]] >= 0:
            stacked = ops[producer[op.inputs[0]]]
            if stacked.primitive == "loop_stack":
                numbers[op.outputs[0]] = numbers[stacked.inputs[0]]
                continue
        key = (
            _own_key(index)
            if op.primitive == "loop_carry"
            else (graph.columns.signature[index], *_reads(op, numbers, graph))
        )
        for nth, value in enumerate(op.outputs):
            source = op.inputs[nth] if nth < len(op.inputs) else -1
            if op.primitive in LAYOUT and source >= 0 and sizes[source] == sizes[value]:
                numbers[value] = numbers[source]
            else:
                numbers[value] = number_of.setdefault((key, nth), len(number_of))
    return numbers


def _own_key(index: int) -> tuple[str, int]:
    """The key of an operation that equals no other: what a loop carries changes with every trip."""
    return ("carry", index)


def _reads(op: Op, numbers: list[int], graph: Graph) -> list[Any]:
    """What an operation reads, as part of its key; one value stands for all constants of a type, so theirs is told."""
    read: list[Any] = [numbers[value] for value in op.inputs]
    if op.equation is None:
        return read
    for place, value in enumerate(op.inputs):
        if value in graph.constants and place < len(op.equation.invars):
            variable = op.equation.invars[place]
            read[place] = str(variable.val) if isinstance(variable, jax_compat.Literal) else id(variable)
    return read


def depends_on_inputs(graph: Graph) -> set[int]:
    """The values that depend on the program's inputs."""
    dependent = set(graph.inputs)
    for op in graph.ops:
        if not dependent.isdisjoint(op.inputs):
            dependent.update(op.outputs)
    return dependent
