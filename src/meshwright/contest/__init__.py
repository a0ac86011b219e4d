"""Solves choice problems that are too large to be closed, such as the graphs of the ASPLOS/EuroSys 2025 contest.

A large-neighbourhood search above the solver that plans use: `driver.py` is the door, `giant.py` shares out the time
between branch and bound and the search, `anytime.py` is the search of one process and `worker.py` that of further ones.
Importing this package loads no numba.
"""

from typing import Any

from meshwright import lazy

_PUBLIC = {"solve": "driver"}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _PUBLIC, name)
