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
from meshwright.graph.tracing.bodies import bodies_of, with_bodies

#: How the numbers of dims are called in gathers and in scatters: those of single elements, those that index vectors
#: address, and the dims of the indices that batching dims are paired with.
_NAMES = {
    True: ("collapsed_slice_dims", "start_index_map", "start_indices_batching_dims"),
    False: ("inserted_window_dims", "scatter_dims_to_operand_dims", "scatter_indices_batching_dims"),
}


def pair_counted_indices(closed: Any) -> jax_compat.ClosedJaxpr:
    """The program, a closed jaxpr, with batching dims in place of indices that count; the same object without any."""
    return _rewritten(closed, (), {})[0] if _has_candidates(closed.jaxpr, {}) else closed


def _has_candidates(jaxpr: Any, seen: dict[int, bool]) -> bool:
    if id(jaxpr) not in seen:
        seen[id(jaxpr)] = False
        seen[id(jaxpr)] = any(
            len(_looked_up(eqn)) > 1 or any(_has_candidates(inner, seen) for inner in bodies_of(eqn))
            for eqn in jaxpr.eqns
        )
    return seen[id(jaxpr)]


def _looked_up(eqn: Any) -> tuple[int, ...]:
    """The dims of the table that the index vector of a gather or scatter addresses."""
    is_gather = eqn.primitive.name == "gather"
    if not is_gather and not eqn.primitive.name.startswith("scatter"):
        return ()
    return tuple(getattr(eqn.params["dimension_numbers"], _NAMES[is_gather][1]))


def _rewritten(
    closed: Any, known: Sequence["_Fact | None"], memory: dict[Any, Any]
) -> tuple[Any, tuple["_Fact | None", ...]]:
    """A closed or open jaxpr rewritten, given what is known of its inputs; and what is known of its results."""
    jaxpr, consts = jax_compat.close(closed).jaxpr, jax_compat.close(closed).consts
    key = id(jaxpr), tuple(map(id, consts)), tuple(known)
    if key not in memory:
        facts = _Facts(dict(zip(jaxpr.invars, known, strict=False)))
        facts.of.update((v, _of_constant(value)) for v, value in zip(jaxpr.constvars, consts, strict=True))
        eqns: list[Any] = []
        for eqn in jaxpr.eqns:
            eqns += _equation(eqn, facts, memory)
        same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
        new = jaxpr if same else jaxpr.replace(eqns=eqns)
        # What the key names is kept with the answer, so that nothing else gets its id.
        memory[key] = new, tuple(facts.get(v) for v in jaxpr.outvars), closed
    new, results, _ = memory[key]
    if new is jaxpr:
        return closed, results
    return new if closed is jaxpr else closed.replace(jaxpr=new), results


def _equation(eqn: Any, facts: "_Facts", memory: dict[Any, Any]) -> list[Any]:
    """An equation, rewritten if it can be; what is known of its results is added to the facts."""
    if bodies_of(eqn):
        return [_with_bodies(eqn, facts, memory)]
    if len(_looked_up(eqn)) > 1:
        return _paired(eqn, facts.get(eqn.invars[1]))
    if len(eqn.outvars) == 1:
        facts.of[eqn.outvars[0]] = facts.follow(eqn)
    return [eqn]


def _with_bodies(eqn: Any, facts: "_Facts", memory: dict[Any, Any]) -> jax_compat.Equation:
    is_call = jax_compat.called_jaxpr(eqn) is not None and len(jax_compat.inner_jaxprs(eqn)) == 1
    known = tuple(facts.get(v) for v in eqn.invars) if is_call else ()

    def rewritten(inner: Any) -> Any:
        new, results = _rewritten(inner, known, memory)
        if is_call:
            facts.of.update(zip(eqn.outvars, results, strict=True))
        return new

    return with_bodies(eqn, rewritten)


