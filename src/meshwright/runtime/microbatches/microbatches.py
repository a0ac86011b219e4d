"""Cuts a step into microbatches: the parts of a batch run one after the other, with the numbers of the whole.

The step is traced once, with the whole batch; `batch_parts` finds how its values depend on the batch, and
`part_program` builds the program for a part, which runs inside a loop over the parts. Contributions are added up from
part to part; operations that read their sums run once, afterwards. So gradients of a mean loss, metrics and a clipped
update are those of the whole batch. Where an operation on examples needs a value that is known only after the whole
batch has run (batch norm), the step cannot be cut, unless that value is cheap to compute beforehand (the number of
tokens that are not padding).
"""

from collections.abc import Sequence
from typing import Any

from jax.tree_util import tree_leaves

from meshwright.errors import ShardingError
from meshwright.graph.tracing.call import Call
from meshwright.graph.tracing.planned_devices import traced_for
from meshwright.hardware import Cluster
from meshwright.program.numbering import Changed
from meshwright.runtime.microbatches.cut_operations import CannotCut, Cut
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part_loop import in_loop


def in_microbatches(call: Call, batch: Sequence[int], count: int, cluster: Cluster | None = None) -> Changed:
    """The program of a call with its batch cut into parts that run one after the other.

    Args:
        call: A step as JAX sees it.
        batch: Positions of the arguments whose leaves are examples stacked along their first dim.
        count: The number of parts.
        cluster: The cluster that it was traced for; the devices at hand by default.

    Raises:
        ShardingError: The batch does not divide into so many parts.
        CannotCut: The numbers would change.
    """
    args = call.arguments.fill(call.types)
    size = _batch_size(args, batch, count)
    is_batch = [i in batch for i, arg in enumerate(args) for _ in tree_leaves(arg)]
    pairs = zip(is_batch, call.arguments.positions, strict=True)
    examples = [given for given, position in pairs if position is not None]
    with traced_for(cluster):
        try:
            step = CutStep(call.program, examples, Cut(count, size // count))
        except CannotCut:  # examples may come in groups, which parts of neighbours keep together
            step = CutStep(call.program, examples, Cut(count, 1))
        return in_loop(step)


def _batch_size(args: Sequence[Any], batch: Sequence[int], count: int) -> int:
    leaves = [x for i in batch if i < len(args) for x in tree_leaves(args[i]) if getattr(x, "shape", ())]
    sizes = sorted({x.shape[0] for x in leaves})
    if not sizes:
        why = f"batch_argnums {tuple(batch)} hold no arrays"
        if not batch:
            why = "the function returns no next state, or no other argument is a stack of examples; give batch_argnums"
        raise ShardingError(f"there is no batch to cut into {count} microbatches: {why}")
    if len(sizes) > 1:
        raise ShardingError(
            f"the batch has first dims of {' and '.join(map(str, sizes))}; all its leaves must be stacks of the same "
            "examples to be cut into microbatches (batch_argnums says which arguments are the batch)"
        )
    if not sizes[0]:
        raise CannotCut("the batch has no examples")
    if sizes[0] % count:
        raise ShardingError(
            f"a batch of {sizes[0]} does not divide into {count} microbatches; give a batch of a multiple of {count}, "
            "or another number of microbatches"
        )
    return int(sizes[0])
