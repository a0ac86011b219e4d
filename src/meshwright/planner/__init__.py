"""Planner: from a traced function and a mesh to a plan. Importing it loads no JAX, so that plans are read without."""

from importlib import import_module
from typing import Any

_PUBLIC = {
    "Auto": "methods",
    "DataParallel": "methods",
    "Manual": "methods",
    "Method": "methods",
    "Plan": "plan",
    "TensorParallel": "methods",
    "Zero": "methods",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
