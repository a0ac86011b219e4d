"""Reads the words of published tables: recomputation, ZeRO, precision, the software stack."""

import re
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.cost.attention import MATERIALISED
from meshwright.simulator.transformer.recipe import Stack
from meshwright.simulator.transformer.recompute import (
    ALTERNATE,
    ATTENTION,
    DOTS,
    FULL,
    KERNELS,
    MINIMAL,
    NONE,
    Recompute,
)

_SELECTIVE = {"attention": ATTENTION, "alternate": ALTERNATE, "some": replace(FULL, name="some layers", share=0.5)}

#: Parts of the layers that "some layers" may mean: the least that fits.
SHARES = (1 / 2, 2 / 3, 3 / 4, 1.0)

#: MaxText's names for the values that a policy keeps on the device or sends to the host.
_NAMED = {
    "decoder_layer_input": "input",
    "q": "query",
    "query_proj": "query",
    "k": "key",
    "key_proj": "key",
    "v": "value",
    "value_proj": "value",
    "qkv_proj": "query",
    "context": "attention",
    "out": "out",
    "out_proj": "out",
    "mlpwi": "up",
    "mlpwi_0": "gate",
    "mlpwi_1": "up",
    "mlpwo": "down",
}


def recompute_of(text: str, selective: str, model: str = "", notes: str = "") -> Recompute:
    """The recomputation that a table's words mean in a stack.

    Args:
        text: The words, e.g. ``"selective (op)"``.
        selective: The stack's meaning of selective: a key of `_SELECTIVE`.
        model: The model's name, to which a remark may refer.
        notes: Remarks.
    """
    words = text.lower().strip()
    if "custom" in words and "offload" not in words:
        words = f"custom {_said_of(model, notes)}"  # the remarks may say what is kept
    if "offload" in words or "custom" in words:
        return _named(words)
    if "minimal" in words:
        return MINIMAL
    if re.search(r"save_dot|save dot|\bdots\b", words):
        return DOTS
    if re.search(r"select|op-level|\(op\)", words):
        return _SELECTIVE["alternate" if "(op)" in words else selective]
    if re.match(r"none|no\b|off|false|0|without|disabled|save_everything|$", words):
        return NONE
    if re.search(r"core_attn|core attn|attention only", words):
        return ATTENTION
    if re.search(r"full|block|layer|uniform|true|yes|on\b|all|checkpoint|remat|recompute|default|nothing", words):
        return FULL
    raise ValueError(f"recompute is {text!r}; known are none, selective, full, minimal, save_dot… and offload lists")


def _said_of(model: str, notes: str) -> str:
    """The remark on a model, in the form ``405B: offload decoder_layer_input+mlpwo``."""
    match = re.search(r"(\S+):\s*(offload [a-z_0-9+, ]+)", notes.lower().replace("(", " "))
    return match[2] if match is not None and match[1] in model.lower() else ""


def _named(words: str) -> Recompute:
    """A list of values that are kept, as MaxText writes them; all others are recomputed."""
    listed = re.findall(r"[a-z_0-9]+", words.split("offload", 1)[-1])
    kept = {_NAMED[word] for word in listed if word in _NAMED} | {"input"}
    repeats = frozenset(name for name in KERNELS if name not in kept)
    return Recompute(
        "offload" if "offload" in words else "custom", repeats, frozenset(kept), offloads="offload" in words
    )


def zero_of(text: str) -> int:
    """ZeRO's stage: a number, or the word of a library.

    >>> zero_of("2 (prefer_reduce_scatter)"), zero_of("FSDP2"), zero_of(""), zero_of("distributed optimizer")
    (2, 3, 0, 1)
    """
    words = text.lower().strip()
    if (number := re.search(r"(?:^|zero[ -]?|stage[ -]?)([0-3])\b", words)) is not None:
        return int(number[1])
    if re.search(r"fsdp|hsdp|full_shard|shard-largest|zero-?three", words):
        return 3
    if "shard_grad_op" in words:
        return 2
    return 1 if re.search(r"distributed|dist\b|zero-?one", words) else 0


def dtype_of(text: str) -> str:
    """Type of the layers' products.

    >>> dtype_of("amp_bf16 DEFAULT"), dtype_of("fp8 linears"), dtype_of("int8"), dtype_of("tf32")
    ('bfloat16', 'float8_e4m3fn', 'int8', 'float32')
    """
    words = text.lower()
    if re.search(r"fp8|float8|mxfp8|nvfp4|fp4", words):
        return "float8_e4m3fn"
    if "int8" in words:
        return "int8"
    if re.search(r"bf16|fp16|float16|half|amp|^$|mixed", words):
        return "bfloat16"
    if re.search(r"fp32|tf32|float32", words):
        return "float32"
    raise ValueError(f"precision is {text!r}; known are bf16, fp16, fp8, int8, tf32 and fp32")


def stack_of(
    source: str, zero: int, precision: str, recompute: str, model: str, notes: str, tpu: bool
) -> tuple[Stack, str]:
    """The software behind a row, updated by the row's own remarks, and its meaning of selective recomputation."""
    words = f"{source.lower()} zero-{zero}"
    entry = dict(next(e for e in _stacks() if all(re.search(rf"\b{re.escape(w)}\b", words) for w in e["words"])))
    entry.pop("words")
    selective = entry.pop("selective", "attention")
    year = re.search(r"20(1\d|2[0-2])\b", words)
    if year is not None and entry["name"] == "a stack of today":
        entry |= {"attention": MATERIALISED, "overlap": False}
    stack = Stack(**entry)
    said = f"{notes} {recompute}".lower()
    if "torch.compile" in said:
        stack = replace(stack, fused=True)
    elif re.search(r"\beager\b", said):
        stack = replace(stack, fused=False)
    if re.search(r"async[ -](?:tp|tensor)", said):
        stack = replace(stack, async_tensor=True)
    if re.search(r"(?<!no )sequence[ -]parallel", said):
        stack = replace(stack, sequence_parallel=True)
    if (plain := re.search(r"(\S+) without flash", said)) is not None and plain[1] in model.lower():
        stack = replace(stack, attention=MATERIALISED)
    if tpu and stack.attention != MATERIALISED:
        stack = replace(stack, attention="splash")
    if re.search(r"pure", precision, re.IGNORECASE):
        stack = replace(stack, weight_bytes=2, gradient_bytes=2, optimizer_bytes=4, reduce_bytes=2)
    if re.search(r"\bTE\b|transformer engine", precision, re.IGNORECASE):
        stack = replace(stack, fused_softmax=True)
    if "weight_dtype bf16" in said:
        stack = replace(stack, weight_bytes=2, gradient_bytes=2)
    return stack, selective


@lru_cache(maxsize=1)
def _stacks() -> list[dict[str, Any]]:
    text = files("meshwright.validation").joinpath("stacks.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["stack"])
