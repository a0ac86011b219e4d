"""Time of kernels inside a training step: the catalogue's rates, and the few constants of `kernels.toml`."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.hardware import Chip
from meshwright.plans.plan import Load

MATERIALISED = "materialised"

#: FLOPs of a fused attention kernel's backward pass, relative to its forward pass: it computes the scores again.
BACKWARD_FLOPS = 2.5
#: Heads of 64 reach 0.875 of the rate of heads of 128 (arXiv:2407.08608 fig. 5, FlashAttention-2); linear between.
_SMALL_HEADS = 0.25


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
        attention: The table of fused attention kernels.
    """

    chip: Chip
    constants: Constants
    sustained: float
    attention: Mapping[str, Mapping[str, Any]]

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
            kernel: Its name in `kernels.toml`.
            flops: FLOPs that it does, masked scores left out.
            seq: Length of the sequence.
            head_dim: Size of a head.
            backward: Whether it is the backward pass.
        """
        table = self.attention[kernel]
        best = self._generation(table)["backward" if backward else "forward"]
        best *= min(1.0, 1 - _SMALL_HEADS * (1 - head_dim / 128))
        rate = self.chip.peak_flops(half_type(self.chip)) * best * seq / (seq + table["half"])
        return self.chip.launch_s + flops / (rate * self.sustained)

    def load_s(self, load: Load) -> float:
        """Seconds of one trip of a plan's operation."""
        start = self.chip.launch_s if load.kernel else 0.0
        if load.flops:
            fetch_s = self.chip.fetch_s * load.fetches
            return start + self.product_s(load.flops, load.num_bytes, load.dtype) + fetch_s
        return start + self._moved_s(load.num_bytes) + self.chip.special_s * load.special

    def _generation(self, table: Mapping[str, Any]) -> Mapping[str, float]:
        """Rates on this generation of chips, or on the nearest that is known."""
        known = [table[name] for name in (generation(self.chip), "hopper", "ampere", "tpu") if name in table]
        return dict(known[0])


def kernels(chip: Chip) -> Kernels:
    """Prices kernels on a chip with the constants that ship."""
    data = _data()
    return Kernels(chip, Constants(**data["constants"]), data["sustained"][generation(chip)], data["attention"])


def measured_kernels(chip: Chip) -> Kernels:
    """Prices kernels on a chip whose rates were measured inside programs: they are not reduced further."""
    prices = kernels(chip)
    as_measured = replace(prices.constants, streaming=chip.memory_efficiency, network=1.0)
    return replace(prices, constants=as_measured, sustained=1.0)


def half_type(chip: Chip) -> str:
    """The half-precision type used for training on a chip: V100 supports float16 only."""
    return "float16" if chip.peak_flops("bfloat16") < chip.peak_flops("float16") else "bfloat16"


def generation(chip: Chip) -> str:
    """The family of a chip in the tables of `kernels.toml`."""
    for family, names in _data()["generations"].items():
        if chip.name in names:
            return str(family)
    return "other"


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.simulator").joinpath("kernels.toml").read_text(encoding="utf-8"))