def _paired(eqn: Any, fact: "_Fact | None") -> list[Any]:
    """A gather or scatter whose counted columns are batching dims; preceded by a slice of the other columns."""
    numbers = eqn.params["dimension_numbers"]
    single, addressed, paired = _NAMES[eqn.primitive.name == "gather"]
    table, indices = (v.aval for v in eqn.invars[:2])
    dims = dict(zip(numbers.operand_batching_dims, getattr(numbers, paired), strict=True))
    looked_up = _looked_up(eqn)
    kept: list[int] = []
    columns = fact.columns if fact is not None else ()
    for column, dim in enumerate(looked_up):
        along = columns[column] if columns else None
        is_last = column == len(looked_up) - 1 and not kept  # an index vector has a column at least
        fits = along is not None and along not in dims.values() and table.shape[dim] == indices.shape[along]
        if fits and dim in getattr(numbers, single) and not is_last:
            dims[dim] = along
        else:
            kept.append(column)
    if len(kept) == len(looked_up):
        return [eqn]
    before, smaller = _columns(eqn, kept)
    pairs = dict(sorted(dims.items()))
    changed = {
        single: tuple(d for d in getattr(numbers, single) if d not in pairs),
        addressed: tuple(looked_up[column] for column in kept),
        "operand_batching_dims": tuple(pairs),
        paired: tuple(pairs.values()),
    }
    # Whether the indices are sorted says nothing of the columns that are left.
    params = eqn.params | {"dimension_numbers": numbers._replace(**changed), "indices_are_sorted": False}
    return [*before, eqn.replace(invars=[eqn.invars[0], smaller, *eqn.invars[2:]], params=params)]


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
        name, params, result = eqn.primitive.name, eqn.params, eqn.outvars[0].aval
        if name == "iota":
            return _counting(params["dimension"], result)
        if name == "concatenate":
            return self._joined(eqn) if params["dimension"] == len(result.shape) - 1 else None
        fact = self.get(eqn.invars[0]) if eqn.invars else None
        if fact is None:
            return None
        if name == "select_n":
            return self.get(eqn.invars[1]) if fact.is_false else None
        if name == "lt":
            zero = eqn.invars[1]
            is_zero = isinstance(zero, jax_compat.Literal) and np.ndim(zero.val) == 0 and zero.val == 0
            return _Fact(is_false=True) if fact.along is not None and is_zero else None
        if fact.is_false:
            return fact if name in ("broadcast_in_dim", "reshape", "squeeze") else None
        return None if fact.along is None else _moved(fact.along, name, params, eqn.invars[0].aval.shape, result)

    def _joined(self, eqn: Any) -> _Fact | None:
        """What is known of the columns of an index vector."""
        columns: list[int | None] = []
        for v in eqn.invars:
            fact = self.get(v)
            columns += fact.columns if fact is not None and fact.columns else [None] * v.aval.shape[-1]
        return _Fact(columns=tuple(columns)) if any(c is not None for c in columns) else None


def _counting(along: int, aval: Any) -> _Fact | None:
    """What is known of an array that counts along a dim, if its type can count as far."""
    size = aval.shape[along]
    if not np.issubdtype(aval.dtype, np.integer) or size - 1 > np.iinfo(aval.dtype).max:
        return None
    return _Fact(along, columns=(along,) if along < len(aval.shape) - 1 and aval.shape[-1] == 1 else ())


def _moved(along: int, name: str, params: Mapping[str, Any], before: Sequence[int], result: Any) -> _Fact | None:
    """What is known of an array that counts along a dim, after a conversion, or after dims were added or removed."""
    after = result.shape
    if name in ("convert_element_type", "copy"):
        return _counting(along, result)
    if name == "broadcast_in_dim":
        to = params["broadcast_dimensions"][along]
        return _counting(to, result) if after[to] == before[along] else None  # a single row is repeated, not counted on
    if name in ("reshape", "squeeze"):
        sizes = [d for d, size in enumerate(before) if size > 1], [d for d, size in enumerate(after) if size > 1]
        same = [before[d] for d in sizes[0]] == [after[d] for d in sizes[1]]
        if same and along in sizes[0]:
            return _counting(sizes[1][sizes[0].index(along)], result)
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
            return _counting(dim, array)
    return None
