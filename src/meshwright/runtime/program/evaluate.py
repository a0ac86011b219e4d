"""Evaluates a program as a plan says: operands are resharded for each operation, and its results are held as planned.

What is computed with is a backend's (`backend.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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
from meshwright.runtime.program.hops import Hops
from meshwright.runtime.program.matching import check_program, is_even, other_function, readers_needs
from meshwright.runtime.program.own_shardings import on_devices
from meshwright.runtime.program.virtual_values import Known
from meshwright.strategy.sharding import Axes

# A value, the sharding it is known to have, the phase that made it.
Entry = tuple[Any, Spec | Waiting | None, str]


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
        return [self._to(entry, spec) for entry, spec in zip(outs, results, strict=True)]

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
            return self._scan(operation, ins)
        if operation.name == WHILE:
            return self._while(operation, ins)
        if operation.name == COND:
            return self._cond(operation, ins)
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
        operands = [self._bring(entry, op, i) for i, entry in enumerate(ins)]
        made = self.backend.compute(eqn, op, operands)
        widened = eqn.primitive.name == "convert_element_type" and widens(signature_of(eqn))
        if even and outputs and not widened and self._wanted.get(outputs[0]) == {op.results[0]}:
            self._loose[id(made[0])] = [made[0], None]
            return [(made[0], op.results[0], op.phase)]
        given = self._give(made, op, corrected.is_settled(eqn, op))
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

    def _unsplit(self, entry: Entry) -> jax.Array:
        """A value that the plan does not split, such as the carry of a loop that nothing reads."""
        value, spec, phase = self.settled(entry)
        return self._place(value, None, phase) if spec is None else self.backend.unsplit(value, spec)

    def _scan(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        params, (body,) = operation.equation.params, operation.regions
        num_consts, num_carry = operation.num_consts, operation.num_carry
        ins = [self.settled(entry) for entry in ins]
        consts, init, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        ids = operation.carry_ids, operation.slice_ids, operation.result_ids
        carry_ops, slice_ops, stack_ops = map(self._plans, ids)
        init = self._pseudo(init, carry_ops)
        xs = [(self._bring(x, op, 0), None, x[2]) for x, op in zip(xs, slice_ops, strict=True)]

        @self._inside()
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            shared = self._lay_down(consts)
            self._outer = {id(value) for value, _, _ in shared}
            self._varying = min((*carry, *x), key=lambda v: v.size, default=())
            carried = self._give_each(carry, carry_ops, [e[2] for e in init])
            outs = self.region(body, [*shared, *carried, *self._give_each(x, slice_ops, [e[2] for e in xs])])
            made = [self._carried(out, op) for out, op in zip(outs[:num_carry], carry_ops, strict=True)]
            return made, [self._stacked(out, op) for out, op in zip(outs[num_carry:], stack_ops, strict=True)]

        options = {k: params[k] for k in ("length", "reverse", "unroll") if k in params}
        last, ys = lax.scan(step, [x for x, _, _ in init], [x for x, _, _ in xs], **options)
        outs = self._give_each(last, carry_ops, [e[2] for e in init])
        ys = [self.contributions.stacked(y, op) if op and op.waits else y for y, op in zip(ys, stack_ops, strict=True)]
        return [*outs, *self._give_each(ys, stack_ops, [_phase(op) for op in stack_ops])]

    def _while(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        params, (condition, body) = operation.equation.params, operation.regions
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        ins = [self.settled(entry) for entry in ins]
        carry_ops = self._plans(operation.carry_ids)
        init = self._pseudo(ins[num_cond + num_body :], carry_ops)

        @self._inside()
        def is_on(carry: list[Any]) -> jax.Array:
            carried = self._give_each(carry, carry_ops, [e[2] for e in init])
            outs = self.region(condition, [*self._lay_down(ins[:num_cond]), *carried])
            return self.plain(outs[0])

        @self._inside()
        def step(carry: list[Any]) -> list[Any]:
            carried = self._give_each(carry, carry_ops, [e[2] for e in init])
            shared = self._lay_down(ins[num_cond : num_cond + num_body])
            outs = self.region(body, [*shared, *carried])
            return [self._carried(out, op) for out, op in zip(outs, carry_ops, strict=True)]

        last = lax.while_loop(is_on, step, [x for x, _, _ in init])
        return self._give_each(last, carry_ops, [e[2] for e in init])

    def _cond(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        merge_ops = self._plans(operation.result_ids)
        ins = [self.settled(entry) for entry in ins]

        def branch(index: int) -> Callable[..., list[Any]]:
            @self._inside()
            def call(*values: Any) -> list[Any]:
                # A virtual value comes in unchanged, so that readers in the branch have it made as they need it.
                read = zip(values, ins[1:], strict=True)
                entries = self._lay_down([known if known[0] in self.virtual else (x, *known[1:]) for x, known in read])
                outs = self.region(operation.regions[index], entries)
                return [self._bring(out, op, index) for out, op in zip(outs, merge_ops, strict=True)]

            return call

        index, *given = map(self.plain, ins)
        made = lax.switch(index, [branch(i) for i in range(len(operation.regions))], *given)
        return self._give_each(made, merge_ops, [_phase(op) for op in merge_ops])

    def _plans(self, ids: Iterable[int]) -> list[OpPlan | None]:
        return [self.ops.get(number) for number in ids]

    def _pseudo(self, entries: Sequence[Entry], plans: Sequence[OpPlan | None]) -> list[Entry]:
        """Loop carries: in the plan each is an operation with one operand and one result."""
        given: list[Entry] = []
        for entry, op in zip(entries, plans, strict=True):
            if op is None:
                given.append((self._unsplit(entry), None, entry[2]))
            elif op.waits:
                value = self.contributions.counted_once(self._bring(entry, op, 0), op.waits)
                given.append((*self.contributions.waiting(value, op, op.waits), op.phase))
            else:
                given += self._give([self._bring(entry, op, 0)], op)
        return given

    def _contribution(self, eqn: Any, op: OpPlan, axes: tuple[str, ...], ins: list[Entry]) -> Entry:
        hands_on = not op.sums  # an operation that sums reads complete sums
        waits = [isinstance(spec, Waiting) and hands_on for _, spec, _ in ins]
        if hands_on and not any(waits):
            raise other_function(op, "one that does not read the expected deferred sum")
        operands = [entry[0] if waits[i] else self._bring(entry, op, i) for i, entry in enumerate(ins)]
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
        return self._constrain(made, op.results[0])

    def settled(self, entry: Entry) -> Known:
        """A value with its contributions added up, if it has any; this is done once for all its readers."""
        value, spec, phase = entry
        if not isinstance(spec, Waiting):
            return value, spec, phase
        _, copies = self._copies.setdefault((id(value), f"settled, {id(spec.plus)}"), (value, {}))
        if not copies:
            copies[spec.settled] = self.contributions.add_up(value, spec)
        return copies[spec.settled], spec.settled, phase

    def _lay_down(self, entries: Sequence[Entry]) -> list[Known]:
        """Values that a body reads from outside, constrained: XLA might otherwise reshard them for one reader."""
        known = map(self.settled, entries)
        return [(x if spec is None else self._constrain(x, spec), spec, phase) for x, spec, phase in known]

    def _carried(self, out: Entry, op: OpPlan | None) -> jax.Array:
        if op is None:
            return self._unsplit(out)
        return out[0] if op.waits else self._to(out, op.results[0])

    def _stacked(self, out: Entry, op: OpPlan | None) -> jax.Array:
        return out[0] if op is not None and op.waits else self._bring(out, op, 0)

    def _firm(self, entry: Entry) -> Entry:
        """A value constrained to its sharding, if it was not; this is done once for all its readers."""
        value, spec, phase = entry
        known = self._loose.get(id(value))
        if known is None or isinstance(spec, Waiting):
            return entry
        if known[1] is None:
            known[1] = self._constrain(value, spec)
        return known[1], spec, phase

    def _bring(self, entry: Entry, op: OpPlan | None, position: int) -> jax.Array:
        """An operand in the sharding that an operation needs; a copy is made once for all its readers of a phase."""
        if op is None:
            return self._unsplit(entry)
        value, spec, phase = self.settled(entry)
        target = op.operands[position]
        if spec is None and target is not None and value in self.virtual:
            return self._virtually(value, target, op, position)
        if spec is None or target is None or spec == target:
            return self._to((value, spec, phase), target)
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
                copies[wanted] = self._to((copies[have], have, phase), wanted)
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
            copies[target] = self._constrain(made, target)
        return copies[target]

    def _held(self, value: Any, spec: Any) -> jax.Array:
        """A value beyond a barrier: XLA would carry a reader's sharding through it, and reshard for other readers."""
        return value if spec is None or isinstance(spec, Waiting) else self._constrain(value, spec)

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """The context of a loop's body or a branch: copies made there are not available outside."""
        before = self._copies, self._outer, self._varying
        self._copies = {}
        try:
            with self.virtual.inside():
                yield
        finally:
            self._copies, self._outer, self._varying = before

    def _to(self, entry: Entry, target: Spec | None) -> jax.Array:
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

    def _give(self, values: Sequence[Any], op: OpPlan, is_settled: bool = False) -> list[Entry]:
        """The results of an operation, in the plan's shardings."""
        settled = self.backend.settle(values, op, is_settled)
        return [(value, spec, op.phase) for value, spec in zip(settled, op.results, strict=True)]

    def _give_each(self, values: Sequence[Any], ops: Sequence[OpPlan | None], phases: Sequence[str]) -> list[Entry]:
        return [
            (*self.contributions.waiting(x, op, op.waits), op.phase)
            if op is not None and op.waits
            else (x if _result(op) is None else self._constrain(x, _result(op)), _result(op), phase)
            for x, op, phase in zip(values, ops, phases, strict=True)
        ]

    def _constrain(self, value: Any, spec: Spec | None) -> jax.Array:
        assert spec is not None
        return self.backend.constrain(value, spec)


def _result(op: OpPlan | None) -> Spec | None:
    return None if op is None else op.results[0]


def _phase(op: OpPlan | None) -> str:
    return "forward" if op is None else op.phase
