"""Remarks of a plan on operations that cannot be split, and on kernels that its chip cannot run."""

from meshwright.graph import Graph
from meshwright.hardware import Chip
from meshwright.rules import Signature, has_rule, kernel_name, loop_nest
from meshwright.rules.families.attention import most_parts
from meshwright.rules.families.pallas import made_for, why_whole


def unsplittable(graph: Graph) -> tuple[str, ...]:
    """Primitives that are planned without a rule, and kernels whose grids cannot be split."""
    return tuple(sorted({kernel_name(s) for s in _signatures(graph) if not has_rule(s) or _is_whole(s)}))


def kernel_remarks(graph: Graph) -> list[str]:
    """Says of each kernel whose grid cannot be split why that is so, and what to do."""
    whole = {kernel_name(s): s for s in _signatures(graph) if has_rule(s) and _is_whole(s)}
    return [
        f"Every device runs the whole Pallas kernel {name!r}: {why_whole(op)}. To have it split, give it a grid with "
        f'an axis that only selects blocks; or, if an axis can be split all the same, say so by @mw.rule("{name}").'
        for name, op in sorted(whole.items())
    ]


def foreign_remarks(graph: Graph, chip: Chip | None) -> list[str]:
    """Says which kernels the planned chip cannot run, and what to do."""
    if chip is None or chip.vendor == "":
        return []
    kernels = {kernel_name(s): made_for(s) for s in _signatures(graph) if s.primitive == "pallas_call"}
    return [
        f"The Pallas kernel {name!r} is written for chips of {' and '.join(makers)} and does not run on {chip.name}: "
        "call one that is written for this chip, or the plain operations, or plan for another chip."
        for name, makers in sorted(kernels.items())
        if makers and chip.vendor not in makers
    ]


def attention_remarks(graph: Graph, num_devices: int) -> list[str]:
    """Says where fused attention keeps devices idle, since its mask does not let tokens be split, and what to do."""
    most = min((parts for s in _signatures(graph) if (parts := most_parts(s)) is not None), default=num_devices)
    if most >= num_devices:
        return []
    return [
        f"cuDNN's attention is split over at most {most} of {num_devices} devices, by sequences and heads: its tokens "
        "are not split under a causal mask with a bias or over an odd number of tokens, nor under a window longer than "
        'half of them. jax.nn.dot_product_attention(implementation="xla") can be split over queries, too.'
    ]


def _is_whole(op: Signature) -> bool:
    """Whether an operation is a Pallas kernel that cannot be split."""
    if op.primitive != "pallas_call":
        return False
    return not any(loop.kind != "unsplittable" and loop.size > 1 for loop in loop_nest(op).loops)


def _signatures(graph: Graph) -> list[Signature]:
    return [graph.columns.signatures[number] for number in graph.columns.examples]
