"""Cumulative operations: the scanned dim carries a value along and stays whole."""

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import same_shape


def cumulative(op: Signature) -> LoopNest | None:
    """All dims are parallel but the scanned one."""
    return same_shape(op, fixed=[op.params["axis"]])


RULES: dict[str, Rule] = dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), cumulative)
