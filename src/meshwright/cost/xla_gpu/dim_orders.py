"""The orders of dims in which values are computed and read; dims of one element are left out.

A kernel computes a value in the order of its operands' dims, which a transpose within the kernel permutes. An order is
kept as one whole number, with four bits for each dim.
"""

from math import prod

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.graph.facts import Dims, Facts, product_dims
from meshwright.jit import kernel

_ANY, _OWN, _MOVED = 0, 1, 2  # which order of dims a value may be computed in
_UNCLEAR = -1  # an order, or a mapping of dims, that is not known
_SMALLER = -2  # an operand that is not as large as the result
_MOST_DIMS = 15
_WARP = 32  # threads of a GPU that run together


class Orders:
    """The orders of a graph's values."""

    def __init__(self, facts: Facts):
        columns = facts.columns
        transposes = facts.where(lambda name, _: name == "transpose")
        ops = (columns.reads, columns.start, columns.first_made, columns.num_made)
        self._columns, self._sizes, self._relaid = columns, facts.graph.sizes, np.zeros(columns.num_values, bool)
        self._follows = _followed(*ops, facts.fusible & ~facts.cut_out, transposes, facts.graph.sizes)
        own = np.array([_pack(_long(kind.shape)) for kind in facts.graph.kinds], np.int64)[facts.graph.kind]
        moving = np.flatnonzero(self._follows[columns.first_made] == _MOVED)
        self._made = np.where(self._follows == _ANY, 0, own)
        _follow(*ops, moving, *self._places(moving), own, self._made)
        self._transposed: dict[tuple[int, tuple[tuple[int, int], ...]], bool] = {}

    def may_differ(self, values: Ints) -> Ints:
        """The values, of those given, that may be computed in another order than their own."""
        return values[self._follows[values] == _MOVED]

    def transposing(self) -> NDArray[np.bool_]:
        """The operations whose kernel transposes: operands that are as large as the result come in several orders."""
        columns, made, sizes = self._columns, self._made, self._sizes
        as_large = sizes[columns.reads] == sizes[columns.first_made[columns.reader]]
        known = np.where(as_large & (made[columns.reads] != _UNCLEAR), 1, -columns.num_values)
        several = np.bincount(columns.reader, np.where(as_large, known, 0), len(columns.signature)) > 1
        found = several & (made[columns.first_made] == _UNCLEAR)
        turned = self._relaid[columns.first_made[columns.reader]] & ~self._relaid[columns.reads] & as_large
        found[columns.reader[turned & (made[columns.reads] != 0)]] = True
        return found

    def relay(self, facts: Facts, num_devices: int) -> None:
        """Gives values that are summed over their leading dims the order in which these are the innermost.

        XLA's GPU compiler does so where the result is a matrix or more and a warp has enough to sum, and all values
        that are computed from such a value, or it from them, element for element, follow. An example is the residual
        stream of a model that adds a learned vector for each position, if a device has 32 sequences or more.
        """
        columns = self._columns
        for number in columns.examples:
            op = columns.signatures[number]
            if op.primitive != "reduce_sum" or sum(size > 1 for size in op.results[0].shape) < 2:
                continue
            summed, shape = tuple(op.params["axes"]), op.operands[0].shape
            last = max(_long(shape))
            if (
                last in summed
                or min(_long(shape)) not in summed
                or prod(shape[d] for d in summed) < _WARP * num_devices
            ):
                continue
            order = _pack((*(d for d in _long(shape) if d not in summed), *(d for d in summed if shape[d] > 1)))
            alike = np.array([tensor.shape == shape for tensor in facts.graph.kinds])[facts.graph.kind]
            summed_values = columns.reads[columns.start[:-1][columns.signature == number]]
            ops = (columns.reads, columns.start, columns.first_made, facts.fusible)
            _spread(*ops, alike, summed_values, order, self._relaid, self._made)

    def of(self, value: int) -> Dims | None:
        """The order in which a value is computed, that of its operands; empty if any suffices, None if unclear."""
        order = int(self._made[value])
        return None if order == _UNCLEAR else _unpack(order)

    def all_transpose(self, value: int, products: list[tuple[int, int]]) -> bool:
        """Whether products, given with their operands, read a value in different orders, none as it is computed.

        This is False if the order is unclear, or if any order suffices.
        """
        signature = self._columns.signature
        key = int(self._made[value]), tuple([(int(signature[index]), side) for index, side in products])
        if key not in self._transposed:
            order, wanted = self.of(value) or (), [self._wanted(*product) for product in key[1]]
            apart = order != () and len({dims for dims, _ in wanted}) == len(wanted)
            self._transposed[key] = apart and not any(_lies_so(order, merged) for _, merged in wanted)
        return self._transposed[key]

    def _wanted(self, signature: int, side: int) -> tuple[Dims, tuple[Dims, Dims]]:
        """The order in which a product reads an operand, and the dims that it merges, for rows and for columns."""
        op = self._columns.signatures[signature]
        shape = op.operands[side].shape
        along, rows, columns = (tuple(d for d in dims if shape[d] > 1) for dims in product_dims(op, side))
        return (*along, *rows, *columns), (rows, columns)

    def _places(self, ops: Ints) -> tuple[Ints, Ints]:
        """How operands' dims map to results: a table by result and operand, and each operation's first entry."""
        signatures, which = np.unique(self._columns.signature[ops], return_inverse=True)
        table: list[int] = []
        first = []
        for number in signatures.tolist():
            op = self._columns.signatures[number]
            first.append(len(table))
            for result in op.results:
                for operand in op.operands:
                    permutation = op.params["permutation"] if op.primitive == "transpose" else None
                    table.append(_goes(operand.shape, result.shape, permutation))
        return np.array(table, np.int64), np.array(first, np.int64)[which]


