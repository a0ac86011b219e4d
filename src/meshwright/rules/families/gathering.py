"""Gather and scatter: look-ups in, and updates of, a table at computed indices.

The index vector is the last dim of the indices. Every other dim of the indices enumerates queries, and every dim of the
table is one of: batching (paired with a dim of the indices), taken whole (a window dim), looked up at one position, or
windowed in part. Only the last cannot be split: a window may cross a border.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from meshwright.rules.base import LoopNest, Rule, Signature, settled_as
from meshwright.rules.builder import Loops

Dim = tuple[int, ...]

SCATTERS = {
    "scatter": "unsplittable",  # of two writes to one position, their order decides which wins
    "scatter-add": "sum",
    "scatter-sub": "sum",
    "scatter-mul": "prod",
    "scatter-max": "max",
    "scatter-min": "min",
}


def gather(op: Signature) -> LoopNest:
    """Each shard looks up the rows of a split table that it has and gives zeros for others; a sum combines them."""
    numbers = op.params["dimension_numbers"]
    table, indices = op.operands[0].shape, op.operands[1].shape
    loops = Loops()
    queries: list[Dim] = [loops.add(size) for size in indices[:-1]]
    paired = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    operand: list[Dim] = []
    windows: list[Dim] = []
    for d, (size, taken) in enumerate(zip(table, op.params["slice_sizes"], strict=True)):
        if d in paired:
            operand.append(queries[paired[d]])
            continue
        looked_up = d in numbers.start_index_map and taken == 1
        dim = loops.add(size, "parallel" if taken == size else _join(op) if looked_up else "unsplittable")
        operand.append(dim)
        if d not in numbers.collapsed_slice_dims:
            windows.append(dim if taken == size else loops.add(taken, "unsplittable"))
    vector = loops.add(indices[-1], "unsplittable")
    result = _interleave(len(op.results[0].shape), numbers.offset_dims, windows, queries)
    leads = any(loop.kind in ("sum", "or") and loop.size > 1 for loop in loops.loops)
    return loops.nest([tuple(operand), (*queries, vector)], [result], leads=leads)


def _join(op: Signature) -> str:
    """How shards are combined, of which one has the element and the others have zeros; random keys cannot be added."""
    dtype = op.operands[0].dtype
    return "unsplittable" if dtype.startswith("key<") else "or" if dtype == "bool" else "sum"


def scatter(op: Signature) -> LoopNest:
    """A split table takes the updates that are local to it; split updates leave partial tables.

    Partial tables start from the identity of their kind on all devices but one, which starts from the operand, so
    that the operand counts once.
    """
    numbers = op.params["dimension_numbers"]
    table, indices, updates = (tensor.shape for tensor in op.operands)
    loops = Loops()
    batching = set(numbers.scatter_indices_batching_dims)
    kind = settled_as(SCATTERS[op.primitive.replace("_", "-")], op.operands[0].dtype)
    queries = [loops.add(size, "parallel" if d in batching else kind) for d, size in enumerate(indices[:-1])]
    paired = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    widths = (updates[d] for d in numbers.update_window_dims)
    operand: list[Dim] = []
    windows: list[Dim] = []
    for d, size in enumerate(table):
        if d in paired:
            operand.append(queries[paired[d]])
            continue
        inserted = d in numbers.inserted_window_dims
        written = 1 if inserted else next(widths)
        local = written == size or (written == 1 and d in numbers.scatter_dims_to_operand_dims)
        operand.append(loops.add(size, "parallel" if local else "unsplittable"))
        if not inserted:
            windows.append(operand[-1] if written == size else loops.add(written, "unsplittable"))
    vector = loops.add(indices[-1], "unsplittable")
    update = _interleave(len(updates), numbers.update_window_dims, windows, queries)
    combines = any(loop.kind in ("sum", "prod", "max", "min") and loop.size > 1 for loop in loops.loops)
    leads = combines or any(size > 1 and d in numbers.inserted_window_dims for d, size in enumerate(table))
    return loops.nest([tuple(operand), (*queries, vector), update], [tuple(operand)], leads=leads)


def _interleave(rank: int, positions: Sequence[int], windows: list[Dim], queries: list[Dim]) -> tuple[Dim, ...]:
    """Dims of a gather's result or a scatter's updates: windows at the given positions, queries elsewhere."""
    at = set(positions)
    sources: tuple[Iterator[Any], Iterator[Any]] = iter(queries), iter(windows)
    return tuple(next(sources[i in at]) for i in range(rank))


RULES: dict[str, Rule] = {
    "gather": gather,
    **dict.fromkeys(SCATTERS, scatter),
    **{name.replace("-", "_"): scatter for name in SCATTERS},
}
