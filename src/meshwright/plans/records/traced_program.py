"""The traced program of a record: operations as columns, with the tables that they index."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from meshwright.arrays import Floats, Ints

Dims = Sequence[Sequence[int]]

VIRTUAL = -1  # the assignment of an operation that every reader repeats for itself


@dataclass(frozen=True)
class Kept:
    """Plain data that packs itself field by field."""

    def to_data(self) -> dict[str, Any]:
        return {f.name: _to_data(getattr(self, f.name)) for f in fields(self)}


def _to_data(value: Any) -> Any:
    if isinstance(value, Kept):
        return value.to_data()
    return [_to_data(v) for v in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Nest(Kept):
    """The loop nest of operations with one signature; fields as in `rules.LoopNest`, types by number."""

    sizes: Sequence[int]
    kinds: Sequence[str]
    operands: Sequence[Dims]
    results: Sequence[Dims]
    flops: float


@dataclass(frozen=True)
class RecordedProgram(Kept):
    """The traced program, operations as columns.

    Attributes:
        types: ``(shape, dtype, itemsize)`` of each type.
        kind: Number of each value's type.
        code: Sharding in which each value is made; 0 for virtual ones.
        inputs, outputs: Paths of the arguments, whose values are the first ones; paths of the results.
        made: Value of each result.
        taken: For each result the argument whose next value it is; -1 for none.
        nests, labels, sources, assignments: The tables that the columns below index. An assignment has one loop an
        axis.
        nest, label, source, assignment: Of each operation.
        phases, phase: Names of the phases, and the number of each operation's.
        trips: How often it runs in one step (of a stage: for one microbatch); 0 for other stages' operations.
        reads, start: Values read, operation after operation, and where they begin.
        first_made: The first value it makes; the others follow.
        node: Its node in the problem; -1 for virtual ones.
        run, lap: The repeated stretch of the program it belongs to, and which repetition; -1 for none.
    """

    types: Sequence[tuple[Sequence[int], str, int]]
    kind: Ints
    code: Ints
    inputs: Sequence[str]
    outputs: Sequence[str]
    made: Ints
    taken: Ints
    nests: Sequence[Nest]
    labels: Sequence[str]
    sources: Sequence[str]
    assignments: Sequence[Sequence[int]]
    nest: Ints
    label: Ints
    source: Ints
    assignment: Ints
    phases: Sequence[str]
    phase: Ints
    trips: Floats
    reads: Ints
    start: Ints
    first_made: Ints
    node: Ints
    run: Ints
    lap: Ints

    @property
    def num_ops(self) -> int:
        return len(self.nest)

    @cached_property
    def running(self) -> list[int]:
        """The operations that run at all."""
        return np.flatnonzero(self.trips > 0).tolist()

    @cached_property
    def touched(self) -> set[int]:
        """The values that running operations read or make, and arguments that none reads at all."""
        values = {v for op in self.running for v in (*self.reads_of(op), *self.made_by(op))}
        return values | set(range(len(self.inputs))) - set(self.reads.tolist())

    def reads_of(self, op: int) -> list[int]:
        return self.reads[self.start[op] : self.start[op + 1]].tolist()

    def made_by(self, op: int) -> list[int]:
        first = int(self.first_made[op])
        return list(range(first, first + len(self.nests[self.nest[op]].results)))

    def shape(self, value: int) -> tuple[int, ...]:
        return tuple(self.types[self.kind[value]][0])

    def primitive(self, op: int) -> str:
        return self.labels[self.label[op]].rpartition("/")[2]

    @cached_property
    def producer(self) -> Ints:
        """The operation that makes each value; -1 for arguments and constants."""
        producers = np.full(len(self.kind), -1)
        count = np.array([len(nest.results) for nest in self.nests], np.int64)[self.nest]
        within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        producers[np.repeat(self.first_made, count) + within] = np.repeat(np.arange(self.num_ops), count)
        return producers
