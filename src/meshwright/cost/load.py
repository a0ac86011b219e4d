"""The work of one operation on one device: what a plan records of it, and what each strategy of it would be."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright.schema import Amount, Rate, Size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Load:
    """The work of one operation on one device in one trip; its time follows from the chip.

    Attributes:
        flops: FLOPs of products; 0 for everything else.
        num_bytes: Bytes read from and written to memory.
        dtype: Type of the operands.
        kernel: Whether it is a kernel of its own; if not, it is fused with others.
        trips: How often it runs in one step.
        recomputed: Whether it repeats forward work because of `jax.checkpoint`.
        fetches: How many rows of pixels under a convolution's window are fetched; 0 for everything else.
        special: How many divisions, roots, exponentials and the like are taken.
        num_parts: The number of devices that share the work; the others repeat it. 0 in plans of earlier versions,
            which do not record it.
        attention: ``"forward"`` or ``"backward"`` for a fused attention kernel, else empty.
        keys: For such a kernel, how many keys each query sees on average.
        head_dim: For such a kernel, the size of a head.
        aligned: Part of a product's rate that is left to its kernel, such as where rows of its operands do not start at
            even addresses; its bytes are slower, too.
        useful: Part of a kernel's arithmetic that is asked for; the rest is spent on zeros and on idle cores.
        over_host_link: Whether its bytes go between the device and its host, rather than through the device's memory.
    """

    flops: Amount
    num_bytes: Amount
    dtype: str
    kernel: bool
    trips: Amount
    recomputed: bool
    fetches: Amount = 0.0
    special: Amount = 0.0
    num_parts: Size = 0
    attention: str = ""
    keys: Amount = 0.0
    head_dim: Size = 0
    aligned: Rate = 1.0
    useful: Rate = 1.0
    over_host_link: bool = False


@dataclass(frozen=True, slots=True)
class Loads:
    """The work of one operation on one device under each of its strategies, which differ in amounts alone.

    Attributes:
        first: The work under the first strategy.
        flops, num_bytes, fetches, special: Of each strategy, as in `Load`.
    """

    first: Load
    flops: "NDArray[np.float64]"
    num_bytes: "NDArray[np.float64]"
    fetches: "NDArray[np.float64]"
    special: "NDArray[np.float64]"
