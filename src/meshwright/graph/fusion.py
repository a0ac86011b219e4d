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
    readers: dict[int, list[int]] = {value: [] for value in np.setdiff1d(several, facts.ends).tolist()}
    for at in np.flatnonzero(np.isin(columns.reads, list(readers)) & ~fuses[columns.reader]).tolist():
        readers[int(columns.reads[at])].append(at)
    for value, places in readers.items():
        by = [int(columns.reader[at]) for at in places]
        if not products[by].all() or not (order := orders.of(value)):
            continue
        wanted = [orders.wanted(index, at - int(columns.start[index])) for index, at in zip(by, places, strict=True)]
        if all(not _lies_so(order, merged) for _, merged in wanted) and len({w for w, _ in wanted}) == len(by):
            yield from ((value, index) for index in by)


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
    kernels, found = _Kernels(facts, kept), dict[int, int]()
    for value, index, other in zip(values[fits].tolist(), by[fits].tolist(), made[fits].tolist(), strict=True):
        if other not in found and kernels.read_in_place(index, value):
            found[other] = value
    return list(found.values()), list(found)


class _Kernels:
    """What the kernels that write values read, and where."""

    def __init__(self, facts: Facts, kept: Bools):
        self._facts, self._columns = facts, facts.columns
        self._maker = np.where(kept, -1, facts.columns.producer).tolist()  # of what kernels make within themselves
        self._alike: dict[int, list[bool]] = {}

    def read_in_place(self, index: int, value: int) -> bool:
        """Whether the kernel of an operation reads a value, and nowhere else than where it writes its result."""
        found, stack, seen = False, [(index, True)], set[tuple[int, bool]]()
        while stack:
            if stack[-1] in seen:
                stack.pop()
                continue
            at, alike = stack.pop()
            seen.add((at, alike))
            if len(seen) > _MOST_AGAIN:
                return False
            for source, same in zip(self._columns.reads_of(at).tolist(), self._same(at), strict=True):
                if source == value:
                    if not (alike and same):
                        return False
                    found = True
                elif self._maker[source] >= 0:
                    stack.append((self._maker[source], alike and same))
        return found

    def _same(self, index: int) -> list[bool]:
        """Which operands an operation reads element for element as it writes its result."""
        number = int(self._columns.signature[index])
        if number not in self._alike:
            nest, count = self._facts.nests[index], len(self._columns.reads_of(index))
            plain = all(nest.loops[loop].kind == "parallel" for dim in nest.results[0] for loop in dim)
            same = [plain and dims == nest.results[0] for dims in nest.operands]
            self._alike[number] = [True] * count if self._columns.primitive(index) in _RESHAPING else same
        return self._alike[number]


class Orders:
    """In which order of dims, those of one element left out, values are made and read."""

    def __init__(self, facts: Facts):
        columns = facts.columns
        self._facts, self._columns, self._known = facts, columns, dict[int, Dims | None]()
        transposes = facts.where(lambda name, _: name == "transpose")
        ops = (columns.reads, columns.start, columns.first_made, columns.num_made, facts.fusible, transposes)
        self._follows = _followed(*ops, facts.graph.sizes)

    def may_differ(self, values: Ints) -> Ints:
        """Those of some values that may be made in another order than their own."""
        return values[self._follows[values] == _MOVED]

    def wanted(self, index: int, side: int) -> tuple[Dims, tuple[Dims, Dims]]:
        """The order in which a product reads an operand, and the dims that it merges, for rows and for columns."""
        op = self._columns.signatures[self._columns.signature[index]]
        shape = op.operands[side].shape
        along, rows, columns = (tuple(d for d in dims if shape[d] > 1) for dims in product_dims(op, side))
        return (*along, *rows, *columns), (rows, columns)

    def of(self, value: int) -> Dims | None:
        """The order in which a value is made, that of what it is made from; empty if any would do, None if unclear."""
        trail, known = [value], self._known
        while trail:
            at = trail[-1]
            sources = self._sources(at) if self._follows[at] == _MOVED else []
            unknown = [source for source, _ in sources if source not in known]
            if unknown:
                trail += unknown
                continue
            found = {_through(known[source], places) for source, places in sources} - {()}
            own = () if self._follows[at] == _ANY else self._long(at)
            known[at] = found.pop() if len(found) == 1 else None if found else own
            trail.pop()
        return known[value]

    def _long(self, value: int) -> Dims:
        return tuple(d for d, size in enumerate(self._shape(value)) if size > 1)

    def _shape(self, value: int) -> Dims:
        return self._facts.graph.kinds[self._facts.graph.kind[value]].shape

    def _sources(self, value: int) -> list[tuple[int, dict[int, int] | None]]:
        """What decides the order in which a value is made: values as large, and where their dims go; None if torn."""
        index = int(self._columns.producer[value])
        op = self._columns.signatures[self._columns.signature[index]]
        size, found, after = self._facts.graph.sizes, list[tuple[int, dict[int, int] | None]](), self._long(value)
        for source in dict.fromkeys(self._columns.reads_of(index).tolist()):
            before = self._long(source)
            if size[source] != size[value]:
                continue
            if op.primitive == "transpose":
                found.append((source, {d: i for i, d in enumerate(op.params["permutation"])}))
            elif [self._shape(source)[d] for d in before] == [self._shape(value)[d] for d in after]:
                found.append((source, dict(zip(before, after, strict=True))))
            else:
                found.append((source, None))
        return found


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
