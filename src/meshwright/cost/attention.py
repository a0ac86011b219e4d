"""Rates of fused attention kernels, from `attention.toml`: part of a chip's peak, by generation, length and head."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.hardware.chip import Chip

#: FLOPs of a fused attention kernel's backward pass, relative to its forward pass: it computes the scores again.
_BACKWARD_FLOPS = 2.5
#: The kernels that JAX calls on GPUs and on TPUs.
CUDNN = "cudnn"
SPLASH = "splash"
#: Attention without a fused kernel.
MATERIALISED = "materialised"
#: Heads of 64 reach 0.875 of the rate of heads of 128 (arXiv:2407.08608 fig. 5, FlashAttention-2); linear between.
_SMALL_HEADS = 0.25


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of a fused attention kernel.

    Attributes:
        backward: Whether it is the backward pass.
        keys: How many keys each query sees on average.
        head_dim: Size of a head.
    """

    backward: bool
    keys: float
    head_dim: int


def attention_flops_s(chip: Chip, kernel: str, call: AttentionCall) -> float:
    """FLOPs a second of a fused attention kernel that runs alone, masked scores left out.

    Args:
        chip: The chip.
        kernel: The kernel's name in `attention.toml`.
        call: The call.
    """
    table = attention_kernels()[kernel]
    best = _of_generation(table, chip)["backward" if call.backward else "forward"]
    best *= min(1.0, 1 - _SMALL_HEADS * (1 - call.head_dim / 128))
    return chip.peak_flops(half_type(chip)) * best * call.keys / (call.keys + table["half"] / 2)


def backward_flops(kernel: str) -> float:
    """FLOPs of a fused attention kernel's backward pass, relative to its forward pass."""
    return float(attention_kernels().get(kernel, {}).get("backward_flops", _BACKWARD_FLOPS))


def fused_kernel(chip: Chip) -> str:
    """The fused attention kernel that JAX calls on a chip."""
    return SPLASH if generation(chip) == "tpu" else CUDNN


def half_type(chip: Chip) -> str:
    """The half-precision type used for training on a chip: V100 supports float16 only."""
    return "float16" if chip.peak_flops("bfloat16") < chip.peak_flops("float16") else "bfloat16"


def generation(chip: Chip) -> str:
    """The family of a chip in the tables of `attention.toml`."""
    for family, names in _data()["generations"].items():
        if chip.name in names:
            return str(family)
    return "other"


def attention_kernels() -> Mapping[str, Mapping[str, Any]]:
    """The table of fused attention kernels."""
    return dict(_data()["attention"])


def _of_generation(table: Mapping[str, Any], chip: Chip) -> Mapping[str, float]:
    """Rates on a chip's generation, or on the nearest that is known."""
    known = [table[name] for name in (generation(chip), "hopper", "ampere", "tpu") if name in table]
    return dict(known[0])


@lru_cache(maxsize=1)
def _data() -> dict[str, Any]:
    return tomllib.loads(files("meshwright.cost").joinpath("attention.toml").read_text(encoding="utf-8"))
