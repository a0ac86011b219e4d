"""How many sequences, how long, and how much cache an engine has when nobody says: what the memory holds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import jax
import numpy as np

from meshwright.errors import DoesNotFit, ServingError
from meshwright.serving.models import Cache, Decoder, PagedCache, RaggedCache, SlotCache, TritonCache
from meshwright.serving.models.eight_bits import EIGHT_BITS
from meshwright.serving.models.triton import has_kernel
from meshwright.serving.scheduling import Limits
from meshwright.units import format_bytes

_LONGEST = 4096  # tokens of a sequence by default, where the model reads as many
_BLOCK = 16  # tokens of a block: prefixes are shared in whole blocks, and a table names one block in 4 bytes
#: Tokens of a prefix that contiguous slots reuse together. What is saved of a prompt must be worth a call of its own,
#: which reads all weights, and that takes as long as to compute about so many tokens, on any of the chips.
_REUSED = 128
_QUEUED = 16  # requests that wait, for each slot
#: By default of GPUs and of everything else: slots, and tokens of prompts in a step. Bare steps of an 8B model on an
#: H200, without an engine around them, took 4.4 ms for one sequence and 14.6 for 256, and 2,048 tokens of a prompt
#: reached 794 TFLOP/s; `benchmarks/serving.py` measures both. A CPU is busy with eight sequences.
_OF_GPUS, _OF_OTHERS = (256, 2048), (8, 256)
_OF_MEMORY = 0.9  # of a GPU's memory
_OF_HOST = 0.25  # of a computer's memory, which others use as well


@dataclass(frozen=True)
class Sizes:
    """What a user asks for; None for what memory and model allow.

    Attributes:
        max_len: The most tokens of a sequence, its prompt included.
        slots: The most sequences at once.
        chunk: The most tokens of prompts in a step.
        blocks: Blocks of the cache.
        block_size: Tokens of a block.
        queue: The most requests that wait.
        cache: "paged" or "slots"; by default slots on GPUs, whose kernels want them, and pages elsewhere.
        cache_dtype: "int8" or "float8" to keep keys and values in 8 bits; by default the model's own type.
    """

    max_len: int | None = None
    slots: int | None = None
    chunk: int | None = None
    blocks: int | None = None
    block_size: int | None = None
    queue: int | None = None
    cache: str | None = None
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not name.startswith("cache") and value is not None and (type(value) is not int or value < 1):
                raise ServingError(f"{name} is {value!r}; give a whole number from 1, or None for what memory allows")
        if self.cache not in (None, "paged", "slots"):
            raise ServingError(f'cache is {self.cache!r}; give "paged", "slots", or None for the faster one')
        if self.cache_dtype not in (None, *EIGHT_BITS):
            raise ServingError(
                f"cache_dtype is {self.cache_dtype!r}; give {' or '.join(map(repr, EIGHT_BITS))} for 8 bits, or None "
                "for the model's own type"
            )

    def over(self, other: "Sizes | None") -> "Sizes":
        """These, and what they leave open as another one says."""
        return replace(other or Sizes(), **{name: value for name, value in vars(self).items() if value is not None})


def of_stage(config: Any, stages: int) -> Any:
    """The config of a model that has only the layers of the largest of some stages."""
    return replace(config, layers=-(-config.layers // stages))


def chosen(
    config: Any,
    sizes: Sizes,
    longest: int | None,
    devices: int,
    stages: int = 1,
    device_bytes: float = inf,
    groups: int = 1,
) -> tuple[Limits, Cache]:
    """Limits and cache for a model. Each stage has as many caches as there are stages: one for each step on its way.

    Groups of devices that attend to their own sequences have contiguous slots, which are where their group is; a block
    may be of any sequence.

    Args:
        config: The zoo's `Config`.
        sizes: What is asked for.
        longest: How many tokens the model reads, if it says so.
        devices: Over how many devices parameters and cache of a stage are split.
        stages: How many stages of layers there are.
        device_bytes: The memory of each device, if it is no more than what is found here.
        groups: Among how many groups of these devices sequences are dealt.

    Raises:
        DoesNotFit: Not even one sequence has room beside the parameters.
    """
    gpu = jax.default_backend() == "gpu"
    most_slots, chunk = _OF_GPUS if gpu else _OF_OTHERS
    max_len = sizes.max_len or min(longest or _LONGEST, _LONGEST)
    positions = getattr(config, "positions", None)
    if positions is not None and max_len > positions:
        raise ServingError(
            f"max_len is {max_len}, and the model has positions for {positions} tokens; give at most that"
        )
    chunk = min(sizes.chunk or chunk, max_len)
    if groups > 1 and sizes.cache == "paged":
        raise ServingError("groups that attend to their own sequences have contiguous slots; leave cache='paged' out")
    contiguous = groups > 1 or (sizes.cache or ("slots" if gpu else "paged")) == "slots"
    block = max_len if contiguous else min(sizes.block_size or _BLOCK, max_len)
    stored, own = sizes.cache_dtype or config.dtype, of_stage(config, stages)
    wanted, per_sequence = sizes.slots or most_slots, -(-max_len // block)
    kernel = contiguous and _has_kernel(config, devices, stored)
    needs = _Needs.of(own, stored, contiguous, kernel, max_len)
    block_bytes = block * _bytes_per_token(own, stored) * stages
    memory = min(_memory_bytes(), _OF_MEMORY * device_bytes) * devices
    fixed, each = needs.params + chunk * needs.of_prompt, needs.of_sequence
    if contiguous:  # each sequence has a block
        fewest, each = groups, each + block_bytes
        most = sizes.blocks or wanted
    else:
        fewest, fixed, each = sizes.blocks or per_sequence, fixed + wanted * each, block_bytes
        most = sizes.blocks or wanted * per_sequence
    needed, blocks = int(fixed + fewest * each), min(most, int(max(0, memory - fixed) // each))
    if blocks < fewest:
        where = f" on the devices of each of {stages} stages" if stages > 1 else ""
        held = f"{fewest} blocks of {block} tokens" if fewest == sizes.blocks else f"one sequence of {max_len} tokens"
        raise DoesNotFit(
            f"the parameters, a cache for {held}, and what steps compute need {format_bytes(needed)}{where}, and there "
            f"are {format_bytes(memory)}; use more devices, a smaller max_len or chunk, or fewer blocks",
            needed_bytes=needed // devices,
            limit_bytes=int(memory) // devices,
        )
    slots = max(groups, min(wanted, blocks) // groups * groups) if contiguous else wanted
    blocks = slots if contiguous else blocks
    reuse = _REUSED if contiguous else 0
    limits = Limits(slots, block, blocks, chunk, chunk + slots, sizes.queue or _QUEUED * slots, max_len, reuse, groups)
    if contiguous:
        if kernel:
            return limits, TritonCache((slots,), max_len, stored)
        return limits, SlotCache(banks(limits.rungs), max_len, stored)
    ragged = jax.default_backend() == "tpu" and devices == 1 and stored not in EIGHT_BITS
    return limits, (RaggedCache if ragged else PagedCache)(blocks, block, stored)


def _has_kernel(config: Any, devices: int, stored: str) -> bool:
    """Whether a model, or a stage of it, runs our own kernel: whole on one GPU; XLA splits cuDNN's alone.

    On an H200 (`benchmarks/serving.py`) steps of Llama-3-8B at a context of 1,024 took 7.4 ms with 64 sequences and
    16.2 with 256, before products were joined; with cuDNN's kernel and writes of their own, 8.3 and 17.5. It has sinks
    and caps, too, which cuDNN's has not, and reads 8 bits.
    """
    head_dim = Decoder.of(config, PagedCache(1, 1, config.dtype)).head_dim
    return devices == 1 and config.attention != "plain" and has_kernel(config.dtype, stored, head_dim)


def banks(rungs: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the banks of a cache of slots: one more for each number of rows that is compiled.

    >>> banks((1, 8, 64, 128))
    (1, 7, 56, 64)
    """
    return tuple(int(size) for size in np.diff((0, *rungs)))


