"""The kernels that XLA's CPU backend makes of a program: which values they write, and which of them each one reads.

Read off its sources and what it compiles; `simplified.py` says what it sees of the program:

- Elementwise work is fused into its readers and done again in each of them, unless it is costly and has several; or
  unless it reads several large operands and some reader cannot take it in, be it a call or an operation that also
  reads what a call makes of it. Then it is written once.
- To narrow is costly, to widen is not (`conversions.py`): what several kernels read is written narrow, what one of them
  reads as it is computed. What is converted for a loop is written before it.
- What a call reads in a layout of its own is a *view*, written by itself and shared by the calls that read it alike:
  work that may be done again is done in the view, anything else is copied if it must be transposed, and is read where
  it lies if it must only be reshaped.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.conversions import contexts, narrows
from meshwright.graph.facts import COSTLY
from meshwright.graph.graph import Graph
from meshwright.graph.simplified import Layout, Simplified, Split
from meshwright.rules.base import LoopNest, Signature

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


class View(NamedTuple):
    """A value as some products read it.

    Attributes:
        value: The value.
        op, operand: One of the products, and which of its operands it is.
        is_transposed: Whether dims change places; if not, they are only merged.
    """

    value: int
    op: int
    operand: int
    is_transposed: bool


class Kernels:
    """The kernels of a graph; values and operations beyond its own are views, and the kernels that write them.

    Attributes:
        stored: Whether a value is written to memory as it is.
        views: Those that are written.
        reads: For each kernel the stored values and views it reads, itself or through what is fused into it.
        in_place: For each kernel those of them whose memory its result may take.
    """

    def __init__(self, graph: Graph, nests: Sequence[LoopNest], split: Split = Split()):  # noqa: B008
        """Finds the kernels; what is reduced over devices is written in any case."""
        self.graph, self.columns, self.program = graph, graph.columns, Simplified(graph, nests, split)
        self._costly, self._spreads = self._find_costly().tolist(), self._find_spreading()
        self._narrows, self._context = self._where(narrows), contexts(graph)
        self._converts = self.program.where("convert_element_type").tolist()
        self._gathers = self.program.where("gather").tolist()
        self._once = self._written_once()
        if any(self._narrows):
            self._write_narrow()
        self.stored, self.views, self._viewed = self._decide()
        self.reads, self.in_place = self._find()

    def _find_costly(self) -> Bools:
        """Work that is not done twice; a division by what is broadcast becomes a multiplication by its reciprocal."""
        columns, found = self.columns, self.program.facts.where(lambda name, _: name in COSTLY)
        divides = np.flatnonzero(self.program.where("div"))
        by, size = columns.reads[columns.start[divides] + 1], self.graph.sizes
        found[divides[self._spread()[by] | (size[by] < size[columns.first_made[divides]])]] = False
        return found

    def _where(self, test: Callable[[Signature], bool]) -> list[bool]:
        return np.array([test(s) for s in self.columns.signatures], bool)[self.columns.signature].tolist()

    def _find_spreading(self) -> list[bool]:
        """Operations whose results are fused into others that read each element several times."""
        first, size, program = self.columns.first_made.tolist(), self.graph.sizes.tolist(), self.program
        found = [False] * len(first)
        for index in range(len(first) - 1, -1, -1):
            value = first[index]
            by = (r for r in program.readers[value] if not program.calls[r])
            found[index] = any(found[r] or size[value] < size[first[r]] for r in by)
        return found

    def _spread(self) -> Bools:
        """Values that are broadcast, or the same everywhere."""
        found = np.zeros(self.columns.num_values, bool)
        found[self.program.facts.made] = self.program.where("broadcast_in_dim", "iota")[self.program.facts.maker]
        found[list(self.graph.constants)] = True
        return found

    def _reads_several(self) -> Bools:
        """Operations that read more than one operand as large as their result, and more bytes than they write."""
        columns, graph, count = self.columns, self.graph, len(self.program.operands)
        read, reader = columns.reads, columns.reader
        large = ~self._spread()[read] & (graph.sizes[read] >= graph.sizes[columns.first_made[reader]])
        distinct = np.unique(reader * columns.num_values + read, return_index=True)[1]
        more = np.bincount(reader[distinct], graph.sizes[read[distinct]], count) > graph.sizes[columns.first_made]
        return (np.bincount(reader[large], minlength=count) > 1) & more

    def _takes_in(self, index: int, value: int) -> bool:
        """Whether an operation would do the work that makes a value within its own kernel."""
        maker = self.program.producer[value]
        if maker < 0 or not self.program.fusible[maker]:
            return False
        if self._costly[maker] and (
            len(self.program.readers[value]) > 1 or value in self.program.ends or self._reuses(index, value)
        ):
            return False
        if index in self.program.layouts:
            pairs = zip(self.program.operands[index], self.program.layouts[index], strict=False)
            return all(layout for v, layout in pairs if v == value)
        if self._converts[maker] and self._context[index].loop != self._context[maker].loop:
            return False
        if self._gathers[index] and self._converts[maker]:
            return True
        return not self.program.calls[index] or self.program.inside[maker] or self.program.scattered.get(index) == value

    def _reuses(self, index: int, value: int) -> bool:
        """Whether the kernel that an operation is in reads each element of a value several times."""
        return self._spreads[index] or bool(self.graph.sizes[value] < self.graph.sizes[self.columns.first_made[index]])

    def _written_once(self) -> list[bool]:
        """Values read whole by several operations that are not made again, since some reader cannot take them in."""
        count, first = self.columns.num_values, self.columns.first_made.tolist()
        found, some = (
            [False] * count,
            [i for i in np.flatnonzero(self._reads_several()).tolist() if self.program.fusible[i]],
        )
        bit = {first[i]: 1 << n for n, i in enumerate(some)}
        made_from = [0] * count  # which of them each value is made from, as bits
        for index, values in enumerate(self.program.operands):
            bits = 0
            for value in values:
                bits |= made_from[value]
            for value in range(first[index], first[index] + int(self.columns.num_made[index])):
                made_from[value] = bits | bit.get(value, 0)
        for index in reversed(some):
            value, known = first[index], dict[int, bool]()
            by = self.program.readers[value]
            found[value] = value in self.program.ends or not all(
                self._on_all_paths(value, bit[value], reader, made_from, found, known) for reader in by
            )
        return found

    def _on_all_paths(
        self, value: int, bit: int, index: int, made_from: list[int], once: list[bool], known: dict[int, bool]
    ) -> bool:
        """Whether an operation takes a value in, and all that it reads and that is made from it."""
        if index not in known:
            known[index] = True
            for read in self.program.operands[index]:
                if made_from[read] & bit and (
                    once[read]
                    or not self._takes_in(index, read)
                    or (
                        read != value
                        and not self._on_all_paths(value, bit, self.program.producer[read], made_from, once, known)
                    )
                ):
                    known[index] = False
                    break
        return known[index]

    def _write_narrow(self) -> None:
        """Has narrowed values written where several kernels read them: to narrow is costly, to widen is not."""
        first, context = self.columns.first_made.tolist(), self._context
        doing: list[set[tuple[int, ...]]] = [set()] * len(first)  # two of the kernels in which an operation is done
        for index in range(len(first) - 1, -1, -1):
            found, made = set[tuple[int, ...]](), range(first[index], first[index] + int(self.columns.num_made[index]))
            for value, reader in ((v, reader) for v in made for reader in self.program.readers[v]):
                if not self._fuses(reader, value):
                    found.add((index,))
                elif reader in self.program.layouts:
                    side = self.program.operands[reader].index(value)
                    found.add((value, *(self.program.layouts[reader][side] or ())))
                else:
                    found |= doing[reader] or {(reader,)}
            if self._narrows[index]:
                by = self.program.readers[made[0]]
                apart = any(not context[reader].sees(context[index]) or self._spreads[reader] for reader in by)
                self._once[made[0]] = apart or len(found) > 1
            is_done = not self.program.fusible[index] or any(v in self.program.ends or self._once[v] for v in made)
            doing[index] = {(index,)} if is_done else set(sorted(found)[:2])

    def _fuses(self, index: int, value: int) -> bool:
        """Whether an operation makes a value that it reads within its own kernel."""
        return not self._once[value] and self._takes_in(index, value)

    def _decide(self) -> tuple[list[bool], list[View], dict[tuple[int, int], int]]:
        """Which values are stored as they are, which views are written, and which of them products read."""
        count, constants = self.columns.num_values, self.program.constants
        stored = [
            value not in constants
            and (
                maker < 0
                or not self.program.fusible[maker]
                or value in self.program.ends
                or any(not self._fuses(index, value) for index in self.program.readers[value])
            )
            for value, maker in enumerate(self.program.producer)
        ]
        for index in np.flatnonzero(self.program.where("reshape", "squeeze", "expand_dims")).tolist():
            value, source = int(self.columns.first_made[index]), self.program.operands[index][0]
            if value not in self.program.ends and stored[source] and not self._fuses(index, source):
                stored[value] = False  # it is the same memory
        views: dict[tuple[int, Layout], int] = {}
        found: list[View] = []
        viewed: dict[tuple[int, int], int] = {}
        for index, layouts in self.program.layouts.items():
            for side, (value, layout) in enumerate(zip(self.program.operands[index], layouts, strict=False)):
                again = self._fuses(index, value)
                if value in constants or layout is None or not (again or layout[0]):
                    continue
                if (value, layout) not in views:
                    views[value, layout] = count + len(found)
                    found.append(View(value, index, side, bool(layout[0])))
                viewed[index, side] = views[value, layout]
        return stored, found, viewed

    def _find(self) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
        """What each kernel reads, and which of it its result may take the place of."""
        columns, found, in_place = self.columns, dict[int, tuple[int, ...]](), dict[int, tuple[int, ...]]()
        first, made = columns.first_made.tolist(), columns.num_made.tolist()
        contracts = self.program.where("dot_general", "conv_general_dilated")
        for index in range(len(first)):
            if contracts[index]:
                found[index] = self._of_contraction(index)
            elif self.program.inside[index]:
                continue
            elif not self.program.fusible[index] or any(self.stored[first[index] : first[index] + made[index]]):
                found[index], alike = self._sources(index)
                if self.program.fusible[index]:
                    in_place[index] = alike
        for name, view in enumerate(self.views, len(first)):
            again = self._fuses(view.op, view.value)
            found[name] = self._sources(self.program.producer[view.value])[0] if again else self._memory_of(view.value)
        return found, in_place

    def _of_contraction(self, index: int) -> tuple[int, ...]:
        """What a contraction reads; one whose result is transposed is done the other way round."""
        found: list[int] = []
        for side, value in enumerate(self.program.operands[index]):
            view = self._viewed.get((index, side))
            found += self._memory_of(value) if view is None else (view,)
        by = self.program.readers[int(self.columns.first_made[index])]
        swapped = len(by) == 1 and self.columns.primitive(by[0]) == "transpose"
        return tuple(dict.fromkeys(reversed(found) if swapped else found))

    def _memory_of(self, value: int) -> tuple[int, ...]:
        """The stored value in whose memory a value is."""
        if self.stored[value] or self.program.producer[value] < 0:
            return () if value in self.program.constants else (value,)
        return self._sources(self.program.producer[value])[0]

    def _sources(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The stored values that an operation reads, itself or through what is fused into it, the latest first.

        The second are those that are read in no other place than where the result is written.
        """
        alike: dict[int, bool] = {}
        heap, bends = [-index], {index: self.program.bends[index]}
        while heap:
            at = -heappop(heap)
            for side, value in enumerate(self.program.operands[at]):
                maker = self.program.producer[value]
                if value in self.program.constants:
                    continue
                if (at, side) in self._viewed:
                    alike[self._viewed[at, side]] = False
                elif self.stored[value] and not self._fuses(at, value):
                    alike[value] = alike.get(value, True) and not bends[at]
                elif maker >= 0:
                    if maker not in bends:
                        heappush(heap, -maker)
                    bends[maker] = bends.get(maker, False) or bends[at] or self.program.bends[maker]
        return tuple(alike), tuple(value for value, is_alike in alike.items() if is_alike)

    def last(self, step: Ints) -> Ints:
        """When each operation runs for the last time, given when it runs first."""
        last = step.tolist()
        for index in range(len(last) - 1, -1, -1):
            for value in self.program.operands[index]:
                maker = self.program.producer[value]
                if maker >= 0 and self._fuses(index, value):
                    last[maker] = max(last[maker], last[index])
        return np.array(last, np.int64)
