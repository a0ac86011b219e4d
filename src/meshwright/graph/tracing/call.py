"""Calls a function once with types in place of arrays, and separates the arrays of a pytree from its other leaves."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from itertools import chain, count
from typing import Any

import jax

from meshwright import jax_compat
from meshwright.errors import ShardingError, TraceError, raised_at
from meshwright.graph.tracing.batched_conditions import with_single_conditions
from meshwright.graph.tracing.counted_indices import pair_counted_indices
from meshwright.graph.tracing.in_place import ChangedInPlace, check_returned, replaced
from meshwright.graph.tracing.planned_devices import is_imitated, traced_for
from meshwright.hardware import Cluster
from meshwright.names import one_line
from meshwright.program.program import Program

# Numbers are traced, as by `jax.jit`, unless the function's own Python code reads them: then booleans and, if that is
# not enough, all Python numbers are passed unchanged. Those in an Equinox module always are, as by `eqx.filter_jit`:
# Equinox trains whatever is an array of real numbers, such as a rate that is traced.
_TRACED_NUMBERS: tuple[tuple[type, ...], ...] = ((bool, int, float, complex), (int, float, complex), ())


@dataclass(frozen=True)
class Leaves:
    """The leaves of a pytree: arrays, and leaves that are kept unchanged (functions, strings, booleans).

    Attributes:
        tree: The structure.
        leaves: All leaves; None represents an array.
        positions: For each leaf, its number among the arrays; None for leaves that are kept.
        paths: Path of each array, pytree keys joined by ``/``.
        owners: The first part of each array's path: an argument's name.
    """

    tree: Any
    leaves: tuple[Any, ...]
    positions: tuple[int | None, ...]
    paths: tuple[str, ...]
    owners: tuple[str, ...]

    @property
    def bare(self) -> "Leaves":
        """The same with None in place of leaves that are kept."""
        return replace(self, leaves=(None,) * len(self.leaves))

    def pick(self, tree: Any) -> list[Any]:
        """The arrays of a pytree of this structure."""
        import jax

        pairs = zip(jax.tree_util.tree_leaves(tree), self.positions, strict=True)
        return [leaf for leaf, position in pairs if position is not None]

    def rest(self, tree: Any) -> list[Any]:
        """The leaves that are not arrays in a pytree of this structure."""
        import jax

        pairs = zip(jax.tree_util.tree_leaves(tree), self.positions, strict=True)
        return [leaf for leaf, position in pairs if position is None]

    def fill(self, arrays: Sequence[Any]) -> Any:
        """The pytree with these arrays in their places."""
        import jax

        places = zip(self.leaves, self.positions, strict=True)
        return jax.tree_util.tree_unflatten(self.tree, [leaf if p is None else arrays[p] for leaf, p in places])


@dataclass(frozen=True)
class Call:
    """A function as JAX sees it: a program from the arrays of the arguments to the arrays of the results."""

    program: Program
    arguments: Leaves
    results: Leaves

    @property
    def types(self) -> list[Any]:
        """The types of the arguments' arrays."""
        import jax

        kinds = self.program.input_types
        return [jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type) for kind in kinds]


def call_abstractly(
    function: Callable[..., Any], args: tuple[Any, ...], cluster: Cluster | None = None, *, keeps_numbers: bool = False
) -> Call:
    """Calls ``function(*args)`` with the arrays' types, as on a cluster; by default as on the devices at hand.

    Args:
        function: The function.
        args: Its arguments.
        cluster: Where it is to run.
        keeps_numbers: Whether all Python numbers stay what they are, in the arguments and the results.

    Raises:
        TraceError: JAX could not trace the function; the message carries JAX's own reason in one paragraph.
    """
    names = argument_names(function, len(args))
    failure: Exception | None = None
    tried: set[Any] = set()
    for numbers in _TRACED_NUMBERS[-1:] if keeps_numbers else _TRACED_NUMBERS:
        arguments, arrays = _sort(args, numbers, names)
        if arguments.positions in tried:
            continue
        tried.add(arguments.positions)
        try:
            with traced_for(cluster):
                closed, results = _jaxpr(function, arguments, arrays, numbers, names)
            break
        except (ChangedInPlace, ShardingError):
            raise
        except Exception as error:
            failure = error
    else:
        assert failure is not None
        raise TraceError(_trace_failure(function, failure, cluster)) from failure
    return Call(Program.of(pair_counted_indices(closed)), arguments, results)


def _jaxpr(
    function: Callable[..., Any],
    arguments: Leaves,
    arrays: Sequence[Any],
    numbers: tuple[type, ...],
    names: Sequence[str],
) -> tuple[jax_compat.ClosedJaxpr, Leaves]:
    """A function as JAX traces it, from arrays to arrays, and the results that these are part of."""
    import jax

    results: Leaves | None = None
    changed: dict[Any, Any] = {}

    @wraps(function)  # so that JAX's errors name the user's function and its arguments
    def of_arrays(*args: Any) -> list[Any]:
        nonlocal results, changed
        given = arguments.fill(jax.tree_util.tree_leaves(args))
        before = jax.tree_util.tree_flatten_with_path(given)[0]
        results, arrays_made = _sort(function(*given), numbers)
        changed = replaced(before, given)
        return arrays_made

    types = arguments.bare.fill([_type(array, path) for array, path in zip(arrays, arguments.paths, strict=True)])
    closed = with_single_conditions(jax_compat.trace(of_arrays, types))
    if changed:
        check_returned(lambda *args: (of_arrays(*args), changed), types, _name(function), names)
    assert results is not None
    return closed, results


