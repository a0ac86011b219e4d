"""Evaluates a program as a plan says: operands are resharded for each operation, and its results are held as planned.

What is computed with is a backend's (`backend.py`).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
from jax import lax

from meshwright import jax_compat
from meshwright.graph.accumulation import ADDING
from meshwright.graph.dtypes import widens
from meshwright.graph.tracing.flatten import signature_of
from meshwright.plans.plan import OpPlan, PlanData
from meshwright.plans.tensor import Spec
from meshwright.program.program import COND, SCAN, WHILE, Operation, Program
from meshwright.runtime.program import corrected
from meshwright.runtime.program.backend import Backend
from meshwright.runtime.program.barriers import Barriers, Copies
from meshwright.runtime.program.contributions import Waiting, can_contribute, sums_by_hand
from meshwright.runtime.program.control_flow import ControlFlow
from meshwright.runtime.program.control_flow import Entry as Entry
from meshwright.runtime.program.hops import Hops
from meshwright.runtime.program.matching import check_program, is_even, other_function, readers_needs
from meshwright.runtime.program.own_shardings import on_devices
from meshwright.runtime.program.virtual_values import Known
from meshwright.strategy.sharding import Axes


class Evaluator:
    """One evaluation of a program with the plan's shardings.

    Args:
        plan: The plan.
        backend: What is computed with.

    Attributes:
        deferred: Of a piece of a program, the ids of operations whose sums over devices are left to the end of the
            step; what its operations read, another piece may have added up already. None for a whole program.
    """

    def __init__(self, plan: PlanData, backend: Backend):
        self.plan, self.backend = plan, backend
        self.hops = Hops(plan.mesh, Axes(plan.mesh.sizes))
        self.contributions, self.virtual = backend.contributions, backend.virtual
        self.ops: dict[int, OpPlan] = {op.serial: op for op in plan.ops}
        self.deferred: Collection[int] | None = None
        self.control_flow = ControlFlow(self)
        self._outer: set[int] = set()  # values that are the same for all trips of the loop around
        self._varying: Any = ()  # a value that varies between trips
        self._copies: dict[tuple[int, str], tuple[Any, dict[Spec, Any]]] = {}  # by value and phase, then by sharding
        self._widened: dict[int, tuple[Any, Any]] = {}  # values that were widened, each with its narrow original
        # For the values of the region at hand, the shardings that readers need; None where they specify none.
        self._wanted: dict[int, set[Spec | None]] = {}
        self.barriers = Barriers(plan.ops, self._all_copies, self._adopt)
        self._loose: dict[int, list[Any]] = {}  # unconstrained values, with their later constrained form

    def run(self, program: Program, leaves: Sequence[Any], specs: Sequence[Spec], results: Sequence[Spec]) -> list[Any]:
        """The results of a program in the shardings asked for, given its arguments and theirs."""
        check_program(self.plan, program)
        entries = [(x, spec, "forward") for x, spec in zip(leaves, specs, strict=True)]
        outs = self.region(program, entries)
        return [self.to(entry, spec) for entry, spec in zip(outs, results, strict=True)]

    def region(self, region: Program, entries: Sequence[Entry]) -> list[Entry]:
        """The results of a program, a region or a piece of one, whose operations have the plan's ids."""
        env: dict[int, Entry] = {number: (value, None, "forward") for number, value in region.constants.items()}
        env.update(zip(region.inputs, entries, strict=True))
        around, self._wanted = self._wanted, readers_needs(region, self.ops)
        for operation in region.operations:
            self.barriers.reach(operation.id)
            ins = [self.barriers.beyond(env[value]) for value in operation.inputs]
            made = self._with_regions(operation, ins) if operation.regions else self._planned(operation, ins)
            env.update(zip(operation.outputs, made, strict=True))
        self._wanted = around
        return [self.barriers.beyond(env[value]) for value in region.outputs]

    def _with_regions(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        if operation.name == SCAN:
            return self.control_flow.scan(operation, ins)
        if operation.name == WHILE:
            return self.control_flow.while_loop(operation, ins)
        if operation.name == COND:
            return self.control_flow.branches(operation, ins)
        if operation.equation.params.get("prevent_cse", True):
            # Without a barrier the compiler would merge the recomputation with the first computation.
            values = lax.optimization_barrier([x for x, _, _ in ins])
            ins = [(self._held(x, spec), spec, phase) for x, (_, spec, phase) in zip(values, ins, strict=True)]
        return self.region(operation.regions[0], ins)

    def _planned(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        plan, equation = self.ops.get(operation.id), on_devices(operation.equation, self.backend.mesh)
        with jax_compat.at_source(equation):  # traces its collectives to the user's line
            made = self.operation(equation, plan, ins, operation.outputs)
        self.barriers.record(operation.id, made)
        return made

    def operation(self, eqn: Any, op: OpPlan | None, ins: list[Entry], outputs: Sequence[int] = ()) -> list[Entry]:
        """The results of an operation without regions, which have these numbers in its region if it is of one."""
        if op is None:
            return self._unplanned(eqn, [self.settled(self._firm(entry)) for entry in ins])
        if self.deferred is not None:
            if op.serial in self.deferred and can_contribute(eqn, op):
                return [self._contribution(eqn, op, op.sums, [self._firm(entry) for entry in ins])]
            if op.waits and not op.sums and not any(isinstance(spec, Waiting) for _, spec, _ in ins):
                op = replace(op, waits=())
        even = is_even(eqn, op)
        if not even:
            ins = [self._firm(entry) for entry in ins]
        if op.waits:
            return [self._contribution(eqn, op, op.waits, ins)]
        if sums_by_hand(eqn, op) and can_contribute(eqn, op):
            return [self.settled(self._contribution(eqn, op, op.sums, ins))]
        operands = [self.bring(entry, op, i) for i, entry in enumerate(ins)]
        made = self.backend.compute(eqn, op, operands)
        widened = eqn.primitive.name == "convert_element_type" and widens(signature_of(eqn))
        if even and outputs and not widened and self._wanted.get(outputs[0]) == {op.results[0]}:
            self._loose[id(made[0])] = [made[0], None]
            return [(made[0], op.results[0], op.phase)]
        given = self.give(made, op, corrected.is_settled(eqn, op))
        if widened:
            self._widened[id(given[0][0])] = (given[0][0], operands[0].dtype)
        return given

    def _unplanned(self, eqn: Any, ins: Sequence[Known]) -> list[Entry]:
        """The results of an operation that is not in the plan: whoever reads them has them made as it needs them."""
        made = self.backend.unplanned(eqn, [x for x, _, _ in ins])
        self.virtual.add(eqn, ins, made)
        return [(x, None, "forward") for x in made]

    def plain(self, entry: Entry) -> jax.Array:
        """A value that JAX's own control flow can take."""
        value, spec, phase = self.settled(entry)
        return self._place(value, None, phase) if spec is None else value

    def unsplit(self, entry: Entry) -> jax.Array:
        """A value that the plan does not split, such as the carry of a loop that nothing reads."""
        value, spec, phase = self.settled(entry)
        return self._place(value, None, phase) if spec is None else self.backend.unsplit(value, spec)

    def _contribution(self, eqn: Any, op: OpPlan, axes: tuple[str, ...], ins: list[Entry]) -> Entry:
        hands_on = not op.sums  # an operation that sums reads complete sums
        waits = [isinstance(spec, Waiting) and hands_on for _, spec, _ in ins]
        if hands_on and not any(waits):
            raise other_function(op, "one that does not read the expected deferred sum")
        operands = [entry[0] if waits[i] else self.bring(entry, op, i) for i, entry in enumerate(ins)]
        if eqn.primitive.name in ADDING and not all(waits):
            return self._add_later(op, ins[waits.index(True)], operands[waits.index(False)])
        made, waiting = self.contributions.make(eqn, op, axes, operands, waits)
        beside = self._beside(eqn, op, ins) if hands_on else None
        return made, waiting._replace(plus=beside), op.phase

    def _add_later(self, op: OpPlan, sum_: Entry, other: Any) -> Entry:
        """A deferred sum, with a value that is to be added to it once it is complete."""
        value, spec, _ = sum_
        assert isinstance(spec, Waiting)
        return value, spec._replace(plus=other if spec.plus is None else spec.plus + other), op.phase

    def _beside(self, eqn: Any, op: OpPlan, ins: list[Entry]) -> jax.Array | None:
        """The value to be added later, after an operation that is applied to a deferred sum."""
        specs = [spec for _, spec, _ in ins if isinstance(spec, Waiting) and spec.plus is not None]
        beside = [spec.plus for spec in specs]
        if not beside:
            return None
        if eqn.primitive.name in ADDING:
            made = sum(beside[1:], beside[0])
        else:
            made = self.backend.apply(eqn, op, beside, [spec.settled for spec in specs])
        return self.constrain(made, op.results[0])

    def settled(self, entry: Entry) -> Known:
        """A value with its contributions added up, if it has any; this is done once for all its readers."""
        value, spec, phase = entry
        if not isinstance(spec, Waiting):
            return value, spec, phase
        _, copies = self._copies.setdefault((id(value), f"settled, {id(spec.plus)}"), (value, {}))
        if not copies:
            copies[spec.settled] = self.contributions.add_up(value, spec)
        return copies[spec.settled], spec.settled, phase

    def _firm(self, entry: Entry) -> Entry:
        """A value constrained to its sharding, if it was not; this is done once for all its readers."""
        value, spec, phase = entry
        known = self._loose.get(id(value))
        if known is None or isinstance(spec, Waiting):
            return entry
        if known[1] is None:
            known[1] = self.constrain(value, spec)
        return known[1], spec, phase

    def bring(self, entry: Entry, op: OpPlan | None, position: int) -> jax.Array:
        """An operand in the sharding that an operation needs; a copy is made once for all its readers of a phase."""
        if op is None:
            return self.unsplit(entry)
        value, spec, phase = self.settled(entry)
        target = op.operands[position]
        if spec is None and target is not None and value in self.virtual:
            return self._virtually(value, target, op, position)
        if spec is None or target is None or spec == target:
            return self.to((value, spec, phase), target)
        return self._copied((value, spec, phase), op.phase, (op.via[position] or spec, target))

    def _copied(self, known: tuple[Any, Spec, str], reading: str, way: Sequence[Spec]) -> jax.Array:
        """A value brought to one sharding after another, for its readers in a phase."""
        value, spec, phase = known
        wide, (_, copies) = value.dtype, self._copies.setdefault((id(value), reading), (value, {}))
        if not copies:
            before = self._narrow(value)
            # If XLA merged copies of two phases, the copy would live from one phase to the other; a copy that is the
            # same for all trips of a loop would live from the first trip to the last.
            if id(value) in self._outer:
                before, _ = lax.optimization_barrier((before, self._varying))
                before = self._held(before, spec)
            elif phase != reading:
                before = self._held(lax.optimization_barrier(before), spec)
            copies[spec] = before
        for have, wanted in pairwise((spec, *way)):
            if wanted not in copies:
                copies[wanted] = self.to((copies[have], have, phase), wanted)
        return copies[way[-1]].astype(wide) if copies[way[-1]].dtype != wide else copies[way[-1]]

    def _all_copies(self, known: Entry) -> Copies:
        """A value in its own and all other shardings in which its own phase reads it so far, in its narrow form."""
        value, spec, phase = self._firm(known)
        _, copies = self._copies.get((id(known[0]), phase), (value, {}))
        return list(copies.items()) or [(spec, self._narrow(value))]

    def _adopt(self, known: Entry, copies: Copies) -> jax.Array:
        """A value that reads these as all its copies."""
        value, spec, phase = known
        held = [(need, self._held(copy, need)) for need, copy in copies]
        narrow = adopted = held[0][1]
        if narrow.dtype != value.dtype:
            adopted = narrow.astype(value.dtype)
            self._widened[id(adopted)] = adopted, narrow.dtype
        if not isinstance(spec, Waiting):
            self._copies[id(adopted), phase] = adopted, dict(held)
        return adopted

    def _virtually(self, value: Any, target: Spec, op: OpPlan, position: int) -> jax.Array:
        """A virtual value in a sharding. It is computed anew for each: XLA would compute it in one and reshard it.

        The same holds for its virtual operands, down to real values, since other values that are computed from them may
        be read in other shardings. The real values are much smaller, and are resharded for it in each phase.
        """
        moves, via, phase = self.virtual.moves(value, target), op.via[position], op.phase
        _, copies = self._copies.setdefault((id(value), f"virtual, {phase if moves else ''}"), (value, {}))
        if target not in copies:

            def bring(known: tuple[Any, Spec, str], need: Spec) -> jax.Array:
                return self._copied(known, phase, (via or known[1], need))

            made = self.virtual.made_as(value, target, bring, (phase, via) if moves else None)
            copies[target] = self.constrain(made, target)
        return copies[target]

    def _held(self, value: Any, spec: Any) -> jax.Array:
        """A value beyond a barrier: XLA would carry a reader's sharding through it, and reshard for other readers."""
        return value if spec is None or isinstance(spec, Waiting) else self.constrain(value, spec)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """The context of a loop's body or a branch: copies made there are not available outside."""
        before = self._copies, self._outer, self._varying
        self._copies = {}
        try:
            with self.virtual.inside():
                yield
        finally:
            self._copies, self._outer, self._varying = before

    def begin_trip(self, shared: Sequence[Known], varying: Any) -> None:
        """Notes what is the same for all trips of the loop whose body is evaluated now, and a value that is not."""
        self._outer, self._varying = {id(value) for value, _, _ in shared}, varying

    def to(self, entry: Entry, target: Spec | None) -> jax.Array:
        """A value brought to a sharding; as it is without."""
        value, spec, phase = self.settled(entry)
        if spec is None:
            return self._place(value, target, phase)
        if target is None or spec == target:
            return value
        wide, value = value.dtype, self._narrow(value)
        for kind, before, after in self.hops.between(self.backend.whole_shape(value, spec), value.dtype, spec, target):
            value = self.backend.hop(kind, value, before, after)
        return value.astype(wide) if value.dtype != wide else value

    def _place(self, value: Any, target: Spec | None, phase: str) -> jax.Array:
        """A value that has no sharding yet, in one; as it is without."""

        def bring(known: tuple[Any, Spec, str], need: Spec) -> jax.Array:
            return self._copied(known, phase, (known[1], need))

        return self.backend.place(value, target, bring)

    def _narrow(self, value: Any) -> jax.Array:
        """A value as it was before it was widened, if it was: the narrow form is sent."""
        _, dtype = self._widened.get(id(value), (None, None))
        return value if dtype is None else value.astype(dtype)

    def give(self, values: Sequence[Any], op: OpPlan, is_settled: bool = False) -> list[Entry]:
        """The results of an operation, in the plan's shardings."""
        settled = self.backend.settle(values, op, is_settled)
        return [(value, spec, op.phase) for value, spec in zip(settled, op.results, strict=True)]

    def give_each(self, values: Sequence[Any], ops: Sequence[OpPlan | None], phases: Sequence[str]) -> list[Entry]:
        """Values that each belong to an operation of a loop or a conditional, in the plan's shardings."""
        return [
            (*self.contributions.waiting(x, op, op.waits), op.phase)
            if op is not None and op.waits
            else (x if _result(op) is None else self.constrain(x, _result(op)), _result(op), phase)
            for x, op, phase in zip(values, ops, phases, strict=True)
        ]

    def constrain(self, value: Any, spec: Spec | None) -> jax.Array:
        """A value constrained to a sharding that it has."""
        assert spec is not None
        return self.backend.constrain(value, spec)


def _result(op: OpPlan | None) -> Spec | None:
    return None if op is None else op.results[0]
