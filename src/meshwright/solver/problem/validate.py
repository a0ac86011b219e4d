"""Gathers a problem's parts into flat arrays and checks every element, naming the one at fault."""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from meshwright.errors import ProblemError

IMPOSSIBLE = 1e17  # costs from here up stand for "impossible", as in the contest's data (which writes 1e18)


class Edges(NamedTuple):
    nodes: np.ndarray  # int32 [edges, 2]
    matrix_index: np.ndarray  # int32 [edges]
    matrix_first: np.ndarray  # int64 [matrices + 1]
    matrix: np.ndarray  # float64, all matrices row-major


class MemoryRows(NamedTuple):
    node: np.ndarray  # int32
    start: np.ndarray  # int64
    end: np.ndarray  # int64
    first: np.ndarray  # int64, where the row's vector begins in `usage`
    usage: np.ndarray  # float64


class Stored(NamedTuple):
    """The arrays of a whole problem in the form in which it keeps them."""

    first: np.ndarray  # int64, strategies of node i are first[i]:first[i + 1] of cost
    cost: np.ndarray  # float64
    edges: Edges
    rows: MemoryRows
    limit: float
    name: str


def costs(lists: Any) -> tuple[np.ndarray, np.ndarray]:
    """Flattens the nodes' costs; every node needs at least one strategy and no NaN or -inf."""
    _need_sequence("costs", lists)
    if len(lists) == 0:
        raise ProblemError("costs is empty: a choice problem needs at least one node")
    first, flat = flatten("costs of node", lists)
    empty = np.flatnonzero(np.diff(first) == 0)
    if empty.size:
        raise ProblemError(f"node {empty[0]} has no strategies: give every node at least one cost")
    _need_numbers("costs of node", first, flat, lowest=-np.inf)
    return first, flat


def contest_rows(first: np.ndarray, usages: Any, intervals: Any) -> MemoryRows:
    """One memory row per node that has a non-empty interval."""
    num_nodes = len(first) - 1
    if usages is None and intervals is None:
        return no_rows()
    for name, part in (("usages", usages), ("intervals", intervals)):
        if part is None:
            raise ProblemError(f"{name} is missing: give usages and intervals together, or neither")
        _need_sequence(name, part)
        if len(part) != num_nodes:
            raise ProblemError(f"{name} has {len(part)} entries for {num_nodes} nodes")
    usage_first, flat = flatten("usages of node", usages)
    wrong = np.flatnonzero(np.diff(usage_first) != np.diff(first))
    if wrong.size:
        node = wrong[0]
        have, need = np.diff(usage_first)[node], np.diff(first)[node]
        raise ProblemError(f"node {node} has {have} usages for {need} strategies")
    _need_numbers("usages of node", usage_first, flat, lowest=0)
    spans = _intervals(intervals)
    live = np.flatnonzero(spans[:, 0] < spans[:, 1])
    return MemoryRows(live.astype(np.int32), spans[live, 0], spans[live, 1], usage_first[live], flat)


def rows(first: np.ndarray, items: list[tuple]) -> MemoryRows:
    """Any number of memory rows `(node, start, end, usage_vector)`."""
    if not items:
        return no_rows()
    num_nodes = len(first) - 1
    for place, item in enumerate(items):
        if len(item) != 4:
            raise ProblemError(f"row {place} has {len(item)} parts: give (node, start, end, usage vector)")
        if not 0 <= item[0] < num_nodes:
            raise ProblemError(f"row {place} names node {item[0]}; the nodes are 0 to {num_nodes - 1}")
    nodes = np.array([item[0] for item in items], dtype=np.int32)
    usage_first, flat = flatten("usages of row", [item[3] for item in items])
    wrong = np.flatnonzero(np.diff(usage_first) != np.diff(first)[nodes])
    if wrong.size:
        place = wrong[0]
        have, need = np.diff(usage_first)[place], np.diff(first)[nodes[place]]
        raise ProblemError(f"row {place} has {have} usages for the {need} strategies of node {nodes[place]}")
    _need_numbers("usages of row", usage_first, flat, lowest=0)
    spans = _intervals([item[1:3] for item in items])
    live = np.flatnonzero(spans[:, 0] < spans[:, 1])
    return MemoryRows(nodes[live], spans[live, 0], spans[live, 1], usage_first[live], flat)


