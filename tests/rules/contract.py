"""Runs one operation shard by shard as its loop nest says, in plain JAX on slices, and compares with the whole.

A shard gets the slices of the operands that its loops index, computes, and its results are put in their place;
partial results of a reducing loop are combined by its kind. No devices are needed.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import combinations, product
from math import prod
from typing import Any

import jax
import numpy as np

from meshwright.rules import LoopNest, Signature, TensorType
from meshwright.rules.base import REDUCING, Dims

COMBINE: dict[str, Callable] = {
    "sum": np.add,
    "max": np.maximum,
    "min": np.minimum,
    "prod": np.multiply,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


@dataclass(frozen=True)
class Case:
    """One operation on whole operands, and how a shard computes its part.

    Attributes:
        run: The operation.
        operands: Its operands, all of them, in the order of the primitive's own.
        local: What a shard runs, ``(shard, *slices) -> results``; ``run`` on the slices where it is None.
        params: For primitives made by hand (the tracer's own, annotations): their parameters; else None.
    """

    run: Callable
    operands: Sequence[Any]
    local: Callable | None = None
    params: dict[str, Any] | None = None


@dataclass(frozen=True)
class Shard:
    """Where one shard lies: which part of each split loop it has."""

    nest: LoopNest
    operands: Sequence[Any]
    parts: dict[int, int]
    index: dict[int, int]

    @property
    def counts(self) -> bool:
        """True on one shard of those whose results are combined: what must count once counts there."""
        return all(i == 0 for loop, i in self.index.items() if self.nest.loops[loop].kind in REDUCING)

    def rows(self, dim: tuple[int, ...]) -> np.ndarray:
        """Global positions of this shard's elements in a dim."""
        sizes = [self.nest.loops[loop].size for loop in dim]
        grid = np.arange(prod(sizes)).reshape(sizes)
        for axis, loop in enumerate(dim):
            width = sizes[axis] // self.parts.get(loop, 1)
            start = self.index.get(loop, 0) * width
            grid = grid.take(range(start, start + width), axis)
        return grid.ravel()

    def shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(len(self.rows(dim)) for dim in dims)

    def operand_shape(self, i: int) -> tuple[int, ...]:
        return self.shape(self.nest.operands[i])

    def result_shape(self, i: int = 0) -> tuple[int, ...]:
        return self.shape(self.nest.results[i])

    def operand_start(self, i: int, dim: int) -> int:
        return int(self.rows(self.nest.operands[i][dim])[0])

    def result_rows(self, dim: int, i: int = 0) -> np.ndarray:
        return self.rows(self.nest.results[i][dim])

    def with_halo(self, i: int, reach: dict[int, tuple[int, int]], fill: float) -> np.ndarray:
        """The slice of operand ``i`` widened by its neighbours' elements; ``fill`` stands beyond the border."""
        array = np.asarray(self.operands[i])
        for d, dim in enumerate(self.nest.operands[i]):
            rows = self.rows(dim)
            if d not in reach:
                array = array.take(rows, d)
                continue
            left, right = reach[d]
            assert max(left, 0) + max(right, 0) <= self.nest.loops[dim[0]].halo, "more halo than the rule says"
            wanted = np.arange(rows[0] - left, rows[-1] + right + 1)
            inside = (wanted >= 0) & (wanted < array.shape[d])
            taken = array.take(np.where(inside, wanted, 0), d)
            shape = [-1 if axis == d else 1 for axis in range(array.ndim)]
            array = np.where(inside.reshape(shape), taken, np.asarray(fill, array.dtype))
        return array


def done_plainly(nest: LoopNest) -> LoopNest:
    """A nest without splits for which the runtime computes an operation by hand: its own tests compare those."""
    mixing = nest.mixing
    loops = tuple(replace(m, kind="unsplittable") if i == mixing.queries else m for i, m in enumerate(nest.loops))
    operands, results = (
        tuple(tuple(tuple(loop for loop in dim if loop != mixing.ring) for dim in dims) for dims in side)
        for side in (nest.operands, nest.results)
    )
    if mixing.ring >= 0:
        loops = (*loops[: mixing.ring], replace(loops[mixing.ring], kind="unsplittable"), *loops[mixing.ring + 1 :])
    return replace(nest, loops=loops, operands=operands, results=results)


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations, those of nested jaxprs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def tensor_type(aval: Any) -> TensorType:
    return TensorType(tuple(aval.shape), str(aval.dtype), getattr(aval.dtype, "itemsize", 4))


def signature_of(eqn: Any) -> Signature:
    operands, results = (tuple(tensor_type(v.aval) for v in side) for side in (eqn.invars, eqn.outvars))
    return Signature(eqn.primitive.name, dict(eqn.params), operands, results)


def signature(primitive: str, case: Case) -> Signature:
    """The case's signature, with JAX's own parameters unless the primitive is made by hand."""
    types = tuple(tensor_type(operand) for operand in case.operands)
    if case.params is not None:
        results = tuple(tensor_type(result) for result in as_list(case.run(*case.operands)))
        return Signature(primitive, case.params, types, results)
    traced = jax.make_jaxpr(case.run)(*case.operands)
    found = [signature_of(eqn) for eqn in equations(traced.jaxpr) if eqn.primitive.name == primitive]
    assert len(found) == 1, f"{primitive} occurs {len(found)} times in {traced}"
    assert found[0].operands == types, f"the case must pass all operands of {primitive}: {found[0].operands}"
    return found[0]


def bound(function: Callable, primitive: str, *operands: Any) -> Callable:
    """The primitive itself, with the parameters that JAX gives it in a function."""
    traced = jax.make_jaxpr(function)(*operands)
    eqn = next(eqn for eqn in equations(traced.jaxpr) if eqn.primitive.name == primitive)
    return partial(eqn.primitive.bind, **eqn.params)


def as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, list | tuple) else [results]