def _goes(before: Dims, after: Dims, permutation: Dims | None) -> int:
    """The position of each of an operand's dims in a result, four bits for each."""
    if prod(before) != prod(after):
        return _SMALLER
    if max(len(before), len(after)) > _MOST_DIMS:
        return _UNCLEAR
    if permutation is not None:
        return sum(place << 4 * dim for place, dim in enumerate(permutation))
    long_before, long_after = _long(before), _long(after)
    if [before[d] for d in long_before] != [after[d] for d in long_after]:
        return _UNCLEAR
    return sum(place << 4 * dim for dim, place in zip(long_before, long_after, strict=True))


def _long(shape: Dims) -> Dims:
    return tuple(d for d, size in enumerate(shape) if size > 1)


def _pack(order: Dims) -> int:
    """An order as a number, which is 0 if there are no dims to order."""
    if any(dim >= _MOST_DIMS for dim in order):
        return _UNCLEAR
    return sum((dim + 1) << 4 * at for at, dim in enumerate(order))


def _unpack(order: int) -> Dims:
    found = []
    while order:
        found.append((order & 15) - 1)
        order >>= 4
    return tuple(found)


def _lies_so(order: Dims, merged: tuple[Dims, ...]) -> bool:
    """Whether dims that are merged are adjacent in an order of dims."""
    return all(not dims or dims in (order[i : i + len(dims)] for i in range(len(order))) for dims in merged)


@kernel
def _followed(reads, begin, first_made, num_made, fusible, transposes, sizes):
    """For each value whether the order of its dims is its own, arbitrary, or the result of a transpose."""
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


@kernel
def _follow(reads, begin, first_made, num_made, ops, places, first, own, made):
    """Writes the order of some operations' results: that of their operands, or their own if any order suffices.

    Args:
        reads, begin, first_made, num_made: The operands and results of operations.
        ops: The operations, in order.
        places, first: The mapping of their operands' dims, and where the entries of each operation begin.
        own: Each value's own order of dims.
        made: Each value's order, to be written.
    """
    for n, i in enumerate(ops):
        count = begin[i + 1] - begin[i]
        for result in range(num_made[i]):
            found = 0
            for operand in range(count):
                goes, order = places[first[n] + result * count + operand], made[reads[begin[i] + operand]]
                if goes == _SMALLER or order == 0:
                    continue
                moved = _UNCLEAR if goes == _UNCLEAR or order == _UNCLEAR else 0
                if moved == 0:
                    for at in range(0, 4 * _MOST_DIMS, 4):
                        dim = ((order >> at) & 15) - 1
                        if dim >= 0:
                            moved |= (((goes >> 4 * dim) & 15) + 1) << at
                found = moved if found == 0 or found == moved else _UNCLEAR
            made[first_made[i] + result] = found if found != 0 else own[first_made[i] + result]


@kernel
def _spread(reads, begin, first_made, fusible, alike, values, order, relaid, made):
    """Gives values an order, and so the values of their shape that fused operations compute from them or they from.

    Args:
        reads, begin, first_made: The operands and results of operations.
        fusible: The operations that are fused to their readers.
        alike: The values that have the shape.
        values: The values to start from.
        order: The order.
        relaid, made: Which values have it, and each value's order, to be changed.
    """
    given = np.zeros(len(alike), np.bool_)
    given[values] = True
    before = -1
    while before != given.sum():
        before = given.sum()
        for step in range(2 * len(first_made)):
            i = step if step < len(first_made) else 2 * len(first_made) - 1 - step
            if not fusible[i] or not alike[first_made[i]]:
                continue
            found = given[first_made[i]]
            for k in range(begin[i], begin[i + 1]):
                found = found or (given[reads[k]] and alike[reads[k]])
            if found:
                given[first_made[i]] = True
                relaid[first_made[i]] = True
                made[first_made[i]] = order
                for k in range(begin[i], begin[i + 1]):
                    given[reads[k]] = given[reads[k]] or alike[reads[k]]
