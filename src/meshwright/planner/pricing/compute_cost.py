"""Time of one operation's own work on one device: a roofline over matrix products and memory traffic.

A convolution is a product once the pixels under its windows are fetched; the number of fetches does not depend on the
number of features, so with few features fetching takes most of the time. Special functions cost time even if they are
fused with their producers or readers.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from meshwright.plans.operations import Load
from meshwright.rules.base import LoopNest, Signature, multiplied_dtype

Array = NDArray[np.float64]


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
    if load.flops:
        return float(
            chip.launch_s + chip.matmul_s(load.flops, load.dtype, load.num_bytes) + chip.fetch_s * load.fetches
        )
    moving_s = chip.launch_s * load.kernel + chip.memory_s(load.num_bytes) if load.num_bytes else 0.0
    return float(moving_s + chip.special_s * load.special)


def compute_s(
    chip: ChipTimes | None,
    op: Signature,
    nest: LoopNest,
    num_parts: NDArray[np.int64],
    moved_bytes: Array,
    num_fetches: Array | float = 0.0,
    dtype: str | None = None,
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
    """
    if chip is None:
        return np.zeros(len(num_parts))
    if nest.flops:
        product_s = chip.matmul_s(nest.flops / num_parts, dtype or multiplied_dtype(op), moved_bytes)
        return chip.launch_s + product_s + chip.fetch_s * num_fetches
    moving_s = np.where(moved_bytes > 0, chip.launch_s * (not nest.fusible) + chip.memory_s(moved_bytes), 0.0)
    return moving_s + chip.special_s * nest.num_special / num_parts
