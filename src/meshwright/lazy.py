"""Lets a package list its public names without loading them: each name is loaded on first use."""

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any


def load(package: str, modules: Mapping[str, str], name: str) -> Any:
    """The body of a package's `__getattr__`: loads a public name from its module in `modules`."""
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    value = getattr(import_module(f"{package}.{modules[name]}"), name)
    setattr(sys.modules[package], name, value)
    return value
