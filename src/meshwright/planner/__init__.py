"""Makes a plan from a traced function and a mesh. Importing it does not load JAX, which reading plans does not need."""

from typing import Any

from meshwright import lazy

_PUBLIC = {
    "Auto": "methods",
    "DataParallel": "methods",
    "Manual": "methods",
    "Method": "methods",
    "TensorParallel": "methods",
    "Zero": "methods",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _PUBLIC, name)
