"""Evaluates a program as one device of a plan does: every value is the device's own shard.

`Evaluator` decides where each operand is resharded and each sum settled. Here the values are shards, operations are
computed on them, and each collective is replaced by a stand-in (`stand_ins.py`). Virtual values are not computed before
a reader needs them in some sharding: until then a `Placeholder` represents them.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from meshwright import jax_compat
from meshwright.graph.accumulation import ADDING
from meshwright.plans.plan import OpPlan, PlanData
from meshwright.plans.tensor import Spec
from meshwright.program.program import Program
from meshwright.rehearsal import stand_ins
from meshwright.rehearsal.local_equation import Shape, local_shape, run_local
from meshwright.runtime.program import kernels
from meshwright.runtime.program.contributions import Contributions, Waiting, scattered_sums
from meshwright.runtime.program.evaluate import Entry, Evaluator
from meshwright.runtime.program.matching import check_program
from meshwright.runtime.program.virtual_values import Making, Virtual
from meshwright.strategy.reshard import SLICE

Run = Callable[[Any, Sequence[Any], Sequence[Spec | None], Sequence[Spec | None]], list[Any]]


class Placeholder:
    """A virtual value of the whole program that no device has computed yet."""

    def __init__(self, aval: Any):
        self.shape, self.dtype, self.ndim, self.size = aval.shape, aval.dtype, len(aval.shape), aval.size


class _LocalVirtual(Virtual):
    """Virtual values, each computed by one device in the shape that its reader needs."""

    run: Run
    cut: Callable[[Any, Spec], Any]

    def _find_making(self, value: int, target: Spec) -> Making:
        making = super()._find_making(value, target)
        # Scalars among the placeholders have to be computed, too.
        needs = [(x, () if need is None and x[0] in self else need) for x, need in making.needs]
        return making._replace(needs=needs)

    def _make(self, eqn: Any, making: Making, operands: Sequence[Any]) -> list[Any]:
        read, ready = [need for _, need in making.needs], list(operands)
        for i, ((x, spec, _), need) in enumerate(making.needs):
            if spec is None and need and x not in self:  # a constant
                ready[i] = self.cut(ready[i], need)
        return self.run(eqn, ready, read, making.made)


class _LocalContributions(Contributions):
    """One device's contributions to sums over devices, and stand-ins for the sums."""

    run: Run

    def __init__(self, sizes: dict[str, int]):
        self.sizes = sizes

    def make(
        self, eqn: Any, op: OpPlan, axes: tuple[str, ...], operands: Sequence[Any], waits: Sequence[bool]
    ) -> tuple[Any, Waiting]:
        read = [op.partial[0] if w else spec for w, spec in zip(waits, op.operands, strict=True)]
        return self.waiting(self.run(eqn, operands, read, op.partial)[0], op, axes)

    def stacked(self, values: Any, op: OpPlan) -> jax.Array:
        return values

    def add_up(self, value: Any, spec: Waiting) -> jax.Array:
        value = self.settle(value, spec.axes, spec.settled)
        return value if spec.plus is None else value + spec.plus

    def settle(self, value: Any, axes: Sequence[str], settled: Spec | None) -> jax.Array:
        """The stand-in of the sum of contributions over some axes: scattered where the result is split by them."""
        scattered = scattered_sums(axes, settled or ())
        for dim, together in scattered:
            value = stand_ins.reduce_scatter(value, dim, prod(self.sizes[axis] for axis in together))
        left = set(axes).difference(*(together for _, together in scattered))
        return stand_ins.unchanged(value) if any(self.sizes[axis] > 1 for axis in left) else value

    def _constrain(self, value: Any, spec: Spec) -> jax.Array:
        return value


