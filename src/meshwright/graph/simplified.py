"""A program as XLA's CPU backend fuses it: simplified, with calls to a library and the layouts in which they read.

- Products, convolutions, reductions and the like are calls, which read and write memory. A sum takes in multiplications
  that nobody else reads, and what subtracts a maximum is done where the maximum is found.
- Operations that do the same to the same are one.
- Values scattered into zeros that are added to something else are scattered into that, in place.
- A product reads matrices: what has more dims is reshaped, and transposed if they are in another order. Its result is
  reshaped in turn; that is put off past elementwise work on such results alone.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright import jax_compat
from meshwright.graph.conversions import RESHARDING, Sent
from meshwright.graph.facts import Facts, product_dims
from meshwright.graph.graph import Graph
from meshwright.rules.base import LoopNest, Signature

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Layout = tuple[int, ...]


class Split(NamedTuple):
    """What is known of a program once it is split; nothing by default.

    Attributes:
        reduced: Operations whose results are reduced over devices, each with what must be alike where reductions are to
            be one.
        shardings: A number for the sharding in which each value is made.
        sent: For operations and values that they read in another sharding, the copy that they read.
    """

    reduced: Mapping[int, Hashable] = MappingProxyType({})
    shardings: Ints | None = None
    sent: Mapping[tuple[int, int], Sent] = MappingProxyType({})


class Simplified:
    """What fusion looks at, entry by entry for operations and values.

    Attributes:
        operands: The values that each operation reads.
        readers: The operations that read each value.
        same: For each operation the first that does the same, itself or another.
        calls: Whether an operation is a library call, or part of one.
        inside: Whether it is part of the sum that reads it.
        fusible: Whether its work can be done within its readers.
        bends: Whether its result is not element for element what it reads.
        scattered: For a scattering operation, the value that it scatters into in place of zeros.
        layouts: For calls that do not read all operands as they are, how they read each; None for as it is. The first
            number says whether dims are transposed, the others tell layouts apart.
        ends: Values that are there to the end of the program, or for a loop's next trip.
        constants: Values that are known beforehand.
    """

    def __init__(self, graph: Graph, nests: Sequence[LoopNest], split: Split):
        self.graph, self.columns, self.facts = graph, graph.columns, Facts(graph, nests)
        self.producer = self.columns.producer.tolist()
        self.ends, self.constants = set(self.facts.ends), set(graph.constants)
        self.inside = self._inside_sums()
        self.calls = self._library_calls()
        self.operands = self._scattered_in_place(split.shardings)
        self.same = self._merge()
        self.readers = self._find_readers()
        self.fusible = ((self.facts.fusible | self.where("loop_slice")) & ~self.where("loop_carry")).tolist()
        for index in split.reduced:
            self.fusible[index] = False
        self.bends = self.where(*_BENDING).tolist()
        self.layouts = self._find_layouts()

    def where(self, *names: str) -> Bools:
        """The operations of some primitives."""
        return self.facts.where(lambda name, _: name in names)

    def _inside_sums(self) -> list[bool]:
        facts, columns = self.facts, self.columns
        sums, reader = self.where("reduce_sum"), np.full(columns.num_values, -1)
        reader[columns.reads] = columns.reader
        once = facts.num_readers[columns.first_made] == 1
        once[[columns.producer[v] for v in facts.ends if columns.producer[v] >= 0]] = False
        found = np.zeros(len(sums), bool)
        for index in np.flatnonzero(self.where("mul", "square", "integer_pow") & once)[::-1].tolist():
            by = reader[columns.first_made[index]]
            found[index] = sums[by] or found[by]
        return found.tolist()

    def _library_calls(self) -> list[bool]:
        found = ~self.facts.fusible & ~self.where("loop_slice", "loop_stack")
        return (found | np.array(self.inside, bool) | self._after_maxima()).tolist()

    def _after_maxima(self) -> Bools:
        """Operations that subtract a maximum from what it was found in."""
        columns, found = self.columns, np.zeros(len(self.columns.signature), bool)
        maxima, passing = self.where("reduce_max"), self.where("broadcast_in_dim", "reshape", "max", "stop_gradient")
        for index in np.flatnonzero(self.where("sub")).tolist():
            value, most = columns.reads_of(index).tolist()
            maker = self.producer[most]
            while maker >= 0 and passing[maker]:
                makers = [self.producer[v] for v in columns.reads_of(maker).tolist()]
                maker = max(makers, default=-1)
            found[index] = maker >= 0 and maxima[maker] and value in columns.reads_of(maker)
        return found

    def _scattered_in_place(self, shardings: Ints | None) -> list[list[int]]:
        """What each operation reads, with a sum of scattered values and others made by the scattering itself."""
        columns, facts = self.columns, self.facts
        reads = columns.reads.tolist()
        found = [reads[a:b] for a, b in pairwise(columns.start.tolist())]
        self.scattered: dict[int, int] = {}
        instead: dict[int, int] = {}
        scatters, spread = self.where("scatter-add"), self.where("broadcast_in_dim")
        for index in np.flatnonzero(self.where("add", "add_any")).tolist():
            for value, other in (found[index], found[index][::-1]):
                maker = columns.producer[value]
                if maker < 0 or not scatters[maker] or facts.num_readers[value] > 1 or value == other:
                    continue
                if shardings is not None and shardings[value] != shardings[other]:
                    continue
                zeros = columns.producer[found[maker][0]]
                if zeros >= 0 and spread[zeros] and self.graph.sizes[other] == self.graph.sizes[value]:
                    instead[int(columns.first_made[index])] = value
                    self.scattered[int(maker)] = other
                    break
        negated = self.where("neg")
        for index in np.flatnonzero(self.where("reduce_sum")).tolist():  # a negation is done after the sum
            maker = columns.producer[found[index][0]]
            if maker >= 0 and negated[maker]:
                found[index] = found[maker]
        for maker, other in self.scattered.items():
            found[maker] = [other, *found[maker][1:]]
        return [[instead.get(v, v) for v in each] for each in found] if instead else found

    def _merge(self) -> list[int]:
        """Lets what reads one of several operations that do the same read the first, and tells which that is."""
        columns, graph = self.columns, self.graph
        loop = np.full(len(self.operands), -1)
        for number, (first, end) in enumerate(sorted(graph.loops, key=lambda loop: loop[0] - loop[1])):
            loop[first:end] = number
        again = [jax_compat.is_recomputed(scope) for scope in columns.scopes]
        mergeable = (columns.num_made == 1) & ~self.where("loop_carry", "loop_stack")
        made, found = columns.first_made.tolist(), list(range(len(self.operands)))
        adds = self.where("add", "add_any")
        instead: dict[int, int] = {}
        first_of: dict[tuple[int, int, bool, tuple[int, ...]], int] = {}
        for index, values in enumerate(self.operands):
            self.operands[index] = values = [instead.get(v, v) for v in values]
            if adds[index] and (rest := self._other_than_zero(index)) is not None:
                instead[made[index]] = rest
            elif mergeable[index]:
                key = (int(columns.signature[index]), int(loop[index]), again[columns.scope[index]], tuple(values))
                found[index] = first_of.setdefault(key, index)
                if found[index] != index:
                    instead[made[index]] = made[found[index]]
        return found

    def _other_than_zero(self, index: int) -> int | None:
        """What an addition adds to a literal zero, as the first of Python's `sum` does; None if it does not."""
        equation = self.columns.equation[index]
        for place, term in enumerate(equation.invars if equation is not None else ()):
            if isinstance(term, jax_compat.Literal) and np.ndim(term.val) == 0 and term.val == 0:
                rest = self.operands[index][1 - place]  # constants of a type are one value: only places tell them apart
                return rest if self.graph.kind[rest] == self.graph.kind[self.columns.first_made[index]] else None
        return None

    def _find_layouts(self) -> dict[int, tuple[Layout | None, ...]]:
        """How calls read their operands, as far as they do not read all of them as they are."""
        signatures, numbers = self.columns.signatures, self.columns.signature.tolist()
        layouts = {n: _LAYOUTS[s.primitive](s) for n, s in enumerate(signatures) if s.primitive in _LAYOUTS}
        found = {index: layouts[number] for index, number in enumerate(numbers) if number in layouts}
        merged = {
            (index, value)
            for index, of in found.items()
            for value, layout in zip(self.operands[index], of, strict=False)
            if layout and not layout[0]
        }
        matrices = self._matrices([index for index in found if self._is_reshaped(index)], merged)
        for index in {index for value in matrices for index in self.readers[value]}:
            old = found.get(index, (None,) * len(self.operands[index]))
            if self.calls[index]:
                found[index] = tuple(
                    (None if layout and not layout[0] else layout or (0,)) if value in matrices else layout
                    for value, layout in zip(self.operands[index], old, strict=False)
                )
        return found

    def _is_reshaped(self, index: int) -> bool:
        """Whether a product is a matrix before it has its own shape."""
        op = self.columns.signatures[self.columns.signature[index]]
        if op.primitive != "dot_general":
            return False
        contract, batch = op.params["dimension_numbers"]
        return any(len(k.shape) - len(c) - len(b) > 1 for k, c, b in zip(op.operands, contract, batch, strict=False))

    def _matrices(self, products: Iterable[int], merged: set[tuple[int, int]]) -> set[int]:
        """Values that are made of products while these are matrices still, and reshaped afterwards.

        Reshaping is put off past elementwise operations of which all operands are reshaped, level by level, as far as
        nothing else reads those; except products that ``merged`` the same dims anyway.
        """
        first, size = self.columns.first_made.tolist(), self.graph.sizes
        small = {v for v in range(self.columns.num_values) if size[v] == 1} | self.constants
        small |= {first[i] for i in np.flatnonzero(self.where("broadcast_in_dim")) if set(self.operands[i]) <= small}
        plain = [self.fusible[i] and not self.bends[i] and not self.calls[i] for i in range(len(first))]
        reshaped, moved = {first[index] for index in products}, set[int]()
        while True:
            near = {i for v in reshaped for i in self.readers[v] if plain[i] and i not in moved}
            near = {i for i in near if all(v in reshaped or v in small for v in self.operands[i])}
            while True:
                stuck = {
                    i
                    for i in near
                    for v in self.operands[i]
                    if v in reshaped and any(r not in near | moved and (r, v) not in merged for r in self.readers[v])
                }
                if not stuck:
                    break
                near -= stuck
            if not near:
                return reshaped - {first[index] for index in products}
            moved |= near
            reshaped |= {first[i] for i in near}

    def _find_readers(self) -> list[list[int]]:
        """The operations that read each value."""
        found: list[list[int]] = [[] for _ in range(self.columns.num_values)]
        for index, values in enumerate(self.operands):
            for value in dict.fromkeys(values):
                found[value].append(index)
        return found


