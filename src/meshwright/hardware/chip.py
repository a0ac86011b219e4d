"""Describes one device: its memory, its peak rates, and the fractions of them that programs reach."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.hardware.link import Link
from meshwright.schema import Amount, Count, Rate, Size
from meshwright.units import Numeric

if TYPE_CHECKING:
    pass

#: How a figure is known, best first.
SURENESS = ("measured", "vendor", "assumed")


@dataclass(frozen=True)
class Figure:
    """One number of the catalogue with where it came from.

    Attributes:
        name: Which number, e.g. ``"memory_bandwidth"`` or ``"intra.bandwidth"``.
        value: The number, in bytes, seconds, FLOP/s or as a fraction.
        source: Who published or measured it.
        date: When it was looked up.
        sure: ``"measured"``, ``"vendor"`` or ``"assumed"``.
    """

    name: str
    value: float
    source: str
    date: str
    sure: str


@dataclass(frozen=True)
class Chip:
    """One accelerator as JAX sees it: a device.

    ``float32`` products are priced as JAX runs them by default, not as IEEE arithmetic: ``lax.Precision.DEFAULT`` uses
    TF32 on NVIDIA GPUs from Ampere on and one bfloat16 pass on TPUs.

    Attributes:
        name: Its name in the catalogue, e.g. ``"a100-sxm-40gb"``.
        vendor: Who makes it.
        aliases: Other exact names.
        device_kinds: JAX's names for it (``device.device_kind``).
        compute_capability: The version of an NVIDIA chip's architecture, e.g. ``"9.0"``; empty on others.
        cores: Its streaming multiprocessors or tensor cores, as JAX counts them for one device; 0 where not known.
        memory_bytes: Memory that programs can use.
        memory_bandwidth: Bytes per second, peak.
        memory_efficiency: Fraction of it that streaming operations reach.
        flops: Matrix rate by type, FLOP/s, dense.
        vector_flops: Rate of everything that is not a matrix product.
        launch_s: Fixed time of one kernel.
        fetch_s: Time to fetch a row of pixels under a convolution's window; 0 where the product hides it.
        special_s: Time of a division, a root, an exponential or the like; 0 where moving the numbers hides it.
        best_fraction: Fraction of peak that large matrix products reach.
        half_flops: Size of a half-precision product that reaches half of that, the start of its kernel included.
        devices_per_host: The usual number in a host.
        host_bandwidth: Bytes per second that a program copies to the host's memory or back. Unless the catalogue says
            otherwise, 16 lanes of PCI Express 4.0 at the part of their rate that an H200 reaches of its own.
        host_memory_bytes: Memory of the host for each of its devices; 0 where it is not known.
        intra: The usual link inside a host.
        inter: The usual link between hosts.
        figures: Where each number came from.
    """

    name: str
    vendor: str
    memory_bytes: Count
    memory_bandwidth: Rate
    flops: tuple[tuple[str, Rate], ...]
    vector_flops: Rate
    intra: Link
    inter: Link
    aliases: tuple[str, ...] = ()
    device_kinds: tuple[str, ...] = ()
    compute_capability: str = ""
    cores: Size = 0
    memory_efficiency: Rate = 1.0
    launch_s: Amount = 0.0
    fetch_s: Amount = 0.0
    special_s: Amount = 0.0
    best_fraction: Rate = 1.0
    half_flops: Amount = 0.0
    devices_per_host: Count = 8
    host_bandwidth: Rate = 26e9
    host_memory_bytes: Size = 0
    figures: tuple[Figure, ...] = field(default=(), compare=False, repr=False)

    def peak_flops(self, dtype: str) -> float:
        """FLOP/s of matrix products with operands of a type, e.g. ``"bfloat16"`` or ``"float8_e4m3fn"``.

        A type that the chip has no matrix unit for runs at the rate of the next wider type that it has.

        >>> from meshwright.hardware import find_chip
        >>> find_chip("a100-40gb").peak_flops("bfloat16") / 1e12
        312.0
        """
        rates = dict(self.flops)
        for candidate in _fallbacks(str(dtype)):
            if candidate in rates:
                return rates[candidate]
        return self.vector_flops

    def matmul_s(self, flops: Numeric, dtype: str = "bfloat16", num_bytes: Any = 0) -> Numeric:
        """Seconds of a matrix product: the slower of arithmetic and memory.

        Arithmetic reaches ``best · f / (f + half)`` of the peak for a product of ``f`` FLOPs.

        Args:
            flops: FLOPs of the product; a number or an array.
            dtype: Type of the operands.
            num_bytes: Bytes read and written, where they are known.
        """
        peak = self.peak_flops(dtype)
        half = self.half_flops * peak / self.peak_flops("float16")  # the ramp is a time, so it scales with the rate
        compute = (flops > 0) * (flops + half) / (peak * self.best_fraction)
        return larger(compute, self.memory_s(num_bytes))

    def memory_s(self, num_bytes: Numeric) -> Numeric:
        """Seconds to stream bytes through the chip's memory; a number or an array."""
        return num_bytes / (self.memory_bandwidth * self.memory_efficiency)


def larger(one: Numeric, other: Numeric) -> Numeric:
    """The larger of two numbers, or of those of arrays; numbers need no NumPy, so that a plan is printed without it."""
    if isinstance(one, int | float) and isinstance(other, int | float):
        return max(one, other)
    import numpy as np

    return np.maximum(one, other)


def _fallbacks(dtype: str) -> tuple[str, ...]:
    """Rates to try for a type, in order."""
    if dtype.startswith("float4_"):  # which XLA widens to half precision where there is no unit for it
        return ("float4", "bfloat16")
    if dtype.startswith(("float8_", "float6_")):
        return ("float8", "bfloat16")
    if dtype in ("int8", "uint8", "int4", "uint4", "int2", "uint2"):
        return ("int8", "bfloat16")
    if dtype in ("float16", "bfloat16"):
        return (dtype, "float16", "bfloat16")
    if dtype in ("float32", "complex64"):
        return ("float32",)
    if dtype in ("float64", "complex128"):
        return ("float64",)
    return ()