def plain(array: Any) -> np.ndarray:
    """As numpy; random keys as their words."""
    is_key = jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)


def _splittable(nest: LoopNest) -> list[int]:
    return [i for i, loop in enumerate(nest.loops) if loop.kind != "unsplittable" and loop.size > 1]


def one_and_two_axes(nest: LoopNest) -> Iterator[dict[int, int]]:
    """Every splittable loop and every pair of them, each split by its least divisor."""
    least = {
        i: min(n for n in range(2, nest.loops[i].size + 1) if nest.loops[i].size % n == 0) for i in _splittable(nest)
    }
    yield from ({i: least[i]} for i in least)
    yield from ({i: least[i], j: least[j]} for i, j in combinations(least, 2))


def to_single_iterations(nest: LoopNest) -> Iterator[dict[int, int]]:
    """Every splittable loop split as far as can be; a shard narrower than its halo is no use to anyone."""
    yield from ({i: nest.loops[i].size} for i in _splittable(nest) if not nest.loops[i].halo)


def all_at_once(nest: LoopNest) -> Iterator[dict[int, int]]:
    """All splittable loops together: one trial for the many operations that share a rule."""
    yield {i: nest.loops[i].size for i in _splittable(nest)}


def check(case: Case, nest: LoopNest, parts: dict[int, int]) -> None:
    """Computes on the shards, combines as the nest says, and compares with the whole."""
    whole = [plain(result) for result in as_list(case.run(*case.operands))]
    pieces: list[dict] = [{} for _ in whole]
    for at in product(*(range(n) for n in parts.values())):
        shard = Shard(nest, case.operands, parts, dict(zip(parts, at, strict=True)))
        slices = [_take(x, shard, dims) for x, dims in zip(case.operands, nest.operands, strict=True)]
        results = as_list(case.local(shard, *slices) if case.local else case.run(*slices))
        for dims, found, result in zip(nest.results, pieces, results, strict=True):
            _collect(shard, dims, found, plain(result))
    for expected, found in zip(whole, pieces, strict=True):
        made = np.zeros_like(expected)
        for places, partials in found.items():
            kinds = {nest.loops[loop].kind for key in partials for loop, _ in key}
            assert len(kinds) <= 1, f"loops of different kinds {kinds} in one result"
            joined = reduce(COMBINE[kinds.pop()], partials.values()) if kinds else next(iter(partials.values()))
            made[np.ix_(*places) if places else ()] = joined
        np.testing.assert_allclose(made, expected, rtol=2e-5, atol=1e-6, err_msg=f"split {parts} of {nest}")


def _collect(shard: Shard, dims: Dims, found: dict, result: np.ndarray) -> None:
    """Files one shard's result under its place and its part of the reducing loops; copies must agree."""
    indexed = {loop for dim in dims for loop in dim}
    places = tuple(tuple(shard.rows(dim)) for dim in dims)
    assert result.shape[: len(places)] == tuple(map(len, places)), f"shard result {result.shape} of {shard.nest}"
    key = tuple(
        (loop, i) for loop, i in shard.index.items() if loop not in indexed and shard.nest.loops[loop].kind in REDUCING
    )
    partials = found.setdefault(places, {})
    if key in partials:
        np.testing.assert_allclose(partials[key], result, rtol=2e-5, atol=1e-6, err_msg="copies differ")
    partials[key] = result


def _take(array: Any, shard: Shard, dims: Dims) -> Any:
    rows = [shard.rows(dim) for dim in dims]
    return array[np.ix_(*rows)] if rows else array
