"""Time of one operation's own work on one device: a roofline over matrix products and memory traffic.

A convolution is a product once the pixels under its windows are fetched; the number of fetches does not depend on the
number of features, so with few features fetching takes most of the time. Special functions cost time even if they are
fused with their producers or readers.
"""

from collections.abc import Iterator
from math import gcd, prod
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.graph.facts import product_dims
from meshwright.hardware import Chip
from meshwright.hardware.attention import CUDNN, SPLASH, AttentionCall, attention_flops_s, backward_flops, fused_kernel
from meshwright.plans.operations import Load
from meshwright.rules.base import LoopNest, Signature, multiplied_dtype
from meshwright.rules.registry import kernel_name

Array = NDArray[np.float64]

#: Part of the rate that products in half precision keep if rows start at multiples of so many bytes only: kernels then
#: load as few bytes at a time. Two figures are of heads of GPT-2 (50257 tokens: 2 bytes) and BERT (30522: 4) on one
#: H200, three products each; the third lies between.
_ALIGNED = {2: 0.43, 4: 0.65, 8: 0.85}


_ATTENTION = {"dot_product_attention_": CUDNN, "splash_": SPLASH}  # by how the names of operations begin


class ChipTimes(Protocol):
    """The properties of a chip that the roofline needs."""

    @property
    def launch_s(self) -> float: ...

    @property
    def fetch_s(self) -> float: ...

    @property
    def special_s(self) -> float: ...

    def matmul_s(self, flops: Any, dtype: str = ..., num_bytes: Any = ...) -> Any: ...

    def memory_s(self, num_bytes: Any) -> Any: ...


def load_s(chip: ChipTimes, load: Load) -> float:
    """Seconds of one trip of a plan's operation on one device, as `compute_s` has them for its strategy."""
    if load.attention and isinstance(chip, Chip):
        call = AttentionCall(load.attention == "backward", load.keys, load.head_dim)
        return chip.launch_s + load.flops / attention_flops_s(chip, fused_kernel(chip), call)
    if load.flops:
        product_s = chip.matmul_s(load.flops / load.aligned, load.dtype, load.num_bytes / load.aligned)
        return float(chip.launch_s + product_s + chip.fetch_s * load.fetches)
    return float(chip.launch_s * load.kernel + chip.memory_s(load.num_bytes) + chip.special_s * load.special)


def compute_s(
    chip: ChipTimes | None,
    op: Signature,
    nest: LoopNest,
    num_parts: NDArray[np.int64],
    moved_bytes: Array,
    num_fetches: Array | float = 0.0,
    dtype: str | None = None,
    attention: AttentionCall | None = None,
    aligned: float = 1.0,
    computed: int = 1,
    is_kernel: bool = False,
) -> Array:
    """Seconds on one device for each strategy.

    Args:
        chip: The chip; None on an abstract mesh, where compute is free.
        op: The operation.
        nest: Its loop nest.
        num_parts: Over how many devices each strategy spreads the work; every device repeats work that is not split.
        moved_bytes: Bytes that one device reads from and writes to memory.
        num_fetches: How many rows of pixels under a convolution's window one device fetches.
        dtype: The dtype in which a product runs; by default its operands'.
        attention: The call, if it is a fused attention kernel, which reaches less than products do.
        aligned: Part of a product's rate that is left: see `alignment`.
        computed: How many kernels compute it.
        is_kernel: Whether it stands for a kernel, or is fused with an operation that does.
    """
    if chip is None:
        return np.zeros(len(num_parts))
    if attention is not None and isinstance(chip, Chip):
        return chip.launch_s + nest.flops / num_parts / attention_flops_s(chip, fused_kernel(chip), attention)
    if nest.flops:
        work = nest.flops / num_parts / aligned
        product_s = chip.matmul_s(work, dtype or multiplied_dtype(op), moved_bytes / aligned)
        return chip.launch_s + product_s + chip.fetch_s * num_fetches
    moving_s = chip.launch_s * is_kernel + chip.memory_s(moved_bytes)
    return moving_s + chip.special_s * computed * nest.num_special / num_parts


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


def alignment(chip: ChipTimes | None, op: Signature) -> float:
    """Part of a product's rate that is left on GPUs where rows of operands or result are not multiples of 16 bytes."""
    if op.primitive != "dot_general" or not isinstance(chip, Chip) or chip.vendor != "NVIDIA":
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
