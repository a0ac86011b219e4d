"""Models of Hugging Face as models of the zoo: `load`, `save` and `tokenizer`.

Weights are read from safetensors and `config.json`, each device its own parts; no pickle is read, and no code of a
checkpoint is run. `transformers` is not needed.
"""

try:
    import jinja2  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"meshwright.hf needs {error.name}, which is not installed: pip install 'meshwright[hf]'"
    ) from error

from meshwright.hf.model import Model, load
from meshwright.hf.saving import save
from meshwright.hf.tokenizer import Tokenizer

__all__ = ["Model", "Tokenizer", "load", "save"]
