"""The Graph: a traced function as one flat list of operations on values, with the source of each operation."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import compress, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright import jax_compat
from meshwright.arrays import Ints
from meshwright.graph.columns import Lazy
from meshwright.graph.dtypes import widens
from meshwright.graph.phases import BACKWARD as BACKWARD
from meshwright.graph.phases import FORWARD as FORWARD
from meshwright.graph.phases import PHASES, UPDATE, assign_phases
from meshwright.rules.base import Signature, TensorType


class Op(NamedTuple):
    """One operation.

    Attributes:
        signature: Primitive, parameters and types; shared by equal operations.
        inputs: Ids of the values it reads.
        outputs: Ids of the values it computes.
        scope: Name scopes around it, outermost first.
        phase: ``forward``, ``backward`` or ``update``.
        trips: How often it runs in one step: more than once inside loops.
        recomputed: Whether it repeats forward work because of `jax.checkpoint`.
        serial: Its position in the order in which the traced program is walked; removing operations does not change it.
        equation: The JAX equation it represents, None for the tracer's own operations.
    """

    signature: Signature
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: str
    phase: str
    trips: float
    recomputed: bool
    serial: int
    equation: Any

    @property
    def primitive(self) -> str:
        return self.signature.primitive

    @property
    def label(self) -> str:
        """A readable name: scopes and primitive."""
        return f"{self.scope}/{self.primitive}" if self.scope else self.primitive

    @property
    def source(self) -> str:
        """The user's source line."""
        return jax_compat.source_line(self.equation) if self.equation is not None else ""


@dataclass(frozen=True, slots=True)
class Tie:
    """A loop's carry: the value computed by one trip replaces the value read by the next."""

    made: int
    carry: int
    trips: float


class While(NamedTuple):
    """A `while` loop of a flat graph.

    Attributes:
        start, stop: The range of its operations.
        trips: How often it is assumed to run.
        known: How that is known: one of the words of `rules.base`.
        source: Where the user wrote it.
        id: The id of its operation.
    """

    start: int
    stop: int
    trips: float
    known: str
    source: str
    id: int


@dataclass(frozen=True)
class Columns:
    """Operations as columns, with one entry for each: passes over thousands of operations read these.

    Attributes:
        signature: Number of the operation's signature among `signatures`.
        reads: Values read, operation after operation: operation ``i`` reads ``reads[start[i] : start[i + 1]]``.
        start: Where each operation's reads begin, and where the last ones end.
        first_made: The first result; the others follow it.
        scope: Number of its scope among `scopes`.
        trips, serial, equation: As in `Op`.
        num_values: How many values there are.
        signatures: All signatures.
        scopes: All scopes.
    """

    signature: Ints
    reads: Ints
    start: Ints
    first_made: Ints
    scope: Ints
    trips: NDArray[np.float64]
    serial: Ints
    equation: Sequence[Any]
    num_values: int
    signatures: Sequence[Signature]
    scopes: Sequence[str]

    def only(self, kept: NDArray[np.bool_]) -> "Columns":
        """The same without some of the operations."""
        if kept.all():
            return self
        num_reads = np.diff(self.start)
        return replace(
            self,
            signature=self.signature[kept],
            reads=self.reads[np.repeat(kept, num_reads)],
            start=np.concatenate([[0], np.cumsum(num_reads[kept])]),
            first_made=self.first_made[kept],
            scope=self.scope[kept],
            trips=self.trips[kept],
            serial=self.serial[kept],
            equation=list(compress(self.equation, kept.tolist())),
        )

    def reads_of(self, index: int) -> Ints:
        """The values that one operation reads."""
        return self.reads[self.start[index] : self.start[index + 1]]

    def primitive(self, index: int) -> str:
        """The primitive of one operation."""
        return self.signatures[self.signature[index]].primitive

    @cached_property
    def examples(self) -> dict[int, int]:
        """For the number of each signature in use, the first operation that has it."""
        first = np.full(len(self.signatures), -1)
        first[self.signature[::-1]] = np.arange(len(self.signature))[::-1]
        used = np.flatnonzero(first >= 0)
        return dict(zip(used.tolist(), first[used].tolist(), strict=True))

    @cached_property
    def num_made(self) -> Ints:
        """The number of results of each operation."""
        return np.array([len(s.results) for s in self.signatures], np.int64)[self.signature]

    @cached_property
    def reader(self) -> Ints:
        """For each entry of `reads`, the operation that reads it."""
        return np.repeat(np.arange(len(self.signature)), np.diff(self.start))

    @cached_property
    def read_trips(self) -> NDArray[np.float64]:
        """How often an operation's operands are resharded for it; inputs that a loop slices: once, before the loop."""
        lengths = [s.operands[0].shape[0] if s.primitive == "loop_slice" else 1 for s in self.signatures]
        return self.trips / np.maximum(lengths, 1)[self.signature]

    @cached_property
    def producer(self) -> Ints:
        """Index of the operation that computes each value; -1 for inputs and constants."""
        found = np.full(self.num_values, -1)
        for nth in range(self.num_made.max(initial=0)):
            which = np.flatnonzero(self.num_made > nth)
            found[self.first_made[which] + nth] = which
        return found

    @cached_property
    def phase(self) -> Ints:
        """Number of an operation's phase among `PHASES`."""
        return assign_phases(self.scope, self.scopes, self.producer[self.reads], self.start)


