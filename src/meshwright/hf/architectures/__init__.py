"""The architectures that can be loaded and saved, one file per family."""

from meshwright.hf.architectures.base import Architecture, Unsupported
from meshwright.hf.architectures.gpt import GPT2
from meshwright.hf.architectures.llama import LLAMA, MISTRAL

#: By `model_type`. A zoo `Config` that fits several is saved as the first.
ARCHITECTURES: dict[str, Architecture] = {one.model_type: one for one in (LLAMA, MISTRAL, GPT2)}

__all__ = ["ARCHITECTURES", "Architecture", "Unsupported"]
