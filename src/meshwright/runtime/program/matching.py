"""Compares a plan with a program: whether the plan fits it, and which operations XLA shards without a constraint."""

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.tracing.flatten import Names, Program
from meshwright.plans.plan import OpPlan, PlanData
from meshwright.plans.tensor import Spec
from meshwright.rules.base import Signature, TensorType
from meshwright.rules.elementwise import EVEN
from meshwright.runtime.program.serials import count, is_operation


def check_program(plan: PlanData, closed: Any) -> None:
    """Refuses a plan whose operations are not those of a jaxpr.

    Raises:
        ShardingError: It was made for another function, other shapes or other dtypes; the message names the first
            operation that differs.
    """
    program = Program(closed, Names())
    signatures = [program.names.signatures[number] for number in program.signature]
    for op in plan.ops:
        found = signatures[op.serial] if op.serial < len(signatures) else None
        if found is None or not _fits(op, found, plan.mesh.shape):
            raise other_function(op, "nothing" if found is None else _text(found))


def other_function(op: OpPlan, found: str) -> ShardingError:
    """The error for a plan with an operation that the function does not have."""
    return ShardingError(
        f"the plan has {op.label} as operation {op.serial}, where the function has {found}: it was made for another "
        "function, other shapes or other dtypes; make the plan again with these arguments"
    )


def _fits(op: OpPlan, found: Signature, axes: dict[str, int]) -> bool:
    return (
        op.label.rpartition("/")[2] == found.primitive
        and _lie(op.operands, found.operands, axes)
        and _lie(op.results, found.results, axes)
    )


def _lie(specs: Sequence[Spec | None], kinds: Sequence[TensorType], axes: dict[str, int]) -> bool:
    """Whether tensors of some types can have these shardings."""
    if len(specs) != len(kinds):
        return False
    for spec, kind in zip(specs, kinds, strict=True):
        if spec is None:
            continue
        if len(spec) != len(kind.shape):
            return False
        for size, names in zip(kind.shape, spec, strict=True):
            for name in names:
                if size % axes[name]:
                    return False
                size //= axes[name]
    return True


def _text(op: Signature) -> str:
    return f"{op.primitive} of {', '.join(f'{k.dtype}{list(k.shape)}' for k in op.operands) or 'nothing'}"


def readers_needs(jaxpr: Any, ops: Mapping[int, OpPlan], serial: int) -> dict[Any, set[Spec | None]]:
    """For each variable of a jaxpr the shardings in which operations read it, given the number of its first one.

    Loops, calls and the readers of the jaxpr's results specify none: None represents them.
    """
    wanted: dict[Any, set[Spec | None]] = {v: {None} for v in jaxpr.outvars if not isinstance(v, jax_compat.Literal)}
    for eqn in jaxpr.eqns:
        op = ops.get(serial) if is_operation(eqn) else None
        for i, v in enumerate(eqn.invars):
            if not isinstance(v, jax_compat.Literal):
                wanted.setdefault(v, set()).add(None if op is None else op.operands[i])
        serial += count(eqn)
    return wanted


def is_even(eqn: Any, op: OpPlan) -> bool:
    """Whether an operation is elementwise with all its arrays in one sharding, which XLA's propagation then finds.

    If all readers need its result in that sharding, it needs no constraint where it is computed. The first reader that
    is not elementwise constrains it, so that propagation meets only this sharding on every side. If a reader needs
    another sharding, the result must be constrained at once: XLA would give the resharded copy to its other readers.
    """
    shape, spec = eqn.outvars[0].aval.shape, op.results[0]
    return (
        eqn.primitive.name in EVEN
        and spec is not None
        and not op.waits
        and op.partial[0] in (None, spec)
        and all(v.aval.shape in ((), shape) for v in eqn.invars)
        and all(s == spec for v, s in zip(eqn.invars, op.operands, strict=True) if v.aval.shape)
    )
