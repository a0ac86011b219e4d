"""The architectures that can be loaded and saved, one file per family."""

from meshwright.hf.architectures.base import Architecture, Unsupported
from meshwright.hf.architectures.gemma import GEMMA, GEMMA2, GEMMA3
from meshwright.hf.architectures.gpt import GPT2, OPT
from meshwright.hf.architectures.gpt_oss import GPT_OSS
from meshwright.hf.architectures.llama import LLAMA, MISTRAL
from meshwright.hf.architectures.mixtral import MIXTRAL
from meshwright.hf.architectures.qwen import QWEN2, QWEN3, QWEN3_MOE

#: By `model_type`. A zoo `Config` that fits several is saved as the first.
ARCHITECTURES: dict[str, Architecture] = {
    one.model_type: one
    for one in (LLAMA, QWEN2, MISTRAL, QWEN3, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, MIXTRAL, GPT_OSS, GPT2, OPT)
}

__all__ = ["ARCHITECTURES", "Architecture", "Unsupported"]