def _bytes_per_token(config: Any, stored: str) -> int:
    return _bytes(Decoder.of(config, PagedCache(1, 1, stored)).arrays())


def _bytes(kinds: Any) -> int:
    return sum(prod(kind.shape) * kind.dtype.itemsize for kind in jax.tree.leaves(kinds))


@dataclass(frozen=True)
class _Needs:
    """Bytes beside the cache: rough bounds of what a step holds at once, `tests/serving/test_sizes.py` holds them to.

    Attributes:
        params: Of the parameters, and of one layer's experts once more, out of which few tokens pick theirs.
        of_prompt: Of a step, for each token of a prompt: its widest rows, and its scores where they are written out.
        of_sequence: For each running sequence: these, the scores of all words, and the keys and values of one layer
            where attention reads a copy of them, out of pages or brought back from 8 bits.
    """

    params: float
    of_prompt: float
    of_sequence: float

    @classmethod
    def of(cls, config: Any, stored: str, contiguous: bool, kernel: bool, max_len: int) -> "_Needs":
        decoder = Decoder.of(config, PagedCache(1, 1, config.dtype))
        written_out = not decoder.has_kernel()
        widest = max(getattr(config, "ffn", None) or 4 * config.hidden, config.hidden) * getattr(config, "active", 1)
        rows, scores = 20 * widest, 8 * config.heads * max_len * written_out
        copies = (1 + written_out) * (not contiguous or (stored in EIGHT_BITS and not kernel))
        copied = copies * max_len * _bytes_per_token(replace(config, layers=1), config.dtype)
        params = decoder.params()
        picked = _bytes(params["layers"][0]) if getattr(config, "experts", 0) else 0
        return cls(_bytes(params) + picked, rows + scores, rows + scores + copied + 16 * config.vocab)


def _memory_bytes() -> float:
    """What one device has for serving."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit is not None:
        return _OF_MEMORY * limit
    return _OF_HOST * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(jax.local_devices())
