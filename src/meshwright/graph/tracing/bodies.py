"""The jaxprs inside of an equation of a program that is rewritten: those of calls and of control flow."""

from collections.abc import Callable
from typing import Any

from meshwright import jax_compat


def bodies_of(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    if jax_compat.called_jaxpr(eqn) is None and eqn.primitive.name not in ("scan", "while", "cond"):
        return []
    return jax_compat.inner_jaxprs(eqn)


def with_bodies(eqn: Any, rewritten: Callable[[Any], Any]) -> jax_compat.Equation:
    """An equation each of whose jaxprs, closed or open, is rewritten; the same object where all stay as they are."""
    params, changed = dict(eqn.params), False
    for name, value in eqn.params.items():
        some = value if isinstance(value, tuple | list) else (value,)
        if not any(isinstance(each, jax_compat.Jaxpr | jax_compat.ClosedJaxpr) for each in some):
            continue
        new_bodies = [None if each is None else rewritten(each) for each in some]
        changed |= any(new is not old for new, old in zip(new_bodies, some, strict=True))
        params[name] = _like(value, new_bodies)
    return eqn.replace(params=params) if changed else eqn


def _like(value: Any, new: list[Any]) -> Any:
    """New jaxprs in the form of a parameter: one, a tuple or a named tuple."""
    if not isinstance(value, tuple | list):
        return new[0]
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
