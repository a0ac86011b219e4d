"""A program without its user's checkpoints: what they compute again is read from the forward pass instead.

The body of a checkpoint is inlined, and each operation in it that the forward pass has run already, on equal operands,
is left out. What is left of it, such as a derivative that only the backward pass needs, stays where it was.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np

from meshwright import jax_compat
from meshwright.program.parts import Moving
from meshwright.program.program import Operation, Program


def without_checkpoints(program: Program) -> Program:
    """The program with its checkpoints inlined and their work merged with equal work done before."""
    whole = program.copy()
    if any(operation.is_checkpoint for operation in program.operations):
        whole.operations[:] = _Merging(whole).operations(program.operations)
    return whole


class _Merging:
    """Inlines checkpoints; equal operations outside of them are left alone, since the compiler merges those."""

    def __init__(self, program: Program):
        self.program = program
        self.known: dict[Hashable, tuple[int, ...]] = {}  # results by primitive, parameters and operands
        self.same: dict[int, int] = {}  # values that stand for others
        self.equal: dict[int, int] = {}  # values that are computed twice, each with the first of its equals

    def operations(self, operations: Iterable[Operation]) -> list[Operation]:
        kept: list[Operation] = []
        for operation in operations:
            kept += self._inlined(operation, (), inside=False)
        self.program.outputs[:] = [self.same.get(value, value) for value in self.program.outputs]
        return kept

    def _inlined(self, operation: Operation, calls: tuple[Any, ...], inside: bool) -> list[Operation]:
        inputs = tuple(self.same.get(value, value) for value in operation.inputs)
        operation = operation._replace(inputs=inputs, calls=(*calls, *operation.calls))
        if operation.is_checkpoint and operation.regions:
            return self._region(operation)
        key = self._key(operation)
        before = operation.outputs if key is None else self.known.setdefault(key, operation.outputs)
        if before is not operation.outputs:
            (self.same if inside else self.equal).update(zip(operation.outputs, before, strict=True))
        if not inside:
            return [operation]
        if before is not operation.outputs:
            return []
        # Nothing did it before, so that it is no longer done again.
        return [operation._replace(equation=jax_compat.as_first(operation.equation)) if key else operation]

    def _region(self, checkpoint: Operation) -> list[Operation]:
        """The operations of a checkpoint, on values of the program around it."""
        (body,) = checkpoint.regions
        moving = Moving(body, self.program, dict(zip(body.inputs, checkpoint.inputs, strict=True)))
        kept: list[Operation] = []
        for operation in map(moving.operation, body.operations):
            kept += self._inlined(operation, (*checkpoint.calls, checkpoint.equation), inside=True)
        made = map(moving.number, body.outputs)
        self.same.update((outer, self.same.get(new, new)) for outer, new in zip(checkpoint.outputs, made, strict=True))
        return kept

    def _key(self, operation: Operation) -> Hashable | None:
        """What equal operations have in common; None where they need not have equal results."""
        equation = operation.equation
        if equation.effects:
            return None
        params = tuple(sorted((name, _hashable(value)) for name, value in equation.params.items()))
        key = (operation.name, params, tuple(map(self._operand, operation.inputs)))
        return key + tuple(v.aval for v in equation.outvars)

    def _operand(self, value: int) -> Hashable:
        """A value, or the number that it is known to be."""
        constant = self.program.constants.get(value)
        if constant is None or not jax_compat.is_literal(constant, self.program.types[value]):
            return self.equal.get(value, value) if constant is None else ("array", id(constant))
        return "number", self.program.types[value].dtype, np.asarray(constant).tobytes()


def _hashable(value: Any) -> Hashable:
    """A parameter as something that can be compared: objects that cannot be read in full stand for themselves."""
    if isinstance(value, tuple | list):
        return type(value).__name__, tuple(map(_hashable, value))
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, jax_compat.ClosedJaxpr):
        return str(value.jaxpr), tuple(map(id, value.consts))
    if isinstance(value, jax_compat.Jaxpr):
        return str(value)
    if (callable(value) and not isinstance(value, type)) or type(value).__repr__ is object.__repr__:
        return id(value)
    return type(value).__name__, repr(value)