def _sort(tree: Any, numbers: tuple[type, ...], names: Sequence[str] | None = None) -> tuple[Leaves, list[Any]]:
    """A pytree's leaves, and its arrays; ``names`` are the names of the entries of a tuple of arguments."""
    import jax

    flat, structure = jax.tree_util.tree_flatten_with_path(tree)
    is_array = [
        (hasattr(x, "shape") and hasattr(x, "dtype")) or (type(x) in numbers and not in_module)
        for (_, x), in_module in zip(flat, _in_equinox(tree), strict=True)
    ]
    found = [pair for pair, array in zip(flat, is_array, strict=True) if array]
    owners = tuple("out" if names is None else names[path[0].idx] for path, _ in found)
    rest = 0 if names is None else 1
    number = count()
    return Leaves(
        structure,
        tuple(None if array else leaf for (_, leaf), array in zip(flat, is_array, strict=True)),
        tuple(next(number) if array else None for array in is_array),
        tuple(_distinct("/".join([o, *map(_key, path[rest:])]) for o, (path, _) in zip(owners, found, strict=True))),
        owners,
    ), [leaf for _, leaf in found]


def _in_equinox(tree: Any) -> list[bool]:
    """For each leaf, whether it is in a module of Equinox."""
    import jax

    kind = getattr(sys.modules.get("equinox"), "Module", ())
    parts = jax.tree_util.tree_leaves(tree, is_leaf=lambda node: isinstance(node, kind))
    return [isinstance(part, kind) for part in parts for _ in jax.tree_util.tree_leaves(part)]


def _distinct(paths: Iterable[str]) -> Iterator[str]:
    """The paths, numbered where they are equal: ``{"a": {"b": 1}, "a/b": 2}`` has ``a/b`` and ``a/b#2``."""
    seen: set[str] = set()
    for path in paths:
        names = chain([path], (f"{path}#{number}" for number in count(2)))
        name = next(name for name in names if name not in seen)
        seen.add(name)
        yield name


def _key(key: Any) -> str:
    return one_line(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))))


def _type(array: Any, path: str) -> "jax.ShapeDtypeStruct":
    try:
        return jax_compat.abstract(array)
    except (TypeError, OverflowError) as error:
        raise type(error)(f"argument {path}: {error}") from error


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of a function's first arguments; those of ``*args`` are ``args/0`` and so on."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names + [f"{rest}/{i}" for i in range(count - len(names))]


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", repr(function)))


def _trace_failure(function: Callable[..., Any], error: Exception, cluster: Cluster | None) -> str:
    reason = str(error).strip().split("\n\n")[0].replace("\n", " ")[:600].rstrip(".")
    line = raised_at(error)
    where = f" ({line})" if line else ""
    return f"JAX could not trace {_name(function)}: {type(error).__name__}: {reason}{where}. {_remedy(reason, cluster)}"


def _remedy(reason: str, cluster: Cluster | None) -> str:
    """What to do about a failure of JAX to trace a function."""
    if "mesh" in reason and ("context" in reason or "not found in mesh" in reason):
        return (
            "Plan it for a mesh that has the axes and the sizes which the function names, mesh={'data': 4, 'model': 2} "
            "or the like: that mesh is in context while the function is traced, and mw.current_mesh() returns it."
        )
    if "can only refer to Auto axes" in reason:
        return (
            "jax.make_mesh makes explicit axes: constrain by mw.current_mesh(), the mesh that it is planned for, or "
            "give jax.make_mesh axis_types=(jax.sharding.AxisType.Auto,) * 2 or the like."
        )
    if "product of mesh_shape" in reason or "find assignment for logical_axis" in reason:
        return "Instead of a mesh of its own, let it use mw.current_mesh(), the mesh that it is planned for."
    if "of type Auto" in reason:
        return (
            "Write jax.lax.with_sharding_constraint, or plan it for a mesh whose axes are explicit, "
            "mesh=jax.sharding.AbstractMesh((4, 2), ('data', 'model'), (jax.sharding.AxisType.Explicit,) * 2) "
            "or the like."
        )
    check = "Check that it runs under jax.jit with these arguments (jax.eval_shape is a quick way)."
    chip = cluster.chip.name if cluster is not None and is_imitated(cluster) else ""
    if "cuDNN is not detected" in reason or "cuDNN has fused attention from" in reason:
        return (
            f"{chip or 'The devices it is planned for'} {'has' if chip else 'have'} no such kernel: call it with "
            "implementation=None, or plan for a cluster of GPUs that have it (cluster='1x8 h100' or the like)."
        )
    if chip:
        return (
            f"It was traced for {chip}, the chip that it is planned for: if a kernel refuses that chip, "
            f"use one that it has, such as the plain operations, or plan for another chip. {check}"
        )
    return check
