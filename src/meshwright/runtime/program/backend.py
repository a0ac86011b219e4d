"""What `Evaluator` computes with: all devices of a mesh at once, or one of them (`rehearsal/share/one_share.py`).

The evaluator decides where each operand is resharded and each sum is settled; a backend does it, to values that it
alone looks into.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import Mesh as DeviceMesh

from meshwright import jax_compat
from meshwright.plans.plan import OpPlan, PlanData
from meshwright.plans.tensor import Spec
from meshwright.runtime.program import corrected
from meshwright.runtime.program.contributions import Contributions
from meshwright.runtime.program.meshes import constrain
from meshwright.runtime.program.virtual_values import Virtual
from meshwright.strategy.sharding import Axes

Bring = Callable[[tuple[Any, Spec, str], Spec], Any]  # reshards a value


class Backend(Protocol):
    """How the values of a program are held, and what is done to them.

    Attributes:
        mesh: The devices, if there are any.
        contributions: Makes and adds up what devices contribute to sums.
        virtual: The values that no operation of the plan makes.
    """

    mesh: DeviceMesh | None
    contributions: Contributions
    virtual: Virtual

    def compute(self, eqn: Any, op: OpPlan, operands: Sequence[Any]) -> list[Any]:
        """The results of an operation of the plan, before its sums are settled."""

    def unplanned(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """The results of an operation that is not in the plan: virtual values."""

    def apply(self, eqn: Any, op: OpPlan, operands: Sequence[Any], read: Sequence[Spec]) -> jax.Array:
        """The first result of an operation, in the plan's sharding, of operands in these."""

    def settle(self, values: Sequence[Any], op: OpPlan, is_settled: bool) -> list[Any]:
        """The results of an operation in the plan's shardings, unless their sums are settled already."""

    def constrain(self, value: Any, spec: Spec) -> jax.Array:
        """A value that has a sharding, held in it."""

    def place(self, value: Any, target: Spec | None, bring: Bring) -> jax.Array:
        """A value without a sharding in one, and as control flow takes it where the target is None."""

    def unsplit(self, value: Any, spec: Spec) -> jax.Array:
        """A value as a loop carries it whose carry the plan does not split."""

    def whole_shape(self, value: Any, spec: Spec) -> tuple[int, ...]:
        """The shape that a value has over all devices."""

    def hop(self, kind: str, value: Any, before: Spec, after: Spec) -> jax.Array:
        """A value resharded by one collective."""


class OnDevices(Backend):
    """All devices of a mesh: values are whole, and constraints say how they are split."""

    mesh: DeviceMesh

    def __init__(self, plan: PlanData, mesh: DeviceMesh):
        self.mesh = mesh
        self.contributions = Contributions(mesh)
        self.virtual = Virtual(Axes(plan.mesh.sizes), mesh, plan.mesh.names)

    def compute(self, eqn: Any, op: OpPlan, operands: Sequence[Any]) -> list[Any]:
        return corrected.run(eqn, op, self.contributions, operands)

    def unplanned(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        return corrected.run(eqn, None, self.contributions, operands)

    def apply(self, eqn: Any, op: OpPlan, operands: Sequence[Any], read: Sequence[Spec]) -> jax.Array:
        return jax_compat.bind(eqn, operands)[0]

    def settle(self, values: Sequence[Any], op: OpPlan, is_settled: bool) -> list[Any]:
        """First as summed, then scattered: to constrain a complete result before the scatter would gather it again."""
        made: list[Any] = []
        for value, partial, spec in zip(values, op.partial, op.results, strict=True):
            if spec is not None:
                if not is_settled and partial not in (None, spec):
                    value = self.constrain(value, partial)
                value = self.constrain(value, spec)
            made.append(value)
        return made

    def constrain(self, value: Any, spec: Spec | None) -> jax.Array:
        assert spec is not None
        return constrain(value, self.mesh, spec)

    def place(self, value: Any, target: Spec | None, bring: Bring) -> jax.Array:
        return value if target is None else self.constrain(value, target)

    def unsplit(self, value: Any, spec: Spec) -> jax.Array:
        return value

    def whole_shape(self, value: Any, spec: Spec) -> tuple[int, ...]:
        return value.shape

    def hop(self, kind: str, value: Any, before: Spec, after: Spec) -> jax.Array:
        return self.constrain(value, after)
