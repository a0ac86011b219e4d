"""Compares a plan with a program: whether the plan fits it, and which operations XLA shards without a constraint."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from meshwright.errors import ShardingError
from meshwright.graph.tracing.flatten import Flat, Names
from meshwright.plans.plan import OpPlan, PlanData
from meshwright.plans.tensor import Spec
from meshwright.program.program import Program
from meshwright.program.text import first_difference, program_form
from meshwright.rules.base import Signature, TensorType
from meshwright.rules.families.elementwise import EVEN


def check_program(plan: PlanData, program: Program) -> None:
    """Refuses a plan whose operations are not those of a program.

    Files of earlier versions do not have the form of the program; then each operation is held against its shardings.

    Raises:
        ShardingError: It was made for another function, other shapes or other dtypes; the message names the first
            operation that differs.
    """
    check_form(plan, program)
    flat = Flat(program, Names())
    signatures = {i: flat.names.signatures[number] for i, number in zip(flat.id, flat.signature, strict=True)}
    for op in plan.ops:
        found = signatures.get(op.serial)
        if found is None or not _fits(op, found, plan.mesh.shape):
            raise other_function(op, "nothing" if found is None else _text(found))


def check_form(plan: PlanData, program: Program) -> None:
    """Refuses a plan for a program of another form, where the plan knows its form.

    Raises:
        ShardingError: The form is another; the message has the first line that differs.
    """
    if plan.form and (difference := first_difference(plan.form, program_form(program))):
        raise ShardingError(
            f"the plan was made for another function, other shapes or other dtypes: where its program has "
            f"{difference.planned!r:.300}, this one has {difference.found!r:.300}; {_of_another_jax(plan)}"
            "make the plan again with these arguments"
        )


def _of_another_jax(plan: PlanData) -> str:
    """That two versions of JAX may differ in how they trace one function, where a plan is of another one."""
    then = plan.provenance.get("jax", jax.__version__)
    if then == jax.__version__:
        return ""
    return f"it was made with jax {then}, which may trace a function otherwise than jax {jax.__version__} here does: "


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


def readers_needs(region: Program, ops: Mapping[int, OpPlan]) -> dict[int, set[Spec | None]]:
    """For each value of a region the shardings in which operations read it.

    Operations with regions and the readers of the region's results specify none: None represents them.
    """
    wanted: dict[int, set[Spec | None]] = {value: {None} for value in region.outputs}
    for operation in region.operations:
        op = None if operation.regions else ops.get(operation.id)
        for place, value in enumerate(operation.inputs):
            wanted.setdefault(value, set()).add(None if op is None else op.operands[place])
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