def _of_product(op: Signature) -> tuple[Layout | None, ...]:
    """For each operand the layout in which it is read: its order of dims, and which of them are one; None for its own.

    The first number says whether dims are transposed.
    """
    found: list[Layout | None] = []
    for side, kind in enumerate(op.operands[:2]):
        along, first, second = product_dims(op, side)
        dims, order = range(len(kind.shape)), (*along, *first, *second)
        plain, natural = max(len(first), len(second)) <= 1, order == tuple(dims)
        if plain and (natural or len(dims) == 2):
            found.append(None)
        else:
            found.append((0, len(along), len(first)) if natural else (1, len(first), *order))
    return tuple(found)


def _of_convolution(op: Signature) -> tuple[Layout | None, ...]:
    """The same of a convolution: images are read with features last, kernels with those of results last."""
    dims = op.params["dimension_numbers"]
    last, inner = len(dims.lhs_spec) - 1, tuple(range(1, len(dims.lhs_spec) - 1))
    images, kernel = (0, last, *inner), (last, last - 1, *range(last - 1))
    pairs = ((tuple(dims.lhs_spec), images), (tuple(dims.rhs_spec), kernel))
    return tuple(None if spec == wanted else (1, *spec) for spec, wanted in pairs)


_BENDING = (
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "rev", "pad", "concatenate"),
    *("slice", "dynamic_slice", "gather", "loop_slice", RESHARDING),
)
_LAYOUTS = {"dot_general": _of_product, "conv_general_dilated": _of_convolution}
