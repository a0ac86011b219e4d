"""Time of kernels inside a training step: the catalogue's rates, and the few constants of `kernels.toml`."""

import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.hardware import Chip, Cluster
from meshwright.hardware.attention import AttentionCall, attention_flops_s, fused_kernel, generation, half_type
from meshwright.hardware.clusters import CATALOGUE
from meshwright.plans.plan import Load

MATERIALISED = "materialised"


@dataclass(frozen=True, slots=True)
class Constants:
    """The global constants of the simulation; `kernels.toml` says what each means."""

    streaming: float
    contention: float
    network: float
    float8: float
    allocator: float
    fixed_s: float


@dataclass(frozen=True)
class Kernels:
    """Prices kernels on one chip.

    Attributes:
        chip: The chip.
        constants: The global constants.
        sustained: Part of a lone kernel's rate that kernels keep in a step.
    """

    chip: Chip
    constants: Constants
    sustained: float

    def product_s(self, flops: float, num_bytes: float = 0.0, dtype: str = "") -> float:
        """Seconds of a matrix product, by default in half precision; small ones ramp up as the catalogue says."""
        dtype = dtype or half_type(self.chip)
        rate = self.sustained * (self.constants.float8 if dtype.startswith("float8") else 1.0)
        return float(max(self.chip.matmul_s(flops, dtype) / rate, self._moved_s(num_bytes)))

    def stream_s(self, num_bytes: float) -> float:
        """Seconds of a kernel that only moves bytes through memory."""
        return self.chip.launch_s + self._moved_s(num_bytes) if num_bytes > 0 else 0.0

    def _moved_s(self, num_bytes: float) -> float:
        return num_bytes / (self.chip.memory_bandwidth * self.constants.streaming)

    def attention_s(self, kernel: str, flops: float, seq: int, head_dim: int, backward: bool) -> float:
        """Seconds of a fused attention kernel.

        Args:
            kernel: Its name in `hardware/attention.toml`.
            flops: FLOPs that it does, masked scores left out.
            seq: Length of the sequence, whose mask is causal.
            head_dim: Size of a head.
            backward: Whether it is the backward pass.
        """
        call = AttentionCall(backward, seq / 2, head_dim)
        return self.chip.launch_s + flops / (attention_flops_s(self.chip, kernel, call) * self.sustained)

    def load_s(self, load: Load, attention: str = "") -> float:
        """Seconds of one trip of a plan's operation; ``attention`` names the fused kernel, if it is not JAX's own."""
        start = self.chip.launch_s if load.kernel else 0.0
        if load.attention:
            call = AttentionCall(load.attention == "backward", load.keys, load.head_dim)
            rate = attention_flops_s(self.chip, attention or fused_kernel(self.chip), call)
            return start + load.flops / (rate * self.sustained)
        if load.flops:
            fetch_s = self.chip.fetch_s * load.fetches
            return (
                start + self.product_s(load.flops / load.aligned, load.num_bytes / load.aligned, load.dtype) + fetch_s
            )
        return start + self._moved_s(load.num_bytes) + self.chip.special_s * load.special


def kernels(chip: Chip) -> Kernels:
    """Prices kernels on a chip with the constants that ship."""
    data = _data()
    return Kernels(chip, Constants(**data["constants"]), data["sustained"][generation(chip)])


def cluster_kernels(cluster: Cluster, num_devices: int | None = None) -> Kernels:
    """Prices kernels on the chips of a cluster, as they are known and in the company they have.

    Args:
        cluster: The machines.
        num_devices: How many devices run the program, where these machines are a part of them.
    """
    if cluster.known != CATALOGUE:
        return measured_kernels(cluster.chip)
    prices = kernels(cluster.chip)
    if (num_devices or cluster.num_devices) > 1:
        return prices
    alone = _data()["alone"].get(generation(cluster.chip), prices.sustained)
    as_alone = replace(prices.constants, streaming=cluster.chip.memory_efficiency)
    return replace(prices, constants=as_alone, sustained=alone)


def measured_kernels(chip: Chip) -> Kernels:
    """Prices kernels on a chip whose rates were measured inside programs: they are not reduced further."""
    prices = kernels(chip)
    as_measured = replace(prices.constants, streaming=chip.memory_efficiency, network=1.0)
    return replace(prices, constants=as_measured, sustained=1.0)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.simulator").joinpath("kernels.toml").read_text(encoding="utf-8"))
