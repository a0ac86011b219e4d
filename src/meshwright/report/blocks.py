"""The blocks of a plan's program for the page: known of a plan that was just made, which has its traced program."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.plans.plan import PlanData


def blocks_data(plan: "PlanData") -> dict[str, Any] | None:
    """The sequence of segments and the blocks of each; None where the program is not known."""
    if plan.origin is None:
        return None
    from meshwright.blocks import blocks_of  # here, since plans from files are reported without JAX
    from meshwright.runtime.microbatches.planned_parts import traced_as_planned

    blocks = blocks_of(traced_as_planned(plan, plan.origin).graph)
    if not blocks.blocks:
        return None
    order = sorted(
        (numbers[0], place, len(numbers), segment.trips)
        for place, segment in enumerate(blocks.segments)
        for numbers in segment.block_numbers
    )
    rows = [
        {
            "segment": place,
            "number": number,
            "name": blocks.blocks[number].entries[0].name,
            "choices": ", ".join(blocks.blocks[number].choices),
            "operations": len(blocks.blocks[number].operations),
            "times": segment.count,
        }
        for place, segment in enumerate(blocks.segments)
        for number in segment.blocks
    ]
    segments = [{"fingerprint": s.fingerprint, "space": s.space} for s in blocks.segments]
    runs = [{"first": first, "segment": place, "size": size, "trips": trips} for first, place, size, trips in order]
    return {"segments": segments, "runs": runs, "rows": rows, "count": len(blocks.blocks)}
