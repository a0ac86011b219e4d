"""Look-ups at counted indices, such as ``logits[jnp.arange(n), labels]``, as look-ups row by row.

Users write the number of a row as an index like any other, so that a row might be read by any query, and neither the
rows nor the queries could be split. Where such an index merely counts the rows, the row of a query is known: gather and
scatter have *batching dims* for this, as `jnp.take_along_axis` uses them. The program is changed before anything else
sees it; it computes the same numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax import lax

from meshwright import jax_compat

_UNCHANGED = ("convert_element_type", "copy", "stop_gradient")


def pair_counted_indices(closed: Any) -> Any:
    """The program, a closed jaxpr, with batching dims in place of indices that count; the same object without any."""
    return _rewritten(closed, (), {}) if _has_candidates(closed.jaxpr, {}) else closed


def _has_candidates(jaxpr: Any, seen: dict[int, bool]) -> bool:
    if id(jaxpr) not in seen:
        seen[id(jaxpr)] = False
        seen[id(jaxpr)] = any(
            len(_looked_up(eqn)) > 1 or any(_has_candidates(inner, seen) for inner in _bodies(eqn))
            for eqn in jaxpr.eqns
        )
    return seen[id(jaxpr)]


def _bodies(eqn: Any) -> list[Any]:
    """The jaxprs that an equation runs, of calls and control flow."""
    if jax_compat.called_jaxpr(eqn) is None and eqn.primitive.name not in ("scan", "while", "cond"):
        return []
    return jax_compat.inner_jaxprs(eqn)


def _looked_up(eqn: Any) -> tuple[int, ...]:
    """The dims of the table that the index vector of a gather or scatter addresses."""
    if eqn.primitive.name != "gather" and not eqn.primitive.name.startswith("scatter"):
        return ()
    numbers = eqn.params["dimension_numbers"]
    return tuple(numbers.start_index_map if eqn.primitive.name == "gather" else numbers.scatter_dims_to_operand_dims)


def _rewritten(closed: Any, known: Sequence["_Fact | None"], memory: dict[Any, Any]) -> Any:
    """A closed or open jaxpr rewritten, given what is known of its inputs."""
    jaxpr = jax_compat.close(closed).jaxpr
    key = id(jaxpr), tuple(known)
    if key not in memory:
        facts = _Facts(dict(zip(jaxpr.invars, known, strict=False)))
        for variable, value in zip(jaxpr.constvars, jax_compat.close(closed).consts, strict=True):
            facts.of[variable] = _of_constant(value)
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            eqns += _equation(eqn, facts, memory)
        same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
        results = tuple(facts.get(v) for v in jaxpr.outvars)
        # The jaxpr is kept with the answer, so that no other one gets its id.
        memory[key] = (jaxpr, jaxpr if same else jaxpr.replace(eqns=eqns), results)
    new = memory[key][1]
    if new is jaxpr:
        return closed
    return new if closed is jaxpr else closed.replace(jaxpr=new)


def _equation(eqn: Any, facts: "_Facts", memory: dict[Any, Any]) -> list[Any]:
    """An equation, rewritten if it can be; what is known of its results is added to the facts."""
    if _bodies(eqn):
        return [_with_bodies(eqn, facts, memory)]
    if len(_looked_up(eqn)) > 1:
        return _paired(eqn, facts.get(eqn.invars[1]))
    if len(eqn.outvars) == 1:
        facts.of[eqn.outvars[0]] = facts.follow(eqn)
    return [eqn]


def _with_bodies(eqn: Any, facts: "_Facts", memory: dict[Any, Any]) -> Any:
    is_call = jax_compat.called_jaxpr(eqn) is not None and len(jax_compat.inner_jaxprs(eqn)) == 1
    known = tuple(facts.get(v) for v in eqn.invars) if is_call else ()
    params, changed = dict(eqn.params), False
    for name, value in eqn.params.items():
        some = value if isinstance(value, tuple | list) else (value,)
        if any(isinstance(each, jax_compat.Jaxpr | jax_compat.ClosedJaxpr) for each in some):
            new = [each if each is None else _rewritten(each, known, memory) for each in some]
            changed |= any(a is not b for a, b in zip(new, some, strict=True))
            params[name] = _like(value, new)
            if is_call:
                found = memory[id(jax_compat.close(some[0]).jaxpr), known][2]
                facts.of.update(zip(eqn.outvars, found, strict=True))
    return eqn.replace(params=params) if changed else eqn


def _like(value: Any, new: list[Any]) -> Any:
    """New jaxprs in the form of a parameter: one, a tuple or a named tuple."""
    if not isinstance(value, tuple | list):
        return new[0]
    return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)


def _paired(eqn: Any, fact: "_Fact | None") -> list[Any]:
    """A gather or scatter whose counted columns are batching dims; preceded by a slice of the other columns."""
    numbers, is_gather = eqn.params["dimension_numbers"], eqn.primitive.name == "gather"
    single = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    table, indices = (v.aval for v in eqn.invars[:2])
    used = set(numbers.start_indices_batching_dims if is_gather else numbers.scatter_indices_batching_dims)
    pairs: dict[int, tuple[int, int]] = {}  # by column: the table's dim, and the dim of the indices that it counts
    looked_up = _looked_up(eqn)
    for column, along in enumerate(fact.columns if fact is not None else ()):
        dim = looked_up[column]
        if along is None or along in used or dim not in single or table.shape[dim] != indices.shape[along]:
            continue
        pairs[column] = dim, along
        used.add(along)
    if len(pairs) == len(looked_up):  # an index vector has a column at least
        pairs.popitem()
    if not pairs:
        return [eqn]
    kept = [column for column in range(len(looked_up)) if column not in pairs]
    before, smaller = _columns(eqn, kept)
    numbers = _with_pairs(numbers, is_gather, dict(pairs.values()), [looked_up[column] for column in kept])
    params = eqn.params | {"dimension_numbers": numbers}
    return [*before, eqn.replace(invars=[eqn.invars[0], smaller, *eqn.invars[2:]], params=params)]


def _with_pairs(numbers: Any, is_gather: bool, dims: Mapping[int, int], looked_up: Sequence[int]) -> Any:
    if is_gather:
        dims = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)) | dict(dims)
        return lax.GatherDimensionNumbers(
            offset_dims=numbers.offset_dims,
            collapsed_slice_dims=tuple(d for d in numbers.collapsed_slice_dims if d not in dims),
            start_index_map=tuple(looked_up),
            operand_batching_dims=tuple(sorted(dims)),
            start_indices_batching_dims=tuple(dims[d] for d in sorted(dims)),
        )
    dims = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)) | dict(dims)
    return lax.ScatterDimensionNumbers(
        update_window_dims=numbers.update_window_dims,
        inserted_window_dims=tuple(d for d in numbers.inserted_window_dims if d not in dims),
        scatter_dims_to_operand_dims=tuple(looked_up),
        operand_batching_dims=tuple(sorted(dims)),
        scatter_indices_batching_dims=tuple(dims[d] for d in sorted(dims)),
    )


def _columns(eqn: Any, kept: Sequence[int]) -> tuple[list[Any], Any]:
    """Equations that take some columns of the indices of a gather or scatter, and the variable that has them."""
    indices = eqn.invars[1]
    shape = indices.aval.shape
    made, parts = [], []
    for column in kept:
        part = jax_compat.variable(indices.aval.update(shape=(*shape[:-1], 1)))
        start, limit = (*(0 for _ in shape[:-1]), column), (*shape[:-1], column + 1)
        params = {"start_indices": start, "limit_indices": limit, "strides": None}
        made.append(eqn.replace(primitive=lax.slice_p, invars=[indices], outvars=[part], params=params, effects=set()))
        parts.append(part)
    if len(parts) == 1:
        return made, parts[0]
    whole = jax_compat.variable(indices.aval.update(shape=(*shape[:-1], len(kept))))
    last = {"dimension": len(shape) - 1}
    joined = eqn.replace(primitive=lax.concatenate_p, invars=parts, outvars=[whole], params=last, effects=set())
    return [*made, joined], whole


@dataclass(frozen=True)
class _Fact:
    """What is known of a value.

    Attributes:
        along: Every element is its own index along this dim.
        is_false: Every element is False.
        columns: The same as `along` for each column of the last dim, by itself.
    """

    along: int | None = None
    is_false: bool = False
    columns: tuple[int | None, ...] = ()


@dataclass
class _Facts:
    """What is known of the values of one jaxpr."""

    of: dict[Any, _Fact | None] = field(default_factory=dict)

    def get(self, v: Any) -> _Fact | None:
        return None if isinstance(v, jax_compat.Literal) else self.of.get(v)

    def follow(self, eqn: Any) -> _Fact | None:
        """What is known of the result of an operation."""
        name, params = eqn.primitive.name, eqn.params
        shape = eqn.outvars[0].aval.shape
        if name == "iota":
            return _counting(params["dimension"], shape)
        if name == "lt":
            first, second = self.get(eqn.invars[0]), eqn.invars[1]
            is_zero = isinstance(second, jax_compat.Literal) and np.ndim(second.val) == 0 and second.val == 0
            return _Fact(is_false=True) if first is not None and first.along is not None and is_zero else None
        if name == "select_n":
            chosen = self.get(eqn.invars[0])
            return self.get(eqn.invars[1]) if chosen is not None and chosen.is_false else None
        if name == "concatenate" and params["dimension"] == len(shape) - 1:
            columns: list[int | None] = []
            for v in eqn.invars:
                fact = self.get(v)
                columns += fact.columns if fact is not None else [None] * v.aval.shape[-1]
            return _Fact(columns=tuple(columns)) if any(c is not None for c in columns) else None
        fact = self.get(eqn.invars[0]) if eqn.invars else None
        if fact is None:
            return None
        if name in _UNCHANGED:
            return fact if np.issubdtype(eqn.outvars[0].aval.dtype, np.integer) or fact.is_false else None
        if fact.is_false:
            return fact if name in ("broadcast_in_dim", "reshape", "squeeze") else None
        return _moved(fact, name, params, eqn.invars[0].aval.shape, shape)


def _counting(along: int, shape: Sequence[int]) -> _Fact:
    """What is known of an integer array that counts along a dim."""
    columns = (along,) if along < len(shape) - 1 and shape[-1] == 1 else ()
    return _Fact(along, columns=columns)


def _moved(
    fact: _Fact, name: str, params: Mapping[str, Any], before: Sequence[int], after: Sequence[int]
) -> _Fact | None:
    """What is known of an array that counts along a dim, after dims were added or removed."""
    if fact.along is None:
        return None
    if name == "broadcast_in_dim":
        return _counting(params["broadcast_dimensions"][fact.along], after)
    if name in ("reshape", "squeeze"):
        sizes = [d for d, size in enumerate(before) if size > 1], [d for d, size in enumerate(after) if size > 1]
        same = [before[d] for d in sizes[0]] == [after[d] for d in sizes[1]]
        if same and fact.along in sizes[0]:
            return _counting(sizes[1][sizes[0].index(fact.along)], after)
    return None


def _of_constant(value: Any) -> _Fact | None:
    """What is known of an array that the program holds."""
    if not isinstance(value, np.ndarray) and not hasattr(value, "addressable_shards"):
        return None
    if value.dtype == bool:
        return _Fact(is_false=True) if not np.any(value) else None
    if not np.issubdtype(value.dtype, np.integer):
        return None
    array = np.asarray(value)
    for dim, size in enumerate(array.shape):
        counts = np.arange(size).reshape([-1 if d == dim else 1 for d in range(array.ndim)])
        if size > 1 and np.array_equal(array, np.broadcast_to(counts, array.shape)):
            return _counting(dim, array.shape)
    return None
