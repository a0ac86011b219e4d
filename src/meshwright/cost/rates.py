"""The time of operations on a chip: a roofline over matrix products and memory traffic, at the rates that are reached.

Inside a training step kernels are slower than the catalogue's, which run alone; `rates.toml` says by how much. Plans,
stages, simulations and rehearsals all take these rates.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from meshwright.cost.attention import AttentionCall, attention_flops_s, fused_kernel, generation, half_type
from meshwright.cost.load import Load, Loads
from meshwright.hardware import Chip, Cluster
from meshwright.hardware.chip import larger
from meshwright.hardware.clusters import CATALOGUE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# XLA joins small kernels of a loop's body that do not wait for each other (horizontal fusion): on one H200 the steps of
# a GRU and of an LSTM launch six kernels for ten that are counted.
_SMALL, _JOINED = 2**20, 0.6


@dataclass(frozen=True, slots=True)
class Constants:
    """The global constants of a training step; `rates.toml` says what each means. By default nothing is reduced."""

    streaming: float
    contention: float = 0.0
    network: float = 1.0
    float8: float = 1.0
    allocator: float = 1.0
    fixed_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Prices operations on one chip.

    Attributes:
        chip: The chip.
        constants: The global constants.
        sustained: Part of a lone kernel's rate that kernels keep in a step.
    """

    chip: Chip
    constants: Constants
    sustained: float = 1.0

    @cached_property
    def _joins_kernels(self) -> bool:
        """Whether this is one of the GPUs for which XLA does so, and not a CPU or a TPU."""
        return generation(self.chip) not in ("tpu", "other")

    def load_s(self, load: Load, attention: str = "") -> float:
        """Seconds of one trip of an operation; ``attention`` names the fused kernel, if it is not JAX's own."""
        return float(self._seconds(load, load.flops, load.num_bytes, load.fetches, load.special, attention))

    def loads_s(self, loads: Loads) -> "Array":
        """Seconds of one trip of an operation under each of its strategies."""
        seconds = self._seconds(loads.first, loads.flops, loads.num_bytes, loads.fetches, loads.special)
        assert not isinstance(seconds, float)
        return seconds

    def _seconds(
        self,
        like: Load,
        flops: "float | Array",
        num_bytes: "float | Array",
        fetches: "float | Array",
        special: "float | Array",
        attention: str = "",
    ) -> "float | Array":
        """Seconds of a kind of operation: a product is a kernel always, other operations where they are not fused.

        A convolution is a product once the pixels under its windows are fetched; the number of fetches does not depend
        on the number of features, so with few features fetching takes most of the time. Special functions cost time
        even if they are fused with their producers or readers.
        """
        if like.attention:
            call = AttentionCall(like.attention == "backward", like.keys, like.head_dim)
            return self._attention_s(attention or fused_kernel(self.chip), flops, call)
        if like.flops:
            arithmetic_s = self._product_s(flops / (like.aligned * like.useful), 0.0, like.dtype)  # with its start
            moved_s = self.chip.launch_s + self._moved_s(num_bytes / like.aligned)
            return larger(arithmetic_s, moved_s) + self.chip.fetch_s * fetches
        if like.over_host_link:
            return self.chip.launch_s + num_bytes / self.chip.host_bandwidth
        joined: Any = (1 - _JOINED) * (like.trips > 1 and self._joins_kernels) * (num_bytes < _SMALL)
        launch_s = self.chip.launch_s * like.kernel * (1 - joined)
        return launch_s + self._moved_s(num_bytes) + self.chip.special_s * special

    def product_s(self, flops: float, num_bytes: float = 0.0, dtype: str = "") -> float:
        """Seconds of a matrix product, by default in half precision; small ones ramp up as the catalogue says."""
        return float(self._product_s(flops, num_bytes, dtype))

    def stream_s(self, num_bytes: float) -> float:
        """Seconds of a kernel that only moves bytes through memory."""
        return self.chip.launch_s + float(self._moved_s(num_bytes)) if num_bytes > 0 else 0.0

    def attention_s(self, kernel: str, flops: float, seq: int, head_dim: int, backward: bool) -> float:
        """Seconds of a fused attention kernel.

        Args:
            kernel: Its name in `cost/attention.toml`.
            flops: FLOPs that it does, masked scores left out.
            seq: Length of the sequence, whose mask is causal.
            head_dim: Size of a head.
            backward: Whether it is the backward pass.
        """
        return float(self._attention_s(kernel, flops, AttentionCall(backward, seq / 2, head_dim)))

    def _product_s(self, flops: "float | Array", num_bytes: "float | Array", dtype: str) -> "float | Array":
        dtype = dtype or half_type(self.chip)
        rate = self.sustained * (self.constants.float8 if dtype.startswith("float8") else 1.0)
        return larger(self.chip.matmul_s(flops, dtype) / rate, self._moved_s(num_bytes))

    def _moved_s(self, num_bytes: "float | Array") -> "float | Array":
        return num_bytes / (self.chip.memory_bandwidth * self.constants.streaming)

    def _attention_s(self, kernel: str, flops: "float | Array", call: AttentionCall) -> "float | Array":
        return self.chip.launch_s + flops / (attention_flops_s(self.chip, kernel, call) * self.sustained)


def step_rates(chip: Chip) -> Rates:
    """The rates inside a training step, with the constants that ship."""
    data = _data()
    return Rates(chip, Constants(**data["constants"]), data["sustained"][generation(chip)])


def cluster_rates(cluster: Cluster, num_devices: int | None = None) -> Rates:
    """The rates inside a step on a cluster, as its chips are known and in the company they have.

    Args:
        cluster: The machines.
        num_devices: How many devices run the program, where these machines are a part of them.
    """
    if cluster.known != CATALOGUE:
        return measured_rates(cluster.chip)
    rates = step_rates(cluster.chip)
    if (num_devices or cluster.num_devices) > 1:
        return rates
    alone = _data()["alone"].get(generation(cluster.chip), rates.sustained)
    as_alone = replace(rates.constants, streaming=cluster.chip.memory_efficiency)
    return replace(rates, constants=as_alone, sustained=alone)


def measured_rates(chip: Chip) -> Rates:
    """The rates of a chip that was measured inside programs: those are not reduced further.

    Products of 8 bits are: they are not measured, but follow those of 16 bits.
    """
    rates = step_rates(chip)
    as_measured = replace(rates.constants, streaming=chip.memory_efficiency, network=1.0)
    return replace(rates, constants=as_measured, sustained=1.0)


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.cost").joinpath("rates.toml").read_text(encoding="utf-8"))
