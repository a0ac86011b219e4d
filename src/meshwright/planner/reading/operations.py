"""How a plan splits every operation: its operands and results, the axes it sums over, and which sums are deferred."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from meshwright.planner.grouping.joined_sums import PartialSum
from meshwright.planner.reading.readback import Readback
from meshwright.plans.plan import OpPlan
from meshwright.plans.tensor import Spec
from meshwright.strategy.candidates import keeps_apart, reducing_axes, result_holders, tensor_holders

Specs = tuple[Spec | None, ...]


class OpPlans:
    """Reads a choice back operation by operation."""

    def __init__(self, back: Readback):
        self.back, self.choice = back, back.choice
        self.formulation, self.folded = back.formulation, back.folded
        self.grouping, self.graph = back.grouping, back.graph

    def all(self) -> tuple[OpPlan, ...]:
        """Every operation that belongs to a group, in program order."""
        cache: dict[tuple[int, int, int], tuple[Specs, Specs, Specs, tuple[str, ...]]] = {}
        found: list[tuple[int, OpPlan]] = []
        shared, live = self._shared_copies(), self.back.profile().bytes_at
        for group_id, group in enumerate(self.grouping.groups):
            which = self.folded.group_class[group_id]
            for member, index in enumerate(group.ops):
                key = (self.folded.alike[which], int(self.choice[which]), member)
                if key not in cache:
                    cache[key] = self._shardings(which, member, index)
                op = self.graph.ops[index]
                via = tuple(shared.get((index, operand)) for operand in range(len(op.inputs)))
                operands, partial, results, sums = cache[key]
                load = self.back.explained(group_id).loads[member]
                some = load if load.flops or load.num_bytes or load.special else None
                about = (int(live[index]), some)
                plan = OpPlan(op.serial, op.label, op.phase, operands, partial, results, via, sums, (), *about)
                found.append((index, plan))
        plans = dict(sorted(found, key=lambda pair: pair[0]))
        for index, accumulated in self.grouping.accumulated.items():
            if self._keeps_apart(index):
                self._let_wait(plans, index, accumulated.chain)
        for leader, path in self.grouping.joining.paths.items():
            self._let_join(plans, leader, path)
        self._hold(plans)
        return tuple(plans.values())

    def _hold(self, plans: dict[int, OpPlan]) -> None:
        """Marks the operations whose results pass barriers, where gradients would wait without them."""
        barriers, serial = self.formulation.live.barriers, self.graph.columns.serial
        passing = [index for index in np.flatnonzero(barriers >= 0).tolist() if index in plans]
        needed = {int(barriers[index]) for index in passing if self._waits(index)}
        for index in passing:
            if int(barriers[index]) in needed:
                plans[index] = replace(plans[index], barrier=int(serial[barriers[index]] - serial[index]))

    def _waits(self, index: int) -> bool:
        """Whether an operation is of a gradient that would wait for the reductions of others."""
        which = self.folded.group_class[int(self.grouping.placed.group[index])]
        waiting = self.formulation.memory.waiting.get(which)
        return waiting is not None and bool(waiting[self.choice[which]])

    def _keeps_apart(self, index: int) -> bool:
        """Whether each device can compute its contribution to an operation's sums on its own."""
        which = self.folded.group_class[int(self.grouping.placed.group[index])]
        assignments = self.formulation.tables[which].assignments[self.grouping.ops.rank[index]]
        return bool(keeps_apart(self.grouping.nests[index], assignments[[self.choice[which]]])[0])

    def _let_wait(self, plans: dict[int, OpPlan], index: int, chain: tuple[int, ...]) -> None:
        """Marks an operation whose partial sums a loop adds up before they are settled, and the `chain` after it."""
        axes = plans[index].sums
        partial, settled = plans[index].partial[0], plans[index].results[0]
        waiting = {index: replace(plans[index], waits=axes)}
        for other in chain:
            step = plans.get(other)
            if not axes or partial is None or settled is None or step is None:
                return
            if any(spec != settled for spec in step.operands):
                return  # it is resharded on the way, so it must be settled first
            op = self.graph.ops[other]
            if op.primitive == "loop_stack":
                partial, settled = ((), *partial), ((), *settled)
            elif op.primitive == "transpose":
                order = op.signature.params["permutation"]
                partial, settled = (tuple(spec[d] for d in order) for spec in (partial, settled))
            if step.results[0] != settled:
                return
            waiting[other] = replace(step, partial=(partial,), waits=axes)
        plans.update(waiting)

    def _let_join(self, plans: dict[int, OpPlan], leader: int, path: tuple[int, ...]) -> None:
        """Marks operations that pass a sum on until it joins another, or until the last other sum has joined it."""
        if leader not in self.back.joined:
            last = max((i for i, op in enumerate(path) if op in self.back.joined.values()), default=-1)
            path = path[: last + 1]
        which = self.folded.group_class[int(self.grouping.placed.group[leader])]
        table, strategy = self.formulation.tables[which], self.choice[which]
        for index in path:
            op, nest, followed = self.graph.ops[index], self.grouping.nests[index], self.grouping.placed.follows[index]
            loops = table.assignments[self.grouping.ops.rank[index]][[strategy]]
            if index == leader:
                handed = PartialSum(self.back.axes, nest, loops)
            else:
                handed.pass_through(nest, followed, loops, self.back.made[[op.inputs[followed]]])
            partial = self.back.spec(int(handed.before[0]), len(self.graph.types[op.outputs[0]].shape))
            plans[index] = replace(plans[index], partial=(partial,), waits=plans[leader].sums)

    def _shared_copies(self) -> dict[tuple[int, int], Spec]:
        """The sharding of the shared copy that each operand reads, directly or through virtual values alone."""
        groups, found = self.grouping.groups, {}
        for reading, which in zip(self.folded.shared, self.folded.shared_class, strict=True):
            codes = self.formulation.shared_codes[which - self.formulation.num_groups]
            copy = self.back.spec(int(codes[self.choice[which]]), len(self.graph.types[reading.value].shape))
            for group_id, slot in reading.readers:
                read = groups[group_id].slots[slot]
                index = groups[group_id].ops[read.member]
                if self.grouping.roots(self.graph.ops[index].inputs[read.operand]) == [reading.value]:
                    found[index, read.operand] = copy
        return found

    def _shardings(self, which: int, member: int, index: int) -> tuple[Specs, Specs, Specs, tuple[str, ...]]:
        table, strategy = self.formulation.tables[which], self.choice[which]
        nest, op = self.grouping.nests[index], self.graph.ops[index]
        loops = table.assignments[member][[strategy]]
        scatter = np.full_like(loops, -1)
        if self.grouping.groups[self.folded.members[which][0]].follows[member] < 0 and table.candidates is not None:
            scatter = table.candidates.scatter[[strategy]]

        def spec(holders: NDArray[np.int64], rank: int) -> Spec | None:
            return self.back.spec(int(self.back.axes.pack(holders)[0]), rank) if rank else None

        count = len(nest.loops)
        operands = tuple(spec(tensor_holders(d, loops, count), len(d)) for d in nest.operands)
        partial = tuple(spec(tensor_holders(d, loops, count), len(d)) for d in nest.results)
        results = tuple(
            spec(result_holders(nest, loops, scatter, i), len(nest.results[i])) for i in range(len(op.outputs))
        )
        reduced = reducing_axes(nest, loops, nest.results[0])[0] if nest.results else ()
        sums = tuple(name for name, on in zip(self.formulation.mesh.names, reduced, strict=False) if on)
        return operands, partial, results, sums
