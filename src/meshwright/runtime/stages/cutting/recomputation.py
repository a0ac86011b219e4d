"""Which values of the forward pass a stage keeps for its backward pass, which computes the others again."""

from collections.abc import Collection, Mapping, Sequence

from meshwright.plans.operations import OpPlan
from meshwright.plans.tensor import Spec
from meshwright.program.program import Operation
from meshwright.runtime.microbatches.batch_parts import ALIKE
from meshwright.runtime.microbatches.cut_operations import is_expensive
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part import Key, Piece
from meshwright.runtime.stages.cutting.assignment import Assignment


def kept_values(
    ahead: Sequence[Piece],
    checkpoint: str,
    step: CutStep,
    assignment: Assignment,
    ops: Mapping[int, OpPlan],
) -> set[Key]:
    """The values of a forward pass that are kept.

    Args:
        ahead: What the forward pass runs.
        checkpoint: ``full`` keeps what a layer hands to the next; ``selective`` also products with weights; ``none``
            what XLA would have in memory if both passes were one program, as the plan has it: the backward pass
            computes again what it would have fused into its kernels.
        step: The step cut into parts.
        assignment: The layers of its units.
        ops: How the operations of one replica are split, by number; what devices must send is not sent again.
    """
    numbers = {id(unit): n for n, unit in enumerate(step.program.operations)}
    if checkpoint == "none":
        sending = _sending(step, ops)
        return {key for one in ahead if _is_held(one.unit, numbers, assignment, sending) for key in one.outs}
    layer = {id(one): assignment.layer[numbers[id(one.unit)]] for one in ahead}
    made: dict[Key, int] = {}
    kept: set[Key] = set()
    for one in ahead:
        here = layer.get(id(one), -1)
        kept.update(key for key in one.ins if key in made and made[key] != here)
        made.update(dict.fromkeys(one.outs, here))
        if checkpoint == "selective" and is_expensive(one.unit):
            weighs = any(step.analysis.status[v] == ALIKE for v in one.unit.inputs)
            kept.update(one.outs if weighs else ())
    return kept


def _is_held(unit: Operation, numbers: Mapping[int, int], assignment: Assignment, sending: Collection[int]) -> bool:
    """Whether results of a unit are kept although no work is to be repeated."""
    if unit.regions or is_expensive(unit):
        return True
    return assignment.is_held[numbers[id(unit)]] or numbers[id(unit)] in sending


def _sending(step: CutStep, ops: Mapping[int, OpPlan]) -> set[int]:
    """The units for which devices send each other something: a sum, or operands in another sharding."""
    found: set[int] = set()
    specs: dict[int, Spec | None] = {}
    for number, unit in enumerate(step.program.operations):
        op = ops.get(unit.id) if not unit.regions else None
        if op is None:
            continue
        needs = zip((specs.get(v) for v in unit.inputs), op.operands, strict=True)
        if op.sums or any(_must_gather(have, need) for have, need in needs):
            found.add(number)
        specs.update(zip(unit.outputs, op.results, strict=True))
    return found


def _must_gather(have: Spec | None, need: Spec | None) -> bool:
    """Whether an operand is split otherwise than it is needed; splitting it further takes no communication."""
    if have is None or need is None:
        return False
    return any(axes != wanted[: len(axes)] for axes, wanted in zip(have, need, strict=True))
