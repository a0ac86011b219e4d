"""Memory of a choice in a program for CPUs: what XLA's CPU backend takes besides the values themselves.

Its contractions read some operands in a layout of their own. Its reductions over devices take their result beside what
they reduce, and wait for one another: which of them are one is known once a choice is made (`reductions`); until then
it is those whose results are first read together, and those of all gradients of weights.
"""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

from meshwright.graph.conversions import reads_narrow
from meshwright.graph.cpu_liveness import CpuLiveness
from meshwright.graph.graph import cpu_itemsize
from meshwright.graph.scratch import TAKING
from meshwright.graph.xla_gpu.liveness import Copies
from meshwright.planner.grouping.folding import Folded
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.pricing.group_table import GroupTable
from meshwright.planner.pricing.memory import Array, Ints, MemoryModel, Span
from meshwright.strategy.candidates import reducing_axes, result_holders, tensor_holders
from meshwright.strategy.sharding import Codes


def reductions(grouping: Grouping, folded: Folded, tables: Sequence[GroupTable], choice: Ints) -> dict[int, Hashable]:
    """The operations whose results are reduced over devices under a choice, each with the axes; where sums are joined,
    the last addition. What a loop adds up is not among them."""
    found: dict[int, Hashable] = {}
    for members, table, strategy in zip(folded.members, tables, choice.tolist(), strict=False):
        for rank, first in enumerate(grouping.groups[members[0]].ops):
            nest = grouping.nests[first]
            axes = reducing_axes(nest, table.assignments[rank][strategy : strategy + 1], nest.results[0])[0]
            if axes.any():
                ops = (grouping.groups[member].ops[rank] for member in members)
                ops = (op for op in ops if op not in grouping.accumulated and op not in grouping.joining.joins)
                found |= dict.fromkeys((grouping.joining.until.get(op, op) for op in ops), tuple(axes.tolist()))
    return dict(sorted(found.items()))


