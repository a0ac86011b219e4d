"""The time of one step of a replica: prompts and running sequences in one batch, on a chip, under a split.

A step is priced by what it does. Of *n* tokens, of which *s* are to be followed by another, that read *c* tokens from
the cache one by one and compare *p* pairs of a prompt's tokens,

    step_s(n, s, c, p) = products(n) + head(s) + c · cache + p · pair + gaps,

where `products` has each product's slower side (arithmetic, or reading the weights that *n* tokens touch), what the
layers move between products, and the collectives of the split. It does not change but with *n*, so it is tabulated
once for a replica and interpolated: a simulation asks for hundreds of thousands of steps.
"""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from meshwright.arrays import Floats
from meshwright.cost.attention import AttentionCall, attention_flops_s, fused_kernel
from meshwright.errors import ServingError
from meshwright.hardware import Chip, Cluster
from meshwright.serving.planning.decoder_work import Attention, DecoderWork, Product
from meshwright.serving.planning.engine_constants import EngineConstants
from meshwright.serving.planning.small_kernels import SmallKernels, small_kernels
from meshwright.serving.planning.split import BYTES, COMPUTED, Degrees, Storage, cache_tokens, parts_of
from meshwright.serving.scheduling.limits import row_ladder

#: Numbers of tokens at which steps are tabulated: two for each doubling.
_GRID = np.unique(np.concatenate([2.0 ** np.arange(19), 1.5 * 2.0 ** np.arange(1, 18)]))
_TOKENS = [float(n) for n in _GRID]
#: Numbers that a layer's elementwise operations move for each number of an activation: two norms, two sums with the
#: residual, and the gate, in the kernels that engines fuse them to.
_MOVED = 8
#: Bytes of a number of an activation.
_HALF = 2
#: Part of a chip's peak at which decoding computes scores, where heads share so few keys that reading is not the limit.
_SCORES = 0.4
#: A fused attention kernel reaches half of its rate when queries see so many keys (`cost/attention.toml`).
_LONG = 1e9


