"""Planner: from a traced function and a mesh to a plan. Importing it loads no JAX, so that plans are read without."""

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
