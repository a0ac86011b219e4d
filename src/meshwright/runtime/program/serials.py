"""Counts operations as the tracer does, so that each equation finds its own part of a plan."""

from functools import lru_cache
from typing import Any

from meshwright import jax_compat


@lru_cache(maxsize=4096)
def count_ops(closed: Any) -> int:
    """How many operations the tracer makes of a jaxpr."""
    return sum(map(count, closed.jaxpr.eqns))


def is_operation(eqn: Any) -> bool:
    """Whether an equation is one operation, and runs no jaxpr."""
    return eqn.primitive.name not in ("scan", "while", "cond") and jax_compat.called_jaxpr(eqn) is None


def count(eqn: Any) -> int:
    """How many operations the tracer makes of an equation."""
    inner, params = jax_compat.called_jaxpr(eqn), eqn.params
    if inner is not None:
        return count_ops(inner)
    if eqn.primitive.name == "scan":
        body = jax_compat.close(params["jaxpr"])
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        return count_ops(body) + len(eqn.invars) - num_consts + len(eqn.outvars) - num_carry
    if eqn.primitive.name == "while":
        carries = len(eqn.invars) - params["cond_nconsts"] - params["body_nconsts"]
        parts = (params["cond_jaxpr"], params["body_jaxpr"])
        return carries + sum(count_ops(jax_compat.close(p)) for p in parts)
    if eqn.primitive.name == "cond":
        return len(eqn.outvars) + sum(count_ops(jax_compat.close(b)) for b in params["branches"])
    return 1
