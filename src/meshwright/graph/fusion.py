"""Which values XLA's GPU backend keeps in memory, and which its kernels make within themselves.

Read off what it compiles:

- What a kernel that cannot be fused reads or writes is in memory; cheap elementwise work lives inside kernels and is
  done again in each reader. Reductions and gathers take in the work that makes what they read.
- Costly work with several readers is written once, if it takes no more memory than what it is made from. A GPU has
  instructions for exponentials, quotients and roots: these are not costly (XLA's `GpuInstructionFusion::IsExpensive`).
- Products read matrices: dims that one of them merges must lie next to each other. Work that is done in another order
  of dims is done anew for each product that must transpose it, each in the order it needs.
- An elementwise kernel writes over what it reads for the last time, where that has the same size.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from meshwright.graph.facts import COSTLY, Bools, Dims, Facts, product_dims

Ints = NDArray[np.int64]

_QUICK = frozenset({"exp", "exp2", "logistic", "div", "sqrt", "rsqrt"})
_RESHAPING = frozenset({"reshape", "squeeze", "expand_dims"})
_ANY, _OWN, _MOVED = 0, 1, 2  # which order of dims a value may be made in
_MOST_AGAIN = 64  # operations that are looked through, at most, for what a value is made from


class Fusion(NamedTuple):
    """Where values are.

    Attributes:
        stored: Whether a value is written to memory at some time.
        kept: Whether it is there until its last reader; else readers make it again.
        fuses: For each operation, whether it takes in the work that makes what it reads.
        apart: Values that products read each in an order of its own, and these products.
    """

    stored: Bools
    kept: Bools
    fuses: Bools
    apart: list[tuple[int, int]]


def fuse(facts: Facts) -> Fusion:
    """Works out which values are where."""
    fuses = facts.fusible | facts.where(lambda name, _: name.startswith(("reduce_", "arg")))
    stored = _in_memory(facts, fuses)
    stored[_shared(facts, COSTLY, stored)] = True
    fuses |= facts.where(lambda name, _: name == "gather")
    kept = _in_memory(facts, fuses)
    costly = _shared(facts, COSTLY - _QUICK, kept)
    kept[costly] = True
    kept[_made_again(facts, kept, costly)] = False
    apart = list(_apart(facts, kept, fuses))
    kept[[value for value, _ in apart]] = False
    return Fusion(stored, kept, fuses, apart)


def _in_memory(facts: Facts, fuses: Bools) -> Bools:
    """The values that some kernel reads or writes, as long as everything is made again that can be."""
    found = np.zeros(facts.columns.num_values, bool)
    found[facts.made] = ~facts.fusible[facts.maker]
    found[facts.columns.reads[~fuses[facts.columns.reader]]] = True
    found[[*facts.graph.inputs, *facts.ends]] = True
    found[list(facts.graph.constants)] = False
    return found


def _shared(facts: Facts, names: frozenset[str], stored: Bools) -> list[int]:
    """Values that some primitives make for several readers and that are not stored yet, in the order they are made."""
    found = facts.made[facts.where(lambda name, _: name in names)[facts.maker]]
    found = found[(facts.num_readers[found] > 1) & ~stored[found]]
    return found[np.argsort(facts.columns.producer[found])].tolist()


def _made_again(facts: Facts, kept: Bools, costly: Sequence[int]) -> list[int]:
    """Of the values that are kept for their cost alone, those that take more than what they are made from."""
    graph, columns = facts.graph, facts.columns
    size = [kind.num_bytes for kind in graph.kinds]
    again: set[int] = set()
    for value in costly:
        room, seen = size[graph.kind[value]], {value}
        stack = columns.reads_of(columns.producer[value]).tolist()
        while stack and room > 0 and len(seen) <= _MOST_AGAIN:
            source = stack.pop()
            if source in seen:
                continue
            seen.add(source)
            if kept[source] and source not in again:
                room -= size[graph.kind[source]]
            elif columns.producer[source] >= 0:
                stack += columns.reads_of(columns.producer[source]).tolist()
        if not stack and room > 0:
            again.add(value)
    return sorted(again)


def _apart(facts: Facts, kept: Bools, fuses: Bools) -> Iterator[tuple[int, int]]:
    """Values that no kernel reads as they are made, each with the products that transpose it, if these are several."""
    columns, orders = facts.columns, Orders(facts)
    products = facts.where(lambda name, _: name == "dot_general")
    reads = products[columns.reader] & kept[columns.reads]
    several = np.flatnonzero(np.bincount(columns.reads[reads], minlength=columns.num_values) > 1)
    several = several[columns.producer[several] >= 0]
    several = orders.may_differ(several[facts.fusible[columns.producer[several]]])
    several = np.setdiff1d(several, facts.ends)
    places = np.flatnonzero(np.isin(columns.reads, several) & ~fuses[columns.reader])
    by = columns.reader[places]
    several = np.setdiff1d(several, columns.reads[places[~products[by]]])
    readers: dict[int, list[tuple[int, int]]] = {value: [] for value in several.tolist()}
    sides = places - columns.start[by]
    for value, index, side in zip(columns.reads[places].tolist(), by.tolist(), sides.tolist(), strict=True):
        if value in readers:
            readers[value].append((index, side))
    for value, reading in readers.items():
        if not (order := orders.of(value)):
            continue
        wanted = [orders.wanted(index, side) for index, side in reading]
        if len({w for w, _ in wanted}) == len(reading) and all(not _lies_so(order, merged) for _, merged in wanted):
            yield from ((value, index) for index, _ in reading)


def _lies_so(order: Dims, merged: Iterable[Dims]) -> bool:
    """Whether dims that are merged lie next to each other in an order of dims."""
    return all(not dims or dims in (order[i : i + len(dims)] for i in range(len(order))) for dims in merged)


def written_over(facts: Facts, kept: Bools, start: Ints, stop: Ints, runs: Ints) -> tuple[list[int], list[int]]:
    """Values that elementwise kernels write over, being their last readers, and what each writes there."""
    graph, columns = facts.graph, facts.columns
    late = np.zeros(columns.num_values, bool)
    late[columns.reads[(runs > np.arange(len(runs)))[columns.reader]]] = True
    values = np.flatnonzero(kept & ~late & (columns.producer >= 0) & (stop > start + 1))
    by = stop[values] - 1
    made, width = columns.first_made[by], np.array([kind.itemsize for kind in graph.kinds])[graph.kind]
    fits = facts.fusible[by] & kept[made] & (start[made] == by)
    fits &= (graph.sizes[made] == graph.sizes[values]) & (width[made] == width[values])
    fits &= columns.trips[by] == columns.trips[columns.producer[values]]
    maker = np.where(kept, -1, columns.producer)  # of what kernels make within themselves
    values, by, made = values[fits], by[fits], made[fits]
    in_place = _read_in_place(columns.reads, columns.start, _alike(facts), maker, by, values)
    made, first = np.unique(made[in_place], return_index=True)
    return values[in_place][first].tolist(), made.tolist()


def _alike(facts: Facts) -> Bools:
    """Of all reads, those by operations that can be fused, element for element as they write their results."""
    columns, ops = facts.columns, np.flatnonzero(facts.fusible)
    _, example, which = np.unique(columns.signature[ops], return_index=True, return_inverse=True)
    known = [_read_alike(facts, int(ops[i])) for i in example]
    width = np.array([len(same) for same in known], np.int64)
    begin, count = np.cumsum(width) - width, width[which]
    assert (count == np.diff(columns.start)[ops]).all()
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    found = np.zeros(len(columns.reads), bool)
    found[np.repeat(columns.start[ops], count) + place] = np.concatenate([*known, []])[
        np.repeat(begin[which], count) + place
    ]
    return found


def _read_alike(facts: Facts, index: int) -> list[bool]:
    """Which operands an operation reads element for element as it writes its result."""
    if facts.columns.primitive(index) in _RESHAPING:
        return [True] * len(facts.columns.reads_of(index))
    nest = facts.nests[index]
    plain = all(nest.loops[loop].kind == "parallel" for dim in nest.results[0] for loop in dim)
    return [plain and dims == nest.results[0] for dims in nest.operands]


@njit(cache=True)
def _read_in_place(reads, begin, alike, maker, ops, values):
    """For each operation, whether its kernel reads a value, and nowhere else than where it writes its result.

    Args:
        reads, begin: What operations read.
        alike: For each read, whether it is element for element as its operation writes its result.
        maker: The operation that makes a value; -1 where it is in memory.
        ops, values: The operations, and one value for each.
    """
    found = np.zeros(len(ops), np.bool_)
    seen, seen_alike = np.empty(_MOST_AGAIN, np.int64), np.empty(_MOST_AGAIN, np.bool_)
    for i in range(len(ops)):
        stack, num_seen, reached = [(ops[i], True)], 0, False
        while stack:
            at, same = stack.pop()
            known = False
            for k in range(num_seen):
                known |= seen[k] == at and seen_alike[k] == same
            if known:
                continue
            if num_seen == _MOST_AGAIN:
                reached = False
                break
            seen[num_seen], seen_alike[num_seen] = at, same
            num_seen += 1
            torn = False
            for k in range(begin[at], begin[at + 1]):
                if reads[k] == values[i]:
                    torn |= not (same and alike[k])
                    reached = True
                elif maker[reads[k]] >= 0:
                    stack.append((maker[reads[k]], same and alike[k]))
            if torn:
                reached = False
                break
        found[i] = reached
    return found


class Orders:
    """In which order of dims, those of one element left out, values are made and read."""

    def __init__(self, facts: Facts):
        columns = facts.columns
        self._facts, self._columns, self._known = facts, columns, dict[int, Dims | None]()
        self._wanted: dict[tuple[int, int], tuple[Dims, tuple[Dims, Dims]]] = {}  # by signature and operand
        self._places: dict[tuple[int, int], list[tuple[int, dict[int, int] | None]]] = {}  # by signature and result
        transposes = facts.where(lambda name, _: name == "transpose")
        ops = (columns.reads, columns.start, columns.first_made, columns.num_made, facts.fusible, transposes)
        self._follows = _followed(*ops, facts.graph.sizes)
        # Numbers one by one are quicker read from lists.
        parts = (self._follows, columns.producer, columns.signature, columns.first_made, columns.start, columns.reads)
        self._order, self._producer, self._signature, self._first, self._start, self._reads = (
            x.tolist() for x in parts
        )

    def may_differ(self, values: Ints) -> Ints:
        """Those of some values that may be made in another order than their own."""
        return values[self._follows[values] == _MOVED]

    def wanted(self, index: int, side: int) -> tuple[Dims, tuple[Dims, Dims]]:
        """The order in which a product reads an operand, and the dims that it merges, for rows and for columns."""
        key = self._signature[index], side
        if key not in self._wanted:
            op = self._columns.signatures[key[0]]
            shape = op.operands[side].shape
            along, rows, columns = (tuple(d for d in dims if shape[d] > 1) for dims in product_dims(op, side))
            self._wanted[key] = (*along, *rows, *columns), (rows, columns)
        return self._wanted[key]

    def of(self, value: int) -> Dims | None:
        """The order in which a value is made, that of what it is made from; empty if any would do, None if unclear."""
        trail, known = [value], self._known
        while trail:
            at = trail[-1]
            if self._order[at] != _MOVED:
                known[at] = () if self._order[at] == _ANY else self._long(at)
                trail.pop()
                continue
            sources = self._sources(at)
            unknown = [source for source, _ in sources if source not in known]
            if unknown:
                trail += unknown
                continue
            found = {_through(known[source], places) for source, places in sources} - {()}
            known[at] = found.pop() if len(found) == 1 else None if found else self._long(at)
            trail.pop()
        return known[value]

    def _long(self, value: int) -> Dims:
        return tuple(d for d, size in enumerate(self._shape(value)) if size > 1)

    def _shape(self, value: int) -> Dims:
        return self._facts.graph.kinds[self._facts.graph.kind[value]].shape

    def _sources(self, value: int) -> list[tuple[int, dict[int, int] | None]]:
        """What decides the order in which a value is made: values as large, and where their dims go; None if torn."""
        index = self._producer[value]
        key, begin = (self._signature[index], value - self._first[index]), self._start[index]
        if key not in self._places:
            self._places[key] = list(self._placed(index, value))
        return [(self._reads[begin + operand], places) for operand, places in self._places[key]]

    def _placed(self, index: int, value: int) -> Iterator[tuple[int, dict[int, int] | None]]:
        """The operands of an operation that are as large as a value it makes, and where their dims go in that."""
        op = self._columns.signatures[self._columns.signature[index]]
        size, after = self._facts.graph.sizes, self._long(value)
        for operand, source in enumerate(self._columns.reads_of(index).tolist()):
            before = self._long(source)
            if size[source] != size[value]:
                continue
            if op.primitive == "transpose":
                yield operand, {d: i for i, d in enumerate(op.params["permutation"])}
            elif [self._shape(source)[d] for d in before] == [self._shape(value)[d] for d in after]:
                yield operand, dict(zip(before, after, strict=True))
            else:
                yield operand, None


def _through(order: Dims | None, places: dict[int, int] | None) -> Dims | None:
    return None if order is None or places is None else tuple(places[d] for d in order)


@njit(cache=True)
def _followed(reads, begin, first_made, num_made, fusible, transposes, sizes):
    """For each value whether the order of its dims is its own, any, or one that came about by transposing."""
    found = np.full(len(sizes), _OWN)
    for i in range(len(first_made)):
        if not fusible[i]:
            continue
        follows = _ANY
        for k in range(begin[i], begin[i + 1]):
            if sizes[reads[k]] == sizes[first_made[i]]:
                follows = max(follows, found[reads[k]])
        if transposes[i] and follows != _ANY:
            follows = _MOVED
        found[first_made[i] : first_made[i] + num_made[i]] = follows
    return found
