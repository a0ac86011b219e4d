"""Finds values that a function writes into its arguments without returning them: a compiled function would lose them.

A function is traced on copies of its arguments, and values written into them are lost with the copies. A Flax nnx
module that an optimizer updates in place would keep its first weights for ever. Not every such write is meant to last:
a batch may be normalised in its own dict. So a value written into a plain container counts as lost only if no result
depends on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from meshwright import jax_compat
from meshwright.errors import TraceError


class ChangedInPlace(TraceError):
    """A function changes its arguments and does not return the values it wrote there."""


def replaced(before: Sequence[tuple[Any, Any]], args: Any) -> dict[Any, Any]:
    """The computed values at paths of the arguments that held other leaves before the call.

    Args:
        before: Paths and leaves of the arguments as they were passed.
        args: The arguments after the call.
    """
    import jax

    try:
        after = dict(jax.tree_util.tree_flatten_with_path(args)[0])
    except (TypeError, ValueError):  # after its writes it is not a pytree
        return {}
    # A tracer of another kind belongs to a derivative inside the function, and cannot be used outside of it.
    return {
        path: after[path]
        for path, leaf in before
        if isinstance(leaf, jax.core.Tracer) and type(after.get(path)) is type(leaf) and after[path] is not leaf
    }


def check_returned(
    run: Callable[..., tuple[list[Any], dict[Any, Any]]], types: Any, name: str, names: Sequence[str]
) -> None:
    """Refuses a function that changes its arguments in place and does not return the values it wrote there.

    Args:
        run: Calls the function; returns its results, and the values it `replaced`.
        types: The types to call it with.
        name: The function's name.
        names: The arguments' names.

    Raises:
        ChangedInPlace: Some of these values would be lost.
    """
    import jax

    paths: list[Any] = []

    def with_replaced(*args: Any) -> list[Any]:
        results, found = run(*args)
        paths[:] = found
        return [*results, *found.values()]

    try:
        jaxpr = jax_compat.trace(with_replaced, types).jaxpr
    except jax.errors.UnexpectedTracerError:  # from a function traced separately
        return
    count = len(jaxpr.outvars) - len(paths)
    results, values = jaxpr.outvars[:count], jaxpr.outvars[count:]
    own = {id(v) for v in jaxpr.invars}.union(id(v) for eqn in jaxpr.eqns for v in eqn.outvars)
    pairs = [pair for pair in zip(paths, values, strict=True) if id(pair[1]) in own]  # others are of an inner function
    lost = [path for path, value in pairs if _is_lost(jaxpr, results, path, value)]
    if lost:
        raise ChangedInPlace(_refusal(name, lost, names))


def _is_lost(jaxpr: Any, results: Sequence[Any], path: Any, value: Any) -> bool:
    import jax

    if any(value is result for result in results):
        return False
    is_plain = isinstance(path[-1], jax.tree_util.DictKey | jax.tree_util.SequenceKey)
    return not (is_plain and _is_needed(jaxpr, results, value))


def _is_needed(jaxpr: Any, results: Sequence[Any], value: Any) -> bool:
    """Whether any of the results depends on a value."""
    reached = {id(value)}
    for eqn in jaxpr.eqns:
        if any(id(operand) in reached for operand in eqn.invars):
            reached.update(map(id, eqn.outvars))
    return any(id(result) in reached for result in results)


def _refusal(name: str, lost: Sequence[Any], names: Sequence[str]) -> str:
    import jax

    first, *rest = lost
    where = "/".join([names[first[0].idx], jax.tree_util.keystr(first[1:], simple=True, separator="/")])
    more = f" and {len(rest)} more {'leaf' if len(rest) == 1 else 'leaves'} of its arguments" if rest else ""
    return (
        f"{name} changes {where}{more} in place and does not return the new values, which would be lost: a "
        "compiled function gives nothing back but its results. Return the changed argument and pass it to the next "
        "call, as in: model, optimizer, loss = step(model, optimizer, batch); a Flax nnx module may be returned whole, "
        "or split by nnx.split and merged inside by nnx.merge"
    )
