"""What an operation does on one device under each of its strategies, given which axes split its loops."""

from collections.abc import Iterator
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Floats
from meshwright.cost.attention import CUDNN, SPLASH, AttentionCall, backward_flops
from meshwright.cost.load import Load, Loads
from meshwright.cost.xla_gpu.kernels import arithmetic_left, counted, rate_left
from meshwright.graph.facts import product_dims
from meshwright.hardware import Chip
from meshwright.rules.base import LoopNest, Signature, multiplied_dtype
from meshwright.rules.registry import kernel_name

#: Part of the rate that products in half precision keep if rows start at multiples of so many bytes only: kernels then
#: load as few bytes at a time. Two figures are of heads of GPT-2 (50257 tokens: 2 bytes) and BERT (30522: 4) on one
#: H200, three products each; the third lies between.
_ALIGNED = {2: 0.43, 4: 0.65, 8: 0.85}

_ATTENTION = {"dot_product_attention_": CUDNN, "splash_": SPLASH}  # by how the names of operations begin


def loads_of(
    chip: Chip | None,
    op: Signature,
    nest: LoopNest,
    num_parts: NDArray[np.int64],
    moved_bytes: Floats,
    num_fetches: Floats | float = 0.0,
    dtype: str | None = None,
    computed: int = 1,
    kernel: bool = False,
    trips: float = 1.0,
    recomputed: bool = False,
) -> Loads:
    """The work of an operation on one device under each strategy.

    Args:
        chip: The chip; None on an abstract mesh.
        op: The operation.
        nest: Its loop nest.
        num_parts: Over how many devices each strategy spreads the work; every device repeats work that is not split.
        moved_bytes: Bytes that one device reads from and writes to memory.
        num_fetches: How many rows of pixels under a convolution's window one device fetches.
        dtype: The dtype in which a product runs; by default its operands'.
        computed: How many kernels compute it.
        kernel: Whether it stands for a kernel, or is fused with an operation that does.
        trips, recomputed: As in `Load`.
    """
    is_cuda = chip is not None and chip.vendor == "NVIDIA"
    flops = nest.flops / num_parts
    special = (computed * nest.num_special + (counted(op) if is_cuda else 0.0)) / num_parts
    fetches = np.broadcast_to(num_fetches, num_parts.shape)
    call = attention_call(op, nest)
    if op.host_copy_bytes:
        moved_bytes = op.host_copy_bytes / num_parts
    first = Load(
        float(flops[0]),
        float(moved_bytes[0]),
        dtype or multiplied_dtype(op),
        kernel,
        trips,
        recomputed,
        float(fetches[0]),
        float(special[0]),
        int(num_parts[0]),
        *(("backward" if call.backward else "forward", call.keys, call.head_dim) if call else ("", 0.0, 0)),
        alignment(chip, op) * (rate_left(op) if is_cuda and nest.flops else 1.0),
        arithmetic_left(op) if is_cuda and nest.flops else 1.0,
        op.host_copy_bytes > 0,
    )
    return Loads(first, flops, moved_bytes, fetches, special)


def attention_call(op: Signature, nest: LoopNest) -> AttentionCall | None:
    """The call of a fused attention kernel, cuDNN's or JAX's for TPUs, that an operation is; None for all others."""
    name = kernel_name(op)
    kernel = next((kernel for start, kernel in _ATTENTION.items() if name.startswith(start)), None)
    if kernel is None or not nest.flops:
        return None
    query = next(tensor.shape for tensor in op.operands if "float" in tensor.dtype)
    backward = any(word in name for word in ("_bwd", "_dkv", "_dq"))
    # Of the two kernels of a backward pass for TPUs one does four of seven products, the other three.
    share = next((part for word, part in (("_dkv", 4 / 7), ("_dq", 3 / 7)) if word in name), 1.0)
    per_key = 4.0 * prod(query) * (backward_flops(kernel) * share if backward else 1.0)
    return AttentionCall(backward, nest.flops / per_key, query[-1])


def alignment(chip: Chip | None, op: Signature) -> float:
    """Part of a product's rate that is left on GPUs where rows of operands or result are not multiples of 16 bytes."""
    if op.primitive != "dot_general" or chip is None or chip.vendor != "NVIDIA":
        return 1.0
    halves = [t for t in (*op.operands, *op.results) if t.itemsize == 2]
    rows = {2 * size for size in _rows(op)} if halves else set()
    return min((_ALIGNED.get(gcd(row, 16), 1.0) for row in rows), default=1.0)


def _rows(op: Signature) -> Iterator[int]:
    """Elements of a row of each operand and of the result as matrices: of the dims that are merged with the last."""
    free = []
    for side, tensor in enumerate(op.operands):
        along, rows, columns = product_dims(op, side)
        free.append(rows if side == 0 else columns)
        last = max((d for d, size in enumerate(tensor.shape) if size > 1), default=-1)
        yield next((prod(tensor.shape[d] for d in dims) for dims in (along, rows, columns) if last in dims), 8)
    left, right = (prod(op.operands[side].shape[d] for d in dims) for side, dims in enumerate(free))
    yield right if right > 1 else left