class Rehearser(Evaluator):
    """One evaluation of a program on one device's shards.

    Attributes:
        platform: The platform of the device that it is compiled for; None where it is only traced.
        whole: Labels of the operations that could not be computed on shards, and are computed whole.
    """

    contributions: _LocalContributions
    virtual: _LocalVirtual

    def __init__(self, plan: PlanData):
        super().__init__(plan, None)  # type: ignore[arg-type]  # there is no mesh of devices
        self.sizes = plan.mesh.shape
        self.platform: str | None = None
        self.whole: set[str] = set()
        self.contributions = _LocalContributions(self.sizes)
        self.virtual = _LocalVirtual(self.axes, self.mesh, plan.mesh.names)
        self.contributions.run = self.virtual.run = self._local
        self.virtual.cut = self._cut

    def run(self, program: Program, leaves: Sequence[Any], specs: Sequence[Spec], results: Sequence[Spec]) -> list[Any]:
        """The shards of the results, given those of the arguments, as `Evaluator.run`."""
        check_program(self.plan, program)
        entries = [(x, spec, "forward") for x, spec in zip(leaves, specs, strict=True)]
        outs = self.region(program, entries)
        return [self._to(entry, spec) for entry, spec in zip(outs, results, strict=True)]

    def operation(self, eqn: Any, op: OpPlan | None, ins: list[Entry], outputs: Sequence[int] = ()) -> list[Entry]:
        if op is not None:
            return super().operation(eqn, op, ins, outputs)
        made = [Placeholder(v.aval) for v in eqn.outvars]
        self.virtual.add(eqn, [self.settled(entry) for entry in ins], made)
        return [(x, None, "forward") for x in made]

    def _compute(self, eqn: Any, op: OpPlan | None, operands: Sequence[Any]) -> list[Any]:
        assert op is not None
        if self.platform is not None and kernels.is_kernel(eqn):
            kernels.check_platform(eqn, self.platform)
        return self._local(eqn, operands, op.operands, op.partial)

    def _local(
        self, eqn: Any, operands: Sequence[Any], read: Sequence[Spec | None], made: Sequence[Spec | None]
    ) -> list[Any]:
        """The results of an equation on shards; computed whole, with a note, where that is not possible."""
        expected = [self._shape(v.aval, spec) for v, spec in zip(eqn.outvars, made, strict=True)]
        results = run_local(eqn, operands, expected)
        if results is not None:
            return results
        self.whole.add(eqn.primitive.name)
        wide = [x if spec is None else self._widen(x, spec) for x, spec in zip(operands, read, strict=True)]
        return [
            x if spec is None else self._cut(x, spec) for x, spec in zip(jax_compat.bind(eqn, wide), made, strict=True)
        ]

    def _shape(self, aval: Any, spec: Spec | None) -> Shape:
        return local_shape(aval.shape, spec, self.sizes)

    def _cut(self, value: Any, spec: Spec) -> jax.Array:
        """The first device's shard of a whole value."""
        for dim, axes in enumerate(spec):
            count = int(np.prod([self.sizes[a] for a in axes], dtype=int))
            value = stand_ins.first_part(value, dim, count) if count > 1 else value
        return value

    def _widen(self, value: Any, spec: Spec) -> jax.Array:
        """A value of the whole shape."""
        for dim, axes in enumerate(spec):
            for axis in axes:
                value = stand_ins.repeated(value, dim, self.sizes[axis])
        return value

    def _made(self, value: Any, target: Spec | None, phase: str) -> jax.Array:
        """A constant or virtual value in a sharding; whole without one."""
        if not isinstance(value, Placeholder):
            return value if not target else self._cut(np.asarray(value) if np.isscalar(value) else value, target)
        wanted = ((),) * value.ndim if target is None else target

        def bring(known: tuple[Any, Spec, str], need: Spec) -> jax.Array:
            return self._copied(known, phase, (known[1], need))

        return self.virtual.made_as(value, wanted, bring, "whole")

    def _whole_shape(self, value: Any, spec: Spec) -> tuple[int, ...]:
        counts = (prod(self.sizes[axis] for axis in axes) for axes in spec)
        return tuple(size * count for size, count in zip(value.shape, counts, strict=True))

    def _hop(self, kind: str, value: Any, before: Spec, after: Spec) -> jax.Array:
        """The stand-in of one hop of a resharding."""
        if kind == "permute":
            return stand_ins.unchanged(value)
        changed = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
        left = next((d for d in changed if len(before[d]) > len(after[d])), -1)
        entered = next((d for d in changed if len(after[d]) > len(before[d])), -1)
        moved = set(before[left]) - set(after[left]) if left >= 0 else set(after[entered]) - set(before[entered])
        count = prod(self.sizes[axis] for axis in moved)
        if kind == SLICE:
            return stand_ins.first_part(value, entered, count)
        if kind == "all_gather":
            return stand_ins.all_gather(value, left, count)
        return stand_ins.all_to_all(value, left, entered, count)

    def _give(self, values: Sequence[Any], op: OpPlan | None, settled: bool = False) -> list[Entry]:
        if op is None:
            return [(x, None, "forward") for x in values]
        first = self.contributions.settle(values[0], op.sums, op.results[0]) if op.sums else values[0]
        pairs = zip((first, *values[1:]), op.results, strict=True)
        return [(x, spec, op.phase) for x, spec in pairs]

    def _pseudo(self, entries: Sequence[Entry], plans: Sequence[OpPlan | None]) -> list[Entry]:
        given: list[Entry] = []
        for entry, op in zip(entries, plans, strict=True):
            if op is None:
                given.append((self._whole(entry), None, entry[2]))
            elif op.waits:
                known = self.settled(entry)
                given.append((*self.contributions.waiting(self._to(known, op.partial[0]), op, op.waits), op.phase))
            else:
                given += self._give([self._bring(entry, op, 0)], op)
        return given

    def _bring(self, entry: Entry, op: OpPlan | None, position: int) -> jax.Array:
        return self._whole(entry) if op is None else super()._bring(entry, op, position)

    def _carried(self, out: Entry, op: OpPlan | None) -> jax.Array:
        return self._whole(out) if op is None else super()._carried(out, op)

    def _whole(self, entry: Entry) -> jax.Array:
        """A value that the plan does not split, such as the carry of a loop that nothing reads."""
        value, spec, phase = self.settled(entry)
        return self._made(value, None, phase) if spec is None else self._widen(value, spec)

    def _plain(self, entry: Entry) -> jax.Array:
        value, spec, phase = self.settled(entry)
        return self._made(value, None, phase) if spec is None else value

    def _beside(self, eqn: Any, op: OpPlan, ins: list[Entry]) -> jax.Array | None:
        beside = [
            (spec.plus, spec.settled) for _, spec, _ in ins if isinstance(spec, Waiting) and spec.plus is not None
        ]
        if not beside:
            return None
        values, specs = zip(*beside, strict=True)
        if eqn.primitive.name in ADDING:
            return sum(values[1:], values[0])
        return self._local(eqn, values, specs, op.results)[0]

    def _constrain(self, value: Any, spec: Spec | None) -> jax.Array:
        return value
