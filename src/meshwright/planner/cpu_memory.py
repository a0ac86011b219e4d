"""Memory of a choice in a program for CPUs: what XLA's CPU backend takes besides the values themselves.

Its contractions read some operands in a layout of their own. Its reductions over devices take their result beside what
they reduce, and wait for one another: those whose results are first read together are one, and so are those of all
gradients of weights.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.graph.cpu_liveness import CpuLiveness
from meshwright.planner.memory import Ints, MemoryModel, Span
from meshwright.strategy.candidates import reducing_axes, result_holders, tensor_holders


class CpuMemory(MemoryModel):
    """What takes memory on CPUs."""

    live: CpuLiveness

    def _backend(self, values: Ints, columns: Ints) -> Iterator[Span]:
        yield from self._laid_out()
        yield from self._reductions()

    def _laid_out(self) -> Iterator[Span]:
        """Operands that a contraction reads in another layout, in the sharding in which it reads them."""
        placed, ops, reads = self.grouping.placed, self.grouping.ops, self.grouping.graph.columns.reads_of
        known: dict[tuple[int, int, int], int] = {}
        for index, operand in self.live.copies:
            if placed.group[index] < 0:
                continue
            which, member = self.folded.group_class[int(placed.group[index])], int(ops.rank[index])
            if (which, member, operand) not in known:
                need = self._held_by(index, self.tables[which].assignments[member], operand)
                known[which, member, operand] = self.add(which, self._local(reads(index)[operand], need))
            time = int(self.live.step[index])
            yield known[which, member, operand], time, time + 1, 1.0

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
            before = self._local(made, self.axes.pack(holders))
            after = self._local(
                made, self.axes.pack(result_holders(nest, table.assignments[0], table.candidates.scatter, 0))
            )
            # What is scattered is reduced whole, and then cut. The sum of two takes the memory that they had.
            both = np.where(after < before, 2 * before - after, before)
            if int(ops[0]) in self.grouping.joining.paths:
                both = 2 * (before - after)
            more, partial, result, waiting = (
                self.add(which, size * reduced) for size in (both, before, after, before - after)
            )
            for index in ops.tolist():
                value = columns.first_made[index]
                start, time, stop = int(step[index]), int(done[index]), int(self.live.stop[value])
                if index in self.grouping.joining.joins:  # it is added to another, and that one is reduced
                    yield waiting, start, int(step[self.grouping.joining.joins[index]]), 1.0
                    continue
                yield more, time, time + 1, 1.0
                yield waiting, start, max(start, min(stop, time)), 1.0
                if stop <= time:  # without the reduction it would be gone by then
                    yield partial, stop, time, 1.0
                    yield result, time, time + 1, 1.0

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
        return found

    def _held_by(self, index: int, loops: Ints, operand: int) -> Ints:
        nest = self.grouping.nests[index]
        return self.axes.pack(tensor_holders(nest.operands[operand], loops, len(nest.loops)))