@dataclass(frozen=True)
class StepPrices:
    """Prices the steps of one replica.

    Attributes:
        work: The model.
        cluster: The machines; the replica takes `split.num_devices` of their devices.
        split: How the replica is spread.
        storage: The types of weights and cache.
        engine: What the engine takes beyond the work.
    """

    work: DecoderWork
    cluster: Cluster
    split: Degrees
    storage: Storage
    engine: EngineConstants

    def __post_init__(self) -> None:
        problem = self.split.problem(self.work)
        if problem:
            raise ServingError(f"{self.work.name} by {self.split}: {problem}")

    @property
    def chip(self) -> Chip:
        return self.cluster.chip

    @property
    def room(self) -> int:
        """Tokens that the caches of a replica hold; below 0 where not even its weights fit."""
        return cache_tokens(self.work, self.split, self.storage, self.cluster.memory_bytes)

    def step_s(self, tokens: float, sequences: float, cached: float, pairs: float) -> float:
        """Seconds of a step.

        Args:
            tokens: All tokens that it computes.
            sequences: How many of them are followed by a new token.
            cached: Tokens of the cache that sequences which generate look at, summed over them.
            pairs: How often a token of a prompt looks at another, summed over prompts.
        """
        if not tokens:
            return 0.0
        stages = self.split.pipeline
        share = _between(self._products, tokens / stages / self.split.data)
        share += _between(self._head, sequences / stages / self.split.data) if sequences else 0.0
        share += (cached * self.cached_s + pairs * self.pair_s) / stages / self.split.data
        return stages * share + self.engine.step_s + sequences * self.engine.sequence_s

    def decode_s(self, batch: int, context: float) -> float:
        """Seconds of a step in which a batch of sequences, each with a context of so many tokens, gets one token."""
        return self.step_s(batch, batch, batch * context, 0)

    def prefill_s(self, tokens: int, context: float = 0.0) -> float:
        """Seconds of a step that computes one prompt, or a part of it that begins after a context."""
        return self.step_s(tokens, 1, 0, tokens * (context + (tokens + 1) / 2))

    @cached_property
    def cached_s(self) -> float:
        """Seconds for each token of the cache that a sequence looks at, in all layers of a stage."""
        rate = self.chip.memory_bandwidth * self.chip.memory_efficiency * self.engine.cache
        peak = self.chip.peak_flops("bfloat16") * _SCORES
        total = 0.0
        for a in self.work.attention:
            read = a.kept * self._moved_bytes / min(self.split.tensor, a.kv_heads) / rate
            scores = 2 * a.heads * (a.key_dim + a.value_dim) / self.split.tensor / peak
            total += self._layers(a) * max(read, scores) * self._seen(a)
        return total

    @property
    def _moved_bytes(self) -> float:
        """Bytes that are moved for each number of the cache that attention looks at.

        This package's kernel reads 8 bits where a model is whole on a device; cuDNN's does not, so that they are
        written once more in half precision, and that is read.
        """
        stored = BYTES[self.storage.cache]
        if not self.engine.traced or stored >= _HALF:
            return stored
        return stored / self.engine.small_cache if self._whole else stored + 2 * _HALF

    @cached_property
    def pair_s(self) -> float:
        """Seconds for each pair of a prompt's tokens, in all layers of a stage."""
        total = 0.0
        for a in self.work.attention:
            rate = attention_flops_s(self.chip, fused_kernel(self.chip), AttentionCall(False, _LONG, 128))
            flops = 2 * a.heads * a.prompt_dim / self.split.tensor
            total += self._layers(a) * flops / (rate * self.engine.compute) * self._seen(a)
        return total

    def _seen(self, attention: Attention) -> float:
        """Part of a context that layers with a window look at: a context is taken to be of four windows or more."""
        return 1.0 if not attention.window else min(1.0, attention.window / 2048)

    def _layers(self, attention: Attention) -> float:
        return attention.count / self.split.pipeline

    @property
    def _small_kernels(self) -> SmallKernels:
        return small_kernels(self.work.config, self._whole)

    @property
    def _whole(self) -> bool:
        """Whether a stage is whole on one device."""
        return self.split.tensor * self.split.data == 1

    @cached_property
    def _products(self) -> list[float]:
        """Seconds of everything in one stage that depends on the number of tokens alone."""
        stages = self.split.pipeline
        seconds: Floats = np.zeros(len(_GRID))
        for product in self.work.products:
            seconds = seconds + self._product_s(product, _GRID) * product.count
        moved = _MOVED * self.work.hidden * _HALF * _GRID / (self.chip.memory_bandwidth * self.chip.memory_efficiency)
        small_s = self._small_kernels.layer * self.chip.launch_s if self.engine.traced else 0.0
        seconds = seconds + self.work.layers * (moved + self.engine.layer_s + small_s)
        seconds = (seconds + self.work.layers * self._exchange_s(_GRID)) * ceil(self.work.layers / stages)
        seconds = seconds / self.work.layers
        if stages > 1:
            seconds = seconds + self._collective_s("permute", 2, _GRID * self.work.hidden * _HALF / self.split.tensor)
        return [float(s) for s in seconds]

    @cached_property
    def _head(self) -> list[float]:
        """Seconds of what depends on the number of sequences: further banks of slots, and the head in one stage."""
        gather = self._collective_s("all_gather", self.split.tensor, _GRID * self.work.vocab * _HALF / 64)
        seconds = self._product_s(self.work.head, _GRID) + gather
        if self.engine.traced:
            more = np.array([len(row_ladder(ceil(n))) - 1 for n in _GRID])
            seconds = seconds + more * self._small_kernels.bank * self.chip.launch_s * self.work.layers
        return [float(s) for s in seconds / self.split.pipeline]

    def _product_s(self, product: Product, tokens: Floats) -> Floats:
        """Seconds of one product on the device that has the most to do."""
        parts, dtype = parts_of(product, self.split), self.storage.dtype_of(product, self.work)
        weights: Floats = np.full(len(tokens), product.size * BYTES[dtype] / parts)
        streaming = self.engine.streaming
        if product.experts:
            # Tokens choose experts evenly; every device holds its share of them, for the tokens of all groups.
            tokens = tokens * self.split.data
            chosen = tokens * self.work.active
            missed = (1 - self.work.active / product.experts) ** tokens
            dense = self.engine.every_token & (chosen >= product.experts)
            weights = weights * product.experts * np.where(self.engine.all_experts | dense, 1.0, 1 - missed)
            filled = np.maximum(chosen, self.engine.tile * product.experts * (1 - missed))
            tokens = np.where(dense, tokens * product.experts, filled)
            streaming *= self.engine.experts
        flops = 2.0 * tokens * product.size / parts
        moved = tokens * (product.rows + product.columns) * _HALF / parts
        rate = self.chip.memory_bandwidth * self.chip.memory_efficiency
        computed = COMPUTED.get(dtype, dtype)
        compute = self.engine.compute * (self.engine.float8 if dtype == "float8" else 1.0)
        compute *= self.engine.expert_compute if product.experts else 1.0
        starts = product.starts_kernel(joins=not self.engine.traced or self._whole)
        ramp = np.asarray(self.chip.matmul_s(1.0, computed))  # of a kernel; what is joined to another has none
        arithmetic = (np.asarray(self.chip.matmul_s(flops, computed)) - ramp * (not starts)) / compute
        launch = self.chip.launch_s if starts else 0.0
        return np.maximum(arithmetic, weights / (rate * streaming) + moved / rate) + launch

    def _exchange_s(self, tokens: Floats) -> Floats:
        """Seconds of one layer's collectives: after attention, and after the feed-forward."""
        size = tokens * self.work.hidden * _HALF
        shared = self._collective_s("all_reduce", self.split.tensor, size)
        if self.split.data == 1:
            return 2 * shared
        group = self.split.tensor * self.split.data
        copies = min(self.work.active, self.split.expert)
        sent = self._collective_s("all_to_all", group, size * self.split.data * copies)
        return shared + 2 * sent

    def _collective_s(self, kind: str, size: int, num_bytes: Floats) -> Floats:
        """Seconds of a collective over neighbouring devices."""
        if size == 1:
            return np.zeros(len(num_bytes))
        per_host = min(self.cluster.devices_per_host, size)
        if size % per_host:
            raise ServingError(
                f"{size} devices are no whole number of hosts with {per_host} devices; give degrees that divide them"
            )
        mesh = self.cluster.part(size // per_host, per_host).mesh((size,))
        return np.asarray(mesh.collective_s(kind, (0,), num_bytes)) * self.engine.network


def _between(table: list[float], tokens: float) -> float:
    """A tabulated time, between two entries by a straight line; beyond the last as it rises before."""
    place = min(max(bisect_right(_TOKENS, tokens), 1), len(_TOKENS) - 1)
    low, high = _TOKENS[place - 1], _TOKENS[place]
    slope = (table[place] - table[place - 1]) / (high - low)
    return table[place - 1] + max(tokens - low, 0.0) * slope
