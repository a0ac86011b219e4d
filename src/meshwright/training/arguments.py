"""Normalises calls: arguments by position, static arguments apart, and a key that is equal for like calls."""

import inspect
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jax.tree_util import tree_flatten

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.tracing.call import argument_names
from meshwright.plans.tensor import Tensor

_NUMBERS = (bool, int, float, complex)


@dataclass(frozen=True)
class Bound:
    """A call's arguments by position, without the static ones.

    Attributes:
        function: The function of `values` alone.
        values: The arguments that are not static.
        names: Their names.
        numbers: Their positions in the function's own signature.
        static: The static arguments.
    """

    function: Callable[..., Any]
    values: tuple[Any, ...]
    names: tuple[str, ...]
    numbers: tuple[int, ...]
    static: tuple[Any, ...]

    def key(self) -> Hashable:
        """A key that is equal for calls that can use the same plan."""
        leaves, tree = tree_flatten(self.values)
        parts = self.static, self.names, tree, tuple(map(_type, leaves))
        try:
            hash(parts)
        except TypeError as error:
            raise ShardingError(
                f"leaves of the arguments that are not arrays must be hashable, to tell calls apart: {error}; use a "
                "tuple or a frozen dataclass there, or close over it"
            ) from None
        return parts

    def read(self, planned: Sequence[Tensor]) -> frozenset[int]:
        """Which leaves are Python numbers that a plan does not trace, since the function's Python code reads them."""
        leaves = zip(tree_flatten(self.values)[0], planned, strict=True)
        return frozenset(
            i for i, (leaf, tensor) in enumerate(leaves) if isinstance(leaf, _NUMBERS) and tensor.role == "static"
        )

    def key_of_read(self, read: Collection[int]) -> tuple[Hashable, ...]:
        """For each leaf which Python number it is where one is read; one that is traced is as good as an array."""
        return tuple(
            i in read and isinstance(leaf, _NUMBERS) and (type(leaf), leaf)
            for i, leaf in enumerate(tree_flatten(self.values)[0])
        )

    def check_batch(self, batch: Sequence[int]) -> None:
        """Refuses a batch that cannot be cut into microbatches: its leaves are no stacks of the same examples."""
        given = {number: value for number, value in zip(self.numbers, self.values, strict=True) if number in batch}
        sizes = sorted({x.shape[0] for x in tree_flatten(given)[0] if getattr(x, "shape", ())})
        if len(sizes) > 1:
            raise ShardingError(
                f"the batch has first dims of {' and '.join(map(str, sizes))}; all its leaves must be stacks of the "
                f"same examples to be cut into microbatches, and argument {' and '.join(map(str, given))} is taken for "
                f"the batch. If that is state, such as an optimizer's, give state_argnums={(*range(max(given) + 1),)}, "
                "or the positions of the batch in batch_argnums; what belongs to no example (a table, a random key) "
                "goes into an argument of its own"
            )


class Arguments:
    """Puts the arguments of calls, given by position or by keyword, into the order of the function's parameters."""

    def __init__(self, function: Callable[..., Any], static: tuple[int, ...], names: tuple[str, ...]):
        self.function = function
        self.static, self.static_names = frozenset(static), frozenset(names)
        try:
            self.signature: inspect.Signature | None = inspect.signature(function)
        except (TypeError, ValueError):  # builtins and the like: by position only
            self.signature = None
        self._functions: dict[Any, Callable[..., Any]] = {}

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Bound:
        if self.signature is not None:
            bound = self.signature.bind(*args, **kwargs)
            args, kwargs = bound.args, bound.kwargs
        count = len(args) + len(kwargs)
        names = (*argument_names(self.function, len(args)), *kwargs)
        values = (*args, *kwargs.values())
        static = {i for i in range(count) if i in self.static or (i >= len(args) and names[i] in self.static_names)}
        free = tuple(i for i in range(count) if i not in static)
        fixed = tuple((i, values[i]) for i in sorted(static))
        for i, value in fixed:
            if not _is_hashable(value):
                raise ShardingError(
                    f"static argument {names[i]} is {value!r:.60}, which cannot be hashed; give a hashable value such "
                    "as a tuple, or do not list it as static"
                )
        key = (fixed, names)
        if key not in self._functions:
            self._functions[key] = self._make(len(args), names, free, dict(fixed))
        return Bound(
            self._functions[key],
            tuple(values[i] for i in free),
            tuple(names[i] for i in free),
            free,
            tuple((i, type(value), value) for i, value in fixed),
        )

    def _make(
        self, num_args: int, names: tuple[str, ...], free: tuple[int, ...], fixed: dict[int, Any]
    ) -> Callable[..., Any]:
        """The function of its free arguments, all by position."""
        if not fixed and num_args == len(names):
            return self.function

        @wraps(self.function)
        def call(*values: Any) -> Any:
            full = fixed | dict(zip(free, values, strict=True))
            given = [full[i] for i in range(len(names))]
            return self.function(*given[:num_args], **dict(zip(names[num_args:], given[num_args:], strict=True)))

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        named = [inspect.Parameter(names[i].replace("/", "_"), kind) for i in free]
        call.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
        return call


