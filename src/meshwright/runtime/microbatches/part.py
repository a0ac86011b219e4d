"""The program of one part of a batch: operations of the step, with their ids, on parts of its values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshwright import jax_compat
from meshwright.program.parts import added, part_of
from meshwright.program.program import Operation, Program
from meshwright.runtime.microbatches.batch_parts import Analysis
from meshwright.runtime.microbatches.cut_operations import CannotCut

Key = tuple[int, int | None]  # a value as it is for a part; or an alike value, cut along a dim
INDEX: Key = (-1, None)  # the number of the part
INDEX_TYPE = jax.core.ShapedArray((), jnp.dtype(jnp.int32))


class Piece(NamedTuple):
    """What a part computes of one operation of the step.

    Attributes:
        unit: The operation of the step.
        ins, outs: The values that it reads and computes.
        operations: What it runs, in the numbers of the part's program.
    """

    unit: Operation
    ins: tuple[Key, ...]
    outs: tuple[Key, ...]
    operations: tuple[Operation, ...]

    @classmethod
    def whole(cls, unit: Operation) -> "Piece":
        """What runs an operation of the step as it is, in the numbers of the step."""
        ins, outs = (tuple((value, None) for value in side) for side in (unit.inputs, unit.outputs))
        return cls(unit, ins, outs, (unit,))


class BatchPart:
    """The program of one part, in pieces.

    Attributes:
        step: The step.
        program: The program that the pieces are of.
        numbers: The numbers of its values.
        pieces: What it computes, in order.
    """

    def __init__(self, step: Program, program: Program, numbers: dict[Key, int], pieces: Iterable[Piece] = ()):
        self.step, self.program, self.numbers, self.pieces = step, program, numbers, list(pieces)

    def whole(self, unit: Operation) -> Piece:
        """The piece that runs an operation of the step as it is, on values that are alike for all parts."""
        piece = Piece.whole(unit)
        read, made = (tuple(map(self.number, keys)) for keys in (piece.ins, piece.outs))
        return piece._replace(operations=(unit._replace(inputs=read, outputs=made),))

    def number(self, key: Key) -> int:
        """The number of a value; new ones are alike for all parts."""
        if key not in self.numbers:
            value, kind = key[0], self.step.types[key[0]]
            if value in self.step.constants:
                self.numbers[key] = self.program.add_constant(self.step.constants[value], kind)
            else:
                self.numbers[key] = self.program.add_value(kind)
        return self.numbers[key]

    def region(self, pieces: Iterable[Piece], inputs: Iterable[Key], outputs: Iterable[Key]) -> Program:
        """Some of the pieces as a program, which takes the number of the part before its inputs."""
        operations = [operation for piece in pieces for operation in piece.operations]
        given, made = (list(map(self.number, keys)) for keys in ((INDEX, *inputs), outputs))
        return part_of(self.program, given, operations, made)


class Writing:
    """Writes the program for a part of a step, or of a region, operation by operation.

    Args:
        analysis: How the values of the step or region depend on the batch.
        inputs: What it is given.
        dtypes: The dtypes of inputs that are not those of the step: of sums that are widened.

    Attributes:
        program: The program.
        numbers: The numbers of its values.
    """

    def __init__(self, analysis: Analysis, inputs: Sequence[Key], dtypes: Sequence[Any] | None = None):
        self.analysis = analysis
        kinds = [self.kind(key) for key in inputs]
        if dtypes is not None:
            kinds = [kind.update(dtype=dtype) for kind, dtype in zip(kinds, dtypes, strict=True)]
        self.program = Program(kinds, range(len(kinds)))
        self.numbers: dict[Key, int] = dict(zip(inputs, self.program.inputs, strict=True))

    def kind(self, key: Key) -> jax.core.ShapedArray:
        """The type that a value of the step has for a part."""
        if key == INDEX:
            return INDEX_TYPE
        value, dim = key
        status, aval = self.analysis.status[value], self.analysis.program.types[value]
        along = status if dim is None and isinstance(status, int) else dim
        return aval if along is None else aval.update(shape=self.analysis.cut.shape(aval.shape, along))

    def number(self, key: Key) -> int:
        """The number of a value; constants are added where they are read."""
        if key not in self.numbers:
            (value, dim), source = key, self.analysis.program
            assert dim is None and value in source.constants, "a part reads a value before it is computed"
            self.numbers[key] = self.program.add_constant(source.constants[value], source.types[value])
        return self.numbers[key]

    def dtype(self, key: Key) -> np.dtype:
        """The dtype of a value for a part."""
        return self.program.types[self.number(key)].dtype

    def add_computed(self, function: Callable[..., Any], operands: Sequence[int]) -> list[int]:
        """Adds what a function computes of some values, as operations that no plan knows; its results."""
        operations, made = added(self.program, function, operands)
        self.program.operations.extend(operations)
        return made

    def add_on_part(
        self, unit: Operation, params: dict[str, Any], operands: Sequence[int], outs: Iterable[Key]
    ) -> None:
        """Adds an operation with some parameters on operands of the part."""
        kinds = [self.program.types[number] for number in operands]
        try:
            equation = jax_compat.on_types(unit.equation, kinds, params)
        except (TypeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CannotCut(f"{unit} does not run on a part of the batch: {reason}") from error
        made = tuple(self.program.add_value(variable.aval) for variable in equation.outvars)
        self.program.operations.append(unit._replace(equation=equation, inputs=tuple(operands), outputs=made))
        numbers = dict(zip(unit.outputs, made, strict=True))
        for key in outs:
            found, expected = self.program.types[numbers[key[0]]].shape, self.kind(key).shape
            if found != expected:
                raise CannotCut(f"{unit} gives {found} for a part of the batch, not {expected}")
            self.numbers[key] = numbers[key[0]]