class CpuMemory(MemoryModel):
    """What takes memory on CPUs."""

    live: CpuLiveness

    def _held(self) -> Copies:
        pairs = zip(super()._held(), self.live.converted, strict=True)
        return Copies(*(np.concatenate(pair) for pair in pairs))

    def _computed(self, value: int, codes: Codes) -> Array:
        """As `_local`, of a value as it is computed: of a narrow type, it is wider then."""
        kind = self.grouping.graph.types[value]
        return self._local(value, codes) * (cpu_itemsize(kind.dtype, kind.itemsize) / max(kind.itemsize, 1))

    def _backend(self) -> Iterator[Span]:
        yield from self._laid_out()
        yield from self._reductions()
        yield from self._scratch()

    def _laid_out(self) -> Iterator[Span]:
        """Operands that contractions read in other layouts.

        What is transposed is so in the sharding in which it is read; what is only reshaped is as it was made, and if
        it is read otherwise then that copy needs no other.
        """
        placed, ops, reads = self.grouping.placed, self.grouping.ops, self.grouping.graph.columns.reads_of
        known: dict[tuple[int, ...], int] = {}
        signatures, numbers = self.grouping.graph.columns.signatures, self.grouping.graph.columns.signature
        for copy in self.live.copies:
            is_narrow = reads_narrow(signatures[numbers[copy.op]], self.grouping.graph.narrow_products)
            share = 0.5 if is_narrow else 1.0
            value = int(reads(copy.op)[copy.operand])
            home = int(placed.home[value])
            if home >= 0 and not copy.is_transposed:
                which, place = self.folded.group_class[home], int(self.grouping.values.rank[value])
                if (which, place) not in known:
                    known[which, place] = self.add(which, self._computed(value, self.tables[which].codes[place]))
                yield known[which, place], home, copy.start, copy.stop, share
            elif (group := int(placed.group[copy.op])) >= 0:
                which, member = self.folded.group_class[group], int(ops.rank[copy.op])
                if (which, member, copy.operand) not in known:
                    need = self._held_by(copy.op, self.tables[which].assignments[member], copy.operand)
                    known[which, member, copy.operand] = self.add(which, self._computed(value, need))
                yield known[which, member, copy.operand], group, copy.start, copy.stop, share

    def _reductions(self) -> Iterator[Span]:
        """Partial sums beside their results, from when they are made until all that are reduced with them are."""
        leader, columns, step = self.grouping.placed.leader, self.grouping.graph.columns, self.live.step
        done = self._reduced_at()
        for which, members in enumerate(self.folded.members):
            table, ops = self.tables[which], leader[members]
            if table.candidates is None or int(ops[0]) in self.grouping.accumulated:
                continue
            nest, made = self.grouping.nests[ops[0]], int(columns.first_made[ops[0]])
            reduced = reducing_axes(nest, table.assignments[0], nest.results[0]).any(axis=1)
            if not reduced.any():
                continue
            holders = tensor_holders(nest.results[0], table.assignments[0], len(nest.loops))
            before = self._computed(made, self.axes.pack(holders))
            after = self._computed(
                made, self.axes.pack(result_holders(nest, table.assignments[0], table.candidates.scatter, 0))
            )
            # What is scattered is reduced whole, and then cut. The sum of two takes the memory that they had.
            both = np.where(after < before, 2 * before - after, before)
            if int(ops[0]) in self.grouping.joining.paths:
                both = 2 * (before - after)
            more, partial, result, waiting, joined = (
                self._add_partial(which, size * reduced, made) for size in (both, before, after, before - after, -after)
            )
            for group, index in zip(members, ops.tolist(), strict=True):
                settled = self._settled_by(index)
                start, time, stop = (
                    int(step[settled]),
                    int(done[index]),
                    int(self.live.stop[columns.first_made[settled]]),
                )
                if index in self.grouping.joining.joins:  # it is added to another, and that one is reduced
                    addition = int(step[self.grouping.joining.joins[index]])
                    yield waiting, group, start, addition, 1.0
                    # Where nothing is reduced, it may be held longer.
                    yield joined, group, min(addition + 1, stop), stop, 1.0
                    continue
                yield more, group, time, time + 1, 1.0
                yield waiting, group, start, max(start, min(stop, time)), 1.0
                if stop <= time:  # without the reduction it would be gone by then
                    yield partial, group, stop, time, 1.0
                    yield result, group, time, time + 1, 1.0

    def _scratch(self) -> Iterator[Span]:
        """What operations take in passing, beside what they read and make."""
        ops, placed, columns = self.grouping.ops, self.grouping.placed, self.grouping.graph.columns
        told = np.array([op.primitive in TAKING for op in columns.signatures], bool)[columns.signature]
        known: dict[tuple[int, int], int] = {}
        for index in np.flatnonzero(told & (placed.group >= 0)).tolist():
            nest = self.grouping.nests[index]
            arrays = TAKING[columns.primitive(index)](columns.signatures[columns.signature[index]], nest)
            group = int(placed.group[index])
            which, member = self.folded.group_class[group], int(ops.rank[index])
            if (which, member) not in known:
                loops = self.tables[which].assignments[member]
                held = (self.axes.pack(tensor_holders(array.dims, loops, len(nest.loops))) for array in arrays)
                parts = (array.num_bytes / self.axes.num_parts(code) for array, code in zip(arrays, held, strict=True))
                known[which, member] = self.add(which, sum(parts, np.zeros(len(loops))))
            yield known[which, member], group, int(self.live.step[index]), int(self.live.step[index]) + 1, 1.0

    def _settled_by(self, leader: int) -> int:
        """The operation whose result is reduced for a leader's: the last addition, if it is known to be joined."""
        addition = self.grouping.joining.until.get(leader, leader)
        return addition if addition in self.live.reduced_at and leader not in self.grouping.joining.joins else leader

    def _reduced_at(self) -> Ints:
        """When what each leader makes is reduced, if it is."""
        leader, columns, step = self.grouping.placed.leader, self.grouping.graph.columns, self.live.step
        ops = leader[leader >= 0]
        made = columns.first_made[ops]
        loop = np.full(len(step), -1)
        for number, (first, end) in enumerate(sorted(self.grouping.graph.loops, key=lambda loop: loop[0] - loop[1])):
            loop[first:end] = number
        gradient = np.isin(made, list(self.grouping.gradients))
        together = np.where(gradient, -1 - loop[ops], self.live.first_read[made] + 1)
        _, which = np.unique(together, return_inverse=True)
        last = np.zeros(len(ops), np.int64)
        np.maximum.at(last, which, step[ops])
        found = step.copy()
        found[ops] = last[which]
        for op, addition in self.grouping.joining.until.items():
            found[op] = max(found[op], step[addition])
        for op in ops.tolist():
            found[op] = self.live.reduced_at.get(self._settled_by(op), found[op])
        return found

    def _held_by(self, index: int, loops: Ints, operand: int) -> Ints:
        nest = self.grouping.nests[index]
        return self.axes.pack(tensor_holders(nest.operands[operand], loops, len(nest.loops)))