class Ops(Lazy[Op]):
    """A graph's operations in the order they run, built from its columns."""

    def __init__(self, columns: Columns):
        super().__init__(len(columns.signature))
        self._columns = columns
        self._recomputed = [jax_compat.is_recomputed(scope) for scope in columns.scopes]

    def _make(self, first: int, stop: int) -> Iterable[Op]:
        c, some = self._columns, slice(first, stop)
        start, scopes = c.start[first : stop + 1], c.scope[some].tolist()
        reads = c.reads[start[0] : start[-1]].tolist()
        made = zip(c.first_made[some].tolist(), c.num_made[some].tolist(), strict=True)
        rows = zip(
            [c.signatures[number] for number in c.signature[some].tolist()],
            [tuple(reads[a:b]) for a, b in pairwise((start - start[0]).tolist())],
            [(value,) if count == 1 else tuple(range(value, value + count)) for value, count in made],
            [c.scopes[number] for number in scopes],
            [PHASES[number] for number in c.phase[some].tolist()],
            c.trips[some].tolist(),
            [self._recomputed[number] for number in scopes],
            c.serial[some].tolist(),
            c.equation[some],
            strict=True,
        )
        return map(partial(tuple.__new__, Op), rows)


@dataclass(frozen=True)
class Graph:
    """A traced function.

    Attributes:
        kinds: All types that values have.
        kind: Number of each value's type among them; `types` has the types themselves.
        columns: Operations in the order they run, as columns; `ops` has them one by one.
        inputs: Value ids of the arguments' leaves, whose paths are `input_paths`.
        outputs: Value ids of the results' leaves, whose paths are `output_paths`.
        constants: Values that are known without running anything.
        donated: Ids of the inputs whose memory the results may take over.
        ties: Loop carries.
        loops: Index ranges ``[start, stop)`` of operations that repeat, outer loops too.
        whiles: Those of them that are `while` loops, and how often they are assumed to run.
        branches: Index ranges of operations that are alternatives, of which one runs.
        state: For each output position, the input position whose next value it is.
        on_cpu: Whether its types are those of XLA's CPU backend.
        microbatches: Into how many parts, run one after the other, its batch is cut.
        batch_argnums: Positions of the arguments that are cut; none where the batch is whole.
        recompute: What its backward pass computes again, in a word of `runtime.recomputation`.
    """

    kinds: tuple[TensorType, ...]
    kind: Ints
    columns: Columns
    inputs: tuple[int, ...]
    input_paths: tuple[str, ...]
    outputs: tuple[int, ...]
    output_paths: tuple[str, ...]
    constants: frozenset[int]
    donated: frozenset[int]
    ties: tuple[Tie, ...]
    loops: tuple[tuple[int, int], ...]
    whiles: tuple[While, ...]
    branches: tuple[tuple[int, int], ...]
    state: Mapping[int, int]
    on_cpu: bool = False
    microbatches: int = 1
    batch_argnums: tuple[int, ...] = ()
    recompute: str = "as written"

    @cached_property
    def ops(self) -> Ops:
        """The operations, one by one."""
        return Ops(self.columns)

    @cached_property
    def types(self) -> tuple[TensorType, ...]:
        """Type of each value, by value id."""
        return tuple([self.kinds[number] for number in self.kind.tolist()])

    @cached_property
    def body(self) -> Ints:
        """For each operation a number for the innermost body of a loop or branch in which it reads; 0 for none.

        The initial carries of a loop and the inputs that it slices are read before it.
        """
        found, around = np.zeros(len(self.columns.signature), np.int64), [0]
        for number, (first, end) in enumerate(sorted((*self.loops, *self.branches), key=lambda r: r[0] - r[1]), 1):
            around.append(int(found[first]))
            found[first:end] = number
        before = np.array([s.primitive in ("loop_carry", "loop_slice") for s in self.columns.signatures], bool)
        return np.where(before[self.columns.signature], np.array(around)[found], found)

    @cached_property
    def sizes(self) -> Ints:
        """Number of elements of each value."""
        return np.array([prod(kind.shape) for kind in self.kinds], np.int64)[self.kind]

    @cached_property
    def num_bytes(self) -> Ints:
        """Bytes of each whole value."""
        return np.array([kind.num_bytes for kind in self.kinds], np.int64)[self.kind]

    @cached_property
    def sent_itemsize(self) -> Ints:
        """Bytes of one element of each value while it is resharded: a widened value is sent in its narrow form."""
        columns = self.columns
        sent = cpu_itemsize if self.on_cpu else (lambda _, itemsize: itemsize)
        found = np.array([sent(kind.dtype, kind.itemsize) for kind in self.kinds], np.int64)[self.kind]
        for number, signature in enumerate(columns.signatures):
            if widens(signature):
                found[columns.first_made[columns.signature == number]] = signature.operands[0].itemsize
        return found

    def for_cpu(self) -> "Graph":
        """The graph with the types of XLA's CPU backend, which computes and sends bfloat16 as float32.

        There the memory of the host is that of the devices.

        Arguments, results and values that the program itself converts are bfloat16 in memory, and float32 when sent.
        """
        other = np.array([_for_cpu(kind) != kind for kind in self.kinds], bool)
        if not other.any():
            return self
        columns, signatures, changed = self.columns, list(self.columns.signatures), other[self.kind]
        changed[[*self.inputs, *self.outputs]] = False
        for number, one in enumerate(signatures):
            results = tuple(map(_for_cpu, one.results))
            if one.primitive == "convert_element_type":
                results = one.results
                changed[columns.first_made[columns.signature == number]] = False
            signatures[number] = replace(one, operands=tuple(map(_for_cpu, one.operands)), results=results)
        return replace(
            self,
            kinds=(*self.kinds, *map(_for_cpu, self.kinds)),
            kind=self.kind + len(self.kinds) * changed,
            columns=replace(columns, signatures=signatures),
            on_cpu=True,
        )

    @cached_property
    def producer(self) -> dict[int, int]:
        """Index of the operation that computes each value; inputs and constants have none."""
        made = np.flatnonzero(self.columns.producer >= 0)
        return dict(zip(made.tolist(), self.columns.producer[made].tolist(), strict=True))

    @cached_property
    def read_before_update(self) -> NDArray[np.bool_]:
        """Whether a value is read by forward or backward operations."""
        found = np.zeros(self.columns.num_values, bool)
        found[self.columns.reads[self.columns.phase[self.columns.reader] != PHASES.index(UPDATE)]] = True
        return found


def cpu_itemsize(dtype: str, itemsize: int) -> int:
    """Bytes of one element as XLA's CPU backend computes and sends it: it has no native bfloat16."""
    return 4 if dtype == "bfloat16" else itemsize


def _for_cpu(kind: TensorType) -> TensorType:
    return replace(kind, itemsize=cpu_itemsize(kind.dtype, kind.itemsize), on_host=False)
