"""The backend of `Evaluator` with which one device of a plan computes: every value is the device's own shard.

Operations are computed on shards, and each collective is replaced by a stand-in (`stand_ins.py`). Virtual values are
not computed before a reader needs them in some sharding: until then a `Placeholder` represents them.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax
import numpy as np

from meshwright import jax_compat
from meshwright.plans.plan import OpPlan, PlanData
from meshwright.plans.tensor import Spec
from meshwright.rehearsal.share import stand_ins
from meshwright.rehearsal.share.local_equation import local_shape, run_local
from meshwright.runtime.program import kernels
from meshwright.runtime.program.backend import Backend, Bring
from meshwright.runtime.program.contributions import Contributions, Waiting, scattered_sums
from meshwright.runtime.program.virtual_values import Making, Virtual
from meshwright.strategy.reshard import SLICE
from meshwright.strategy.sharding import Axes

Run = Callable[[Any, Sequence[Any], Sequence[Spec | None], Sequence[Spec | None]], list[Any]]


class Placeholder:
    """A virtual value of the whole program that no device has computed yet."""

    def __init__(self, aval: Any):
        self.shape, self.dtype, self.ndim, self.size = aval.shape, aval.dtype, len(aval.shape), aval.size


class _LocalVirtual(Virtual):
    """Virtual values, each computed by one device in the shape that its reader needs."""

    def __init__(self, axes: Axes, names: tuple[str, ...], run: Run, cut: Callable[[Any, Spec], Any]):
        super().__init__(axes, None, names)
        self.run, self.cut = run, cut

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

    def __init__(self, sizes: dict[str, int], run: Run):
        self.sizes, self.run = sizes, run

    def make(
        self, eqn: Any, op: OpPlan, axes: tuple[str, ...], operands: Sequence[Any], waits: Sequence[bool]
    ) -> tuple[Any, Waiting]:
        read = [op.partial[0] if w else spec for w, spec in zip(waits, op.operands, strict=True)]
        return self.waiting(self.run(eqn, operands, read, op.partial)[0], op, axes)

    def counted_once(self, value: Any, axes: Sequence[str]) -> jax.Array:
        return value

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


class OneShare(Backend):
    """One device of a plan: every value is the device's own shard, and collectives have stand-ins.

    Attributes:
        platform: The platform of the device that it is compiled for; None where it is only traced.
        whole: Names of the operations that could not be computed on shards, and are computed whole.
    """

    def __init__(self, plan: PlanData):
        self.mesh = None
        self.sizes = plan.mesh.shape
        self.platform: str | None = None
        self.whole: set[str] = set()
        self.contributions = _LocalContributions(self.sizes, self._local)
        self.virtual = _LocalVirtual(Axes(plan.mesh.sizes), plan.mesh.names, self._local, self._cut)

    def compute(self, eqn: Any, op: OpPlan, operands: Sequence[Any]) -> list[Any]:
        if self.platform is not None and kernels.is_kernel(eqn):
            kernels.check_platform(eqn, self.platform)
        return self._local(eqn, operands, op.operands, op.partial)

    def unplanned(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        return [Placeholder(v.aval) for v in eqn.outvars]

    def apply(self, eqn: Any, op: OpPlan, operands: Sequence[Any], read: Sequence[Spec]) -> jax.Array:
        return self._local(eqn, operands, read, op.results)[0]

    def settle(self, values: Sequence[Any], op: OpPlan, is_settled: bool) -> list[Any]:
        first = self.contributions.settle(values[0], op.sums, op.results[0]) if op.sums else values[0]
        return [first, *values[1:]]

    def constrain(self, value: Any, spec: Spec) -> jax.Array:
        return value

    def place(self, value: Any, target: Spec | None, bring: Bring) -> jax.Array:
        """A constant or virtual value in a sharding; whole without one."""
        if not isinstance(value, Placeholder):
            return value if not target else self._cut(np.asarray(value) if np.isscalar(value) else value, target)
        return self.virtual.made_as(value, ((),) * value.ndim if target is None else target, bring, "whole")

    def unsplit(self, value: Any, spec: Spec) -> jax.Array:
        """A value of the whole shape."""
        for dim, axes in enumerate(spec):
            for axis in axes:
                value = stand_ins.repeated(value, dim, self.sizes[axis])
        return value

    def whole_shape(self, value: Any, spec: Spec) -> tuple[int, ...]:
        counts = (prod(self.sizes[axis] for axis in axes) for axes in spec)
        return tuple(size * count for size, count in zip(value.shape, counts, strict=True))

    def hop(self, kind: str, value: Any, before: Spec, after: Spec) -> jax.Array:
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

    def _local(
        self, eqn: Any, operands: Sequence[Any], read: Sequence[Spec | None], made: Sequence[Spec | None]
    ) -> list[Any]:
        """The results of an equation on shards; computed whole, with a note, where that is not possible."""
        expected = [local_shape(v.aval.shape, spec, self.sizes) for v, spec in zip(eqn.outvars, made, strict=True)]
        results = run_local(eqn, operands, expected)
        if results is not None:
            return results
        self.whole.add(eqn.primitive.name)
        wide = [x if spec is None else self.unsplit(x, spec) for x, spec in zip(operands, read, strict=True)]
        return [
            x if spec is None else self._cut(x, spec) for x, spec in zip(jax_compat.bind(eqn, wide), made, strict=True)
        ]

    def _cut(self, value: Any, spec: Spec) -> jax.Array:
        """The first device's shard of a whole value."""
        for dim, axes in enumerate(spec):
            count = int(np.prod([self.sizes[a] for a in axes], dtype=int))
            value = stand_ins.first_part(value, dim, count) if count > 1 else value
        return value