def argument_numbers(
    name: str, given: int | str | Sequence[int], function: Callable[..., Any] | None
) -> tuple[int, ...]:
    """The positions that an option names, counted from the front.

    Raises:
        ShardingError: They are not positions, or the function has no such argument.
    """
    numbers = (given,) if isinstance(given, int) else given
    if isinstance(numbers, str) or not all(isinstance(n, int) and not isinstance(n, bool) for n in numbers):
        raise ShardingError(f"{name} is {given!r}; give the positions of arguments, such as (0,)")
    positions = tuple(numbers)
    if function is None:
        return positions
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return positions
    count = len(parameters)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return positions
    for n in positions:
        if not -count <= n < count:
            raise ShardingError(f"{name} names argument {n}; the function has {count}, numbered from 0")
    return tuple(n % count for n in positions)


def named_arguments(
    given: str | Sequence[str], function: Callable[..., Any]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions of arguments that an option names, and the names of keyword-only arguments.

    Raises:
        ShardingError: The function has no such argument.
    """
    wanted = (given,) if isinstance(given, str) else tuple(given)
    try:
        parameters = inspect.signature(function).parameters if wanted else {}
    except (TypeError, ValueError):
        raise ShardingError(f"static_argnames is {given!r}, and {function!r:.60} has no signature to read") from None
    order = list(parameters)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in wanted:
        if not isinstance(name, str) or (name not in order and not takes_any):
            raise ShardingError(f"static_argnames names {name!r}; the function's arguments are {', '.join(order)}")
    placed = [n for n in wanted if n in order and parameters[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    return tuple(map(order.index, placed)), tuple(n for n in wanted if n not in placed)


def batch_and_state(
    batch: int | Sequence[int] | None, state: int | Sequence[int] | None, static: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The positions of the batch and of the state; where neither is given, a state comes first and a batch next."""
    states = None if state is None else tuple(sorted(argument_numbers("state_argnums", state, None)))
    if batch is None:
        taken = {*static, *(states if states is not None else _first_free(static))}
        batches = _first_free(taken)
    else:
        batches = argument_numbers("batch_argnums", batch, None)
    states = _first_free((*static, *batches)) if states is None else states
    both = sorted({*batches} & {*states})
    if both or not states:
        wrong = f"argument {both[0]} is both state and batch" if both else "state_argnums is empty"
        raise ShardingError(f"{wrong}; give the positions of the state in state_argnums, of the batch in batch_argnums")
    return batches, states


def _first_free(taken: Collection[int]) -> tuple[int, ...]:
    return (next(i for i in range(len(taken) + 1) if i not in taken),)


def _type(leaf: Any) -> Hashable:
    """The part of a leaf that JAX compiles for: an array's type; the leaf itself if it is not an array."""
    try:
        aval = jax_compat.abstract(leaf)
    except (TypeError, OverflowError):
        return leaf
    return aval.shape, aval.dtype, aval.weak_type


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True
