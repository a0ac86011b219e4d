"""Evaluates loops and conditionals as a plan says: JAX's own, whose bodies the evaluator evaluates."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ContextDecorator
from typing import Any, Protocol

import jax
from jax import lax

from meshwright.plans.plan import OpPlan
from meshwright.plans.tensor import Spec
from meshwright.program.program import Operation, Program
from meshwright.runtime.program.contributions import Contributions, Waiting
from meshwright.runtime.program.virtual_values import Known, Virtual

# A value, the sharding it is known to have, the phase that made it.
Entry = tuple[Any, Spec | Waiting | None, str]


class Around(Protocol):
    """What evaluates the bodies: `Evaluator`, whose methods say what these do."""

    ops: dict[int, OpPlan]

    @property
    def contributions(self) -> Contributions: ...
    @property
    def virtual(self) -> Virtual: ...
    def region(self, region: Program, entries: Sequence[Entry]) -> list[Entry]: ...
    def settled(self, entry: Entry) -> Known: ...
    def plain(self, entry: Entry) -> jax.Array: ...
    def unsplit(self, entry: Entry) -> jax.Array: ...
    def bring(self, entry: Entry, op: OpPlan | None, position: int) -> jax.Array: ...
    def to(self, entry: Entry, target: Spec | None) -> jax.Array: ...
    def give(self, values: Sequence[Any], op: OpPlan) -> list[Entry]: ...
    def give_each(self, values: Sequence[Any], ops: Sequence[OpPlan | None], phases: Sequence[str]) -> list[Entry]: ...
    def constrain(self, value: Any, spec: Spec | None) -> jax.Array: ...
    def inside(self) -> ContextDecorator: ...
    def begin_trip(self, shared: Sequence[Known], varying: Any) -> None: ...


class ControlFlow:
    """The loops and conditionals of one evaluation."""

    def __init__(self, evaluator: Around):
        self.evaluator = evaluator

    def scan(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        """The results of a loop over slices, given its operands."""
        params, (body,) = operation.equation.params, operation.regions
        num_consts, num_carry = operation.num_consts, operation.num_carry
        ins = [self.evaluator.settled(entry) for entry in ins]
        consts, init, xs = ins[:num_consts], ins[num_consts : num_consts + num_carry], ins[num_consts + num_carry :]
        ids = operation.carry_ids, operation.slice_ids, operation.result_ids
        carry_ops, slice_ops, stack_ops = map(self._plans, ids)
        init = self._pseudo(init, carry_ops)
        xs = [(self.evaluator.bring(x, op, 0), None, x[2]) for x, op in zip(xs, slice_ops, strict=True)]

        @self.evaluator.inside()
        def step(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
            shared = self._fixed(consts)
            self.evaluator.begin_trip(shared, min((*carry, *x), key=lambda v: v.size, default=()))
            carried = self.evaluator.give_each(carry, carry_ops, [e[2] for e in init])
            slices = self.evaluator.give_each(x, slice_ops, [e[2] for e in xs])
            outs = self.evaluator.region(body, [*shared, *carried, *slices])
            made = [self._carried(out, op) for out, op in zip(outs[:num_carry], carry_ops, strict=True)]
            return made, [self._stacked(out, op) for out, op in zip(outs[num_carry:], stack_ops, strict=True)]

        options = {k: params[k] for k in ("length", "reverse", "unroll") if k in params}
        last, ys = lax.scan(step, [x for x, _, _ in init], [x for x, _, _ in xs], **options)
        outs = self.evaluator.give_each(last, carry_ops, [e[2] for e in init])
        stacked = self.evaluator.contributions.stacked
        ys = [stacked(y, op) if op and op.waits else y for y, op in zip(ys, stack_ops, strict=True)]
        return [*outs, *self.evaluator.give_each(ys, stack_ops, [_phase(op) for op in stack_ops])]

    def while_loop(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        """The results of a loop without a known length, given its operands."""
        params, (condition, body) = operation.equation.params, operation.regions
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        ins = [self.evaluator.settled(entry) for entry in ins]
        carry_ops = self._plans(operation.carry_ids)
        init = self._pseudo(ins[num_cond + num_body :], carry_ops)

        @self.evaluator.inside()
        def is_on(carry: list[Any]) -> jax.Array:
            carried = self.evaluator.give_each(carry, carry_ops, [e[2] for e in init])
            outs = self.evaluator.region(condition, [*self._fixed(ins[:num_cond]), *carried])
            return self.evaluator.plain(outs[0])

        @self.evaluator.inside()
        def step(carry: list[Any]) -> list[Any]:
            carried = self.evaluator.give_each(carry, carry_ops, [e[2] for e in init])
            shared = self._fixed(ins[num_cond : num_cond + num_body])
            outs = self.evaluator.region(body, [*shared, *carried])
            return [self._carried(out, op) for out, op in zip(outs, carry_ops, strict=True)]

        last = lax.while_loop(is_on, step, [x for x, _, _ in init])
        return self.evaluator.give_each(last, carry_ops, [e[2] for e in init])

    def branches(self, operation: Operation, ins: list[Entry]) -> list[Entry]:
        """The results of a conditional, given its operands."""
        merge_ops = self._plans(operation.result_ids)
        ins = [self.evaluator.settled(entry) for entry in ins]

        def branch(index: int) -> Callable[..., list[Any]]:
            @self.evaluator.inside()
            def call(*values: Any) -> list[Any]:
                # A virtual value comes in unchanged, so that readers in the branch have it made as they need it.
                read, virtual = zip(values, ins[1:], strict=True), self.evaluator.virtual
                entries = self._fixed([known if known[0] in virtual else (x, *known[1:]) for x, known in read])
                outs = self.evaluator.region(operation.regions[index], entries)
                return [self.evaluator.bring(out, op, index) for out, op in zip(outs, merge_ops, strict=True)]

            return call

        index, *given = map(self.evaluator.plain, ins)
        made = lax.switch(index, [branch(i) for i in range(len(operation.regions))], *given)
        return self.evaluator.give_each(made, merge_ops, [_phase(op) for op in merge_ops])

    def _plans(self, ids: Iterable[int]) -> list[OpPlan | None]:
        return [self.evaluator.ops.get(number) for number in ids]

    def _pseudo(self, entries: Sequence[Entry], plans: Sequence[OpPlan | None]) -> list[Entry]:
        """Loop carries: in the plan each is an operation with one operand and one result."""
        given: list[Entry] = []
        for entry, op in zip(entries, plans, strict=True):
            if op is None:
                given.append((self.evaluator.unsplit(entry), None, entry[2]))
            elif op.waits:
                value = self.evaluator.contributions.counted_once(self.evaluator.bring(entry, op, 0), op.waits)
                given.append((*self.evaluator.contributions.waiting(value, op, op.waits), op.phase))
            else:
                given += self.evaluator.give([self.evaluator.bring(entry, op, 0)], op)
        return given

    def _fixed(self, entries: Sequence[Entry]) -> list[Known]:
        """Values that a body reads from outside, constrained: XLA might otherwise reshard them for one reader."""
        known = map(self.evaluator.settled, entries)
        return [(x if spec is None else self.evaluator.constrain(x, spec), spec, phase) for x, spec, phase in known]

    def _carried(self, out: Entry, op: OpPlan | None) -> jax.Array:
        if op is None:
            return self.evaluator.unsplit(out)
        return out[0] if op.waits else self.evaluator.to(out, op.results[0])

    def _stacked(self, out: Entry, op: OpPlan | None) -> jax.Array:
        return out[0] if op is not None and op.waits else self.evaluator.bring(out, op, 0)


def _phase(op: OpPlan | None) -> str:
    return "forward" if op is None else op.phase