def no_rows() -> MemoryRows:
    whole = np.zeros(0, dtype=np.int64)
    return MemoryRows(np.zeros(0, dtype=np.int32), whole, whole.copy(), whole.copy(), np.zeros(0))


def edges(first: np.ndarray, items: Iterable[tuple]) -> Edges:
    """Checks `(u, v, matrix)` triples and pools the matrices, one entry per array object."""
    pool: dict[int, int] = {}
    matrices: list[Any] = []
    nodes, index = [], []
    for place, item in enumerate(items):
        if len(item) != 3:
            raise ProblemError(f"edge {place} has {len(item)} parts: give (u, v, matrix)")
        u, v, matrix = item
        nodes.append((u, v))
        key = len(matrices)
        if isinstance(matrix, np.ndarray):
            key = pool.setdefault(id(matrix), key)
        if key == len(matrices):
            matrices.append(matrix)
        index.append(key)
    ends = edge_ends(nodes, len(first) - 1)
    matrix_index = np.array(index, dtype=np.int32)
    _check_shapes(first, ends, index, matrices)
    flats = [matrix.ravel() if isinstance(matrix, np.ndarray) else _unnest(matrix) for matrix in matrices]
    matrix_first, flat = flatten("costs of matrix", flats)
    pooled = Edges(ends, matrix_index, matrix_first, flat)
    check_edges(first, pooled)
    return pooled


def edge_ends(pairs: Any, num_nodes: int) -> np.ndarray:
    """The two ends of every edge as int32 [edges, 2], each a node, and never the same one."""
    if len(pairs) == 0:
        return np.zeros((0, 2), dtype=np.int32)
    ends = _whole_pairs("edge", pairs)
    wrong = np.flatnonzero(((ends < 0) | (ends >= num_nodes)).any(axis=1))
    if wrong.size:
        place = wrong[0]
        raise ProblemError(f"edge {place} joins nodes {ends[place].tolist()}; the nodes are 0 to {num_nodes - 1}")
    loops = np.flatnonzero(ends[:, 0] == ends[:, 1])
    if loops.size:
        node = ends[loops[0], 0]
        raise ProblemError(f"edge {loops[0]} joins node {node} to itself: add its diagonal to the node's costs instead")
    return ends.astype(np.int32)


def check_edges(first: np.ndarray, pooled: Edges, what: str = "costs of matrix") -> None:
    """Every matrix has as many entries as the pairs of strategies it prices, and holds numbers."""
    sizes = np.diff(first)
    need = sizes[pooled.nodes[:, 0]] * sizes[pooled.nodes[:, 1]]
    have = np.diff(pooled.matrix_first)[pooled.matrix_index]
    wrong = np.flatnonzero(need != have)
    if wrong.size:
        place = wrong[0]
        u, v = pooled.nodes[place]
        raise ProblemError(
            f"edge {place} has {have[place]} costs; nodes {u} and {v} with {sizes[u]} and {sizes[v]} strategies "
            f"need {need[place]}"
        )
    _need_numbers(what, pooled.matrix_first, pooled.matrix, lowest=-np.inf)


def limit(value: Any) -> float:
    """The memory limit as a float, inf for none."""
    if value is None:
        return float("inf")
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise ProblemError(f"limit is {value!r}: give a number of bytes, or None for no limit")
    number = _to_float("limit", value)
    if np.isnan(number) or number < 0:
        raise ProblemError(f"limit is {value!r}: it must be 0 or more")
    return number


