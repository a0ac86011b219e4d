"""The kernels that XLA's CPU backend makes of a program: which values they write, and which of them each one reads.

Read off its sources and what it compiles:

- Products, convolutions, reductions and the like are calls to a library, which reads and writes memory. A sum takes in
  multiplications that nobody else reads.
- Elementwise work is fused into its readers and done again in each of them, unless it is costly or, reading several
  large operands, it is written for a library call anyway. A call that first reshapes or transposes what it reads does
  not count there: it reads a copy of its own, into which all of that is fused.
- Values scattered into zeros that are added to something else are scattered into that, in place.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.graph import Graph
from meshwright.graph.liveness import COSTLY, Facts
from meshwright.rules.base import LoopNest, Signature

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class Kernels:
    """The kernels of a graph.

    Attributes:
        stored: Whether a value is written to memory.
        reads: For each operation that is a kernel, the stored values it reads, itself or through what is fused into it.
        copies: ``(operation, operand)`` where a contraction reads a transposed copy of what is stored as well.
    """

    def __init__(self, graph: Graph, nests: Sequence[LoopNest]):
        self.graph, self.columns, self._facts = graph, graph.columns, Facts(graph, nests)
        self._calls = self._library_calls()
        self._operands = self._scattered_in_place()
        self._reader = np.repeat(np.arange(len(self._operands)), [len(found) for found in self._operands])
        self._read = np.array([v for found in self._operands for v in found], np.int64)
        self._producer = self.columns.producer.tolist()
        self.stored, self._again = self._decide()
        self._known: dict[int, frozenset[int]] = {}
        self.reads, self.copies = self._find()

    def _where(self, *names: str) -> Bools:
        return self._facts.where(lambda name, _: name in names)

    def _library_calls(self) -> Bools:
        """Operations that read and write memory, with the multiplications that are part of a sum."""
        facts, columns = self._facts, self.columns
        found = ~facts.fusible
        sums = self._where("reduce_sum")
        reader = np.full(columns.num_values, -1)
        reader[columns.reads] = columns.reader
        once = facts.num_readers[columns.first_made] == 1
        once[[columns.producer[v] for v in facts.ends if columns.producer[v] >= 0]] = False
        self._inside = np.zeros(len(found), bool)
        for index in np.flatnonzero(self._where("mul", "square", "integer_pow") & once)[::-1].tolist():
            by = reader[columns.first_made[index]]
            self._inside[index] = sums[by] or self._inside[by]
        return found | self._inside

    def _scattered_in_place(self) -> list[list[int]]:
        """What each operation reads, with a sum of scattered values and others made by the scattering itself."""
        columns, facts = self.columns, self._facts
        reads = columns.reads.tolist()
        found = [reads[a:b] for a, b in pairwise(columns.start.tolist())]
        self._in_place: dict[int, int] = {}  # scattering operation: what it is scattered into
        instead: dict[int, int] = {}
        scatters, spread = self._where("scatter-add"), self._where("broadcast_in_dim")
        for index in np.flatnonzero(self._where("add", "add_any")).tolist():
            for value, other in (found[index], found[index][::-1]):
                maker = columns.producer[value]
                if maker < 0 or not scatters[maker] or facts.num_readers[value] > 1 or value == other:
                    continue
                zeros = columns.producer[found[maker][0]]
                if zeros >= 0 and spread[zeros] and self.graph.sizes[other] == self.graph.sizes[value]:
                    instead[int(columns.first_made[index])] = value
                    self._in_place[int(maker)] = other
                    break
        negated = self._where("neg")
        for index in np.flatnonzero(self._where("reduce_sum")).tolist():  # a negation is done after the sum
            maker = columns.producer[found[index][0]]
            if maker >= 0 and negated[maker]:
                found[index] = found[maker]
        for maker, other in self._in_place.items():
            found[maker] = [other, *found[maker][1:]]
        return [[instead.get(v, v) for v in each] for each in found] if instead else found

    def _decide(self) -> tuple[list[bool], list[bool]]:
        """Whether each value is stored, and whether fused readers make it again although it is."""
        facts, columns = self._facts, self.columns
        inside, fused = np.zeros(columns.num_values, bool), np.zeros(columns.num_values, bool)
        inside[columns.first_made[self._inside]] = True
        inside[list(self._in_place.values())] = True
        fused[facts.made] = facts.fusible[facts.maker]
        by_call = self._calls[self._reader] & ~inside[self._read]
        costly, carried = np.zeros((2, columns.num_values), bool)
        costly[facts.made] = self._costly()[facts.maker]
        carried[facts.made] = self._where("loop_carry")[facts.maker]
        carried[facts.ends] = True
        stored = ~fused & (columns.producer >= 0)
        stored[self._read[by_call]] = True
        stored |= carried | (costly & (facts.num_readers > 1))
        stored[list(self.graph.inputs)] = True
        stored[list(self.graph.constants)] = False
        whole = np.zeros(columns.num_values, bool)  # read by a call as it is
        whole[self._read[by_call & ~self._own_copies()]] = True
        several = np.zeros(columns.num_values, bool)
        several[facts.made] = self._reads_several()[facts.maker]
        return stored.tolist(), (fused & ~carried & ~costly & ~(several & whole)).tolist()

    def _costly(self) -> Bools:
        """Work that is not done twice; a division by what is broadcast becomes a multiplication by its reciprocal."""
        columns, found = self.columns, self._facts.where(lambda name, _: name in COSTLY)
        divides = np.flatnonzero(self._where("div"))
        by, size = columns.reads[columns.start[divides] + 1], self.graph.sizes
        found[divides[self._spread()[by] | (size[by] < size[columns.first_made[divides]])]] = False
        return found

    def _spread(self) -> Bools:
        """Values that are broadcast, or the same everywhere."""
        found = np.zeros(self.columns.num_values, bool)
        found[self._facts.made] = self._where("broadcast_in_dim", "iota")[self._facts.maker]
        found[list(self.graph.constants)] = True
        return found

    def _own_copies(self) -> Bools:
        """Reads by products that reshape or transpose what they read."""
        first = np.concatenate([[0], np.cumsum([len(found) for found in self._operands])])
        found = np.zeros(len(self._read), bool)
        for index, layouts in self._contractions():
            for side, (plain, natural) in enumerate(layouts):
                found[first[index] + side] = not (plain and natural)
        return found

    def _contractions(self) -> Iterator[tuple[int, tuple[tuple[bool, bool], ...]]]:
        """Products and convolutions, with how each of them reads its operands."""
        signatures, numbers = self.columns.signatures, self.columns.signature
        layouts = {n: _LAYOUTS[s.primitive](s) for n, s in enumerate(signatures) if s.primitive in _LAYOUTS}
        for index in np.flatnonzero(self._where(*_LAYOUTS)).tolist():
            yield index, layouts[numbers[index]]

    def _reads_several(self) -> Bools:
        """Operations that read more than one operand as large as their result, and more bytes than they write."""
        columns, graph, count = self.columns, self.graph, len(self._operands)
        num_bytes = np.array([kind.num_bytes for kind in graph.kinds], np.int64)[graph.kind]
        read, reader = columns.reads, columns.reader
        large = ~self._spread()[read] & (graph.sizes[read] >= graph.sizes[columns.first_made[reader]])
        more = np.bincount(reader, num_bytes[read], count) > num_bytes[columns.first_made]
        return (np.bincount(reader[large], minlength=count) > 1) & more

    def _find(self) -> tuple[dict[int, frozenset[int]], list[tuple[int, int]]]:
        columns = self.columns
        first, count, fusible = columns.first_made.tolist(), columns.num_made.tolist(), self._facts.fusible.tolist()
        found = {
            index: self._sources(index)
            for index in range(len(first))
            if not fusible[index] or any(self.stored[first[index] : first[index] + count[index]])
        }
        copies = []
        for index, layouts in self._contractions():
            for side, (_, natural) in enumerate(layouts):
                value = self._operands[index][side]
                maker = self._producer[value]
                if natural or (maker >= 0 and fusible[maker] and self._facts.num_readers[value] == 1):
                    continue  # what only one product reads is made in its layout
                copies.append((index, side))
                if self.stored[value] and self._again[value]:
                    found[index] = (found[index] - {value}) | self._sources(maker)
        return found, copies

    def _sources(self, index: int) -> frozenset[int]:
        """The stored values that an operation reads, itself or through what is fused into it."""
        known = self._known.get(index)
        if known is not None:
            return known
        found: set[int] = set()
        stack, seen = [index], {index}
        while stack:
            at = stack.pop()
            for value in self._operands[at]:
                maker = self._producer[value]
                if not self._fuses(at, value):
                    found.add(value)
                elif maker >= 0 and maker not in seen:
                    seen.add(maker)
                    if maker in self._known and not self._calls[maker]:
                        found |= self._known[maker]
                    else:
                        stack.append(maker)
        self._known[index] = frozenset(found)
        return self._known[index]

    def _fuses(self, index: int, value: int) -> bool:
        """Whether an operation makes a value that it reads within its own kernel."""
        soft = not self._calls[index] or self._in_place.get(index) == value
        return not self.stored[value] or (soft and self._again[value])

    def last(self, step: Ints) -> Ints:
        """When each operation runs for the last time, given when it runs first."""
        last = step.tolist()
        for index in range(len(last) - 1, -1, -1):
            for value in self._operands[index]:
                maker = self._producer[value]
                if maker >= 0 and self._fuses(index, value):
                    last[maker] = max(last[maker], last[index])
        for index, side in self.copies:  # a copy in another layout fuses what is made again
            value = self._operands[index][side]
            maker = self._producer[value]
            if maker >= 0 and self._again[value]:
                last[maker] = max(last[maker], last[index])
        return np.array(last, np.int64)


def _of_product(op: Signature) -> tuple[tuple[bool, bool], ...]:
    """For each operand, whether it is a matrix already, and whether its dims are in the library's order."""
    contract, batch = op.params["dimension_numbers"]
    found = []
    for side, kind in enumerate(op.operands[:2]):
        dims, summed, along = range(len(kind.shape)), tuple(contract[side]), tuple(batch[side])
        free = tuple(d for d in dims if d not in summed and d not in along)
        orders = [(*along, *free, *summed)] + ([(*along, *summed, *free)] if side else [])
        found.append((max(len(free), len(summed)) <= 1, tuple(dims) in orders))
    return tuple(found)


def _of_convolution(op: Signature) -> tuple[tuple[bool, bool], ...]:
    """The same of a convolution: images are read with features last, kernels with those of results last."""
    dims = op.params["dimension_numbers"]
    last, inner = len(dims.lhs_spec) - 1, tuple(range(1, len(dims.lhs_spec) - 1))
    images, kernel = (0, last, *inner), (last, last - 1, *range(last - 1))
    return (True, tuple(dims.lhs_spec) == images), (True, tuple(dims.rhs_spec) == kernel)


_LAYOUTS = {"dot_general": _of_product, "conv_general_dilated": _of_convolution}
