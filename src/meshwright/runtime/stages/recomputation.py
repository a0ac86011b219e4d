"""Which values of the forward pass a stage keeps for its backward pass, which computes the others again."""

from collections.abc import Sequence

from meshwright.runtime.microbatches.batch_parts import ALIKE
from meshwright.runtime.microbatches.cut_operations import is_expensive
from meshwright.runtime.microbatches.microbatches import CutStep
from meshwright.runtime.microbatches.one_part import OnePart
from meshwright.runtime.microbatches.part_program import Instruction, Key
from meshwright.runtime.stages.assignment import Assignment


def kept_values(
    ahead: Sequence[Instruction], checkpoint: str, step: CutStep | OnePart, assignment: Assignment
) -> set[Key]:
    """The values of a forward pass that are kept.

    Args:
        ahead: What the forward pass runs.
        checkpoint: ``full`` keeps what a layer hands to the next; ``selective`` also products with weights.
        step: The step cut into parts.
        assignment: The layers of its units.
    """
    numbers = {id(unit): n for n, unit in enumerate(step.program.units)}
    layer = {id(one): assignment.layer[numbers[id(one.unit)]] for one in ahead if one.unit is not None}
    made: dict[Key, int] = {}
    kept: set[Key] = set()
    for one in ahead:
        here = layer.get(id(one), -1)
        kept.update(key for key in one.ins if key in made and made[key] != here)
        made.update(dict.fromkeys(one.outs, here))
        if checkpoint == "selective" and one.unit is not None and is_expensive(one.unit):
            weighs = any(step.analysis.status[v] == ALIKE for v in one.unit.ins)
            kept.update(one.outs if weighs else ())
    return kept
