"""Models of Hugging Face as models of the zoo: `load`, `save` and `tokenizer`.

Weights are read from safetensors and `config.json`, each device its own parts; no pickle is read, and no code of a
checkpoint is run. `transformers` is not needed. Public names are loaded on first use: a server that only needs the
tokenizer loads no JAX.
"""

from typing import TYPE_CHECKING

from meshwright import lazy

try:
    import jinja2  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"meshwright.hf needs {error.name}, which is not installed: pip install 'meshwright[hf]'"
    ) from error

if TYPE_CHECKING:
    from meshwright.hf.model import Model, load
    from meshwright.hf.saving import save
    from meshwright.hf.tokenizer import Tokenizer

_PUBLIC = {"Model": "model", "Tokenizer": "tokenizer", "load": "model", "save": "saving"}

__all__ = ["Model", "Tokenizer", "load", "save"]


def __getattr__(name: str) -> object:
    return lazy.load(__name__, _PUBLIC, name)