def _check_shapes(first: np.ndarray, ends: np.ndarray, index: list[int], matrices: list[Any]) -> None:
    """A 2-D matrix must be shaped (strategies of u, strategies of v): its size alone would let a transpose through."""
    sizes = np.diff(first).tolist()
    for place, (key, (u, v)) in enumerate(zip(index, ends.tolist(), strict=True)):
        matrix = matrices[key]
        if isinstance(matrix, np.ndarray) and matrix.ndim == 2 and matrix.shape != (sizes[u], sizes[v]):
            shape = matrix.shape
            raise ProblemError(
                f"edge {place} has a {shape[0]}×{shape[1]} matrix; nodes {u} and {v} need {sizes[u]}×{sizes[v]}"
            )


def _unnest(matrix: Any) -> Sequence[Any] | np.ndarray:
    nested = len(matrix) > 0 and isinstance(matrix[0], Sequence | np.ndarray)
    return list(chain.from_iterable(matrix)) if nested else matrix


def _need_sequence(name: str, value: Any) -> None:
    if not isinstance(value, Sequence | np.ndarray) or isinstance(value, str):
        raise ProblemError(f"{name} is {type(value).__name__}: give a list with one entry per node")


def flatten(what: str, lists: Any) -> tuple[np.ndarray, np.ndarray]:
    """Joins lists of numbers; returns where each begins and the numbers as float64."""
    try:
        sizes = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        first = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
        if len(lists) and isinstance(lists[0], np.ndarray):
            return first, np.concatenate([np.asarray(part, dtype=np.float64).ravel() for part in lists])
        flat = np.fromiter(chain.from_iterable(lists), dtype=np.float64, count=int(first[-1]))
        return first, flat
    except (TypeError, ValueError, OverflowError):
        return _flatten_slowly(what, lists)


def _flatten_slowly(what: str, lists: Any) -> tuple[np.ndarray, np.ndarray]:
    """Finds the element that could not be read, to name it."""
    for place, part in enumerate(lists):
        if not isinstance(part, Sequence | np.ndarray) or isinstance(part, str):
            raise ProblemError(f"{what} {place} is {part!r:.40}: give a list of numbers")
        for position, value in enumerate(part):
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ProblemError(f"{what} {place}, entry {position} is {value!r:.40}: give a number")
            _to_float(f"{what} {place}, entry {position}", value)
    raise ProblemError(f"{what}: could not be read as lists of numbers")


def _to_float(what: str, value: Any) -> float:
    try:
        return float(value)
    except OverflowError:
        raise ProblemError(f"{what} is too large for a 64-bit float") from None


def _need_numbers(what: str, first: np.ndarray, flat: np.ndarray, lowest: float) -> None:
    """Rejects NaN, and anything below (or, for -inf, at) the lowest value."""
    bad = np.isnan(flat) | (flat < lowest) | np.isneginf(flat)
    if lowest == 0:
        bad |= np.isinf(flat)
    if bad.any():
        position = int(np.flatnonzero(bad)[0])
        place = int(np.searchsorted(first, position, side="right")) - 1
        legal = "a number, or inf for impossible" if lowest < 0 else "a finite number, 0 or more"
        raise ProblemError(f"{what} {place}, entry {position - first[place]} is {flat[position]}: give {legal}")


def _intervals(pairs: Any) -> np.ndarray:
    spans = _whole_pairs("interval", pairs)
    wrong = np.flatnonzero((spans < 0).any(axis=1))
    if wrong.size:
        raise ProblemError(f"interval {wrong[0]} is {spans[wrong[0]].tolist()}: times must be 0 or more")
    return spans


def _whole_pairs(what: str, pairs: Any) -> np.ndarray:
    """Pairs of whole numbers as int64 [n, 2]."""
    for place, pair in enumerate(pairs):
        if not isinstance(pair, Sequence | np.ndarray) or len(pair) != 2:
            raise ProblemError(f"{what} {place} is {pair!r:.40}: give two whole numbers")
    try:
        found = np.array(pairs)
        if found.dtype.kind in "iu":
            return found.astype(np.int64).reshape(-1, 2)
    except (ValueError, OverflowError):
        pass
    for place, pair in enumerate(pairs):
        for value in pair:
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or not -(2**62) < int(value) < 2**62:
                raise ProblemError(f"{what} {place} is {pair!r:.40}: give two whole numbers")
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)
