"""Names of dims: which dims of which tensors are the same thing, and a letter for each.

Two dims are the same if an operation runs over both with one loop: the batch keeps its name from the data through
every layer to the loss, a feed-forward's width is the same in both of its weights. Letters are the field's own: B
batch, S sequence, D the hidden dim, F feed-forward, N heads, H head dim, V vocabulary, E experts, L layers that
are stacked up, R and C rows and columns of an image. Dims that no argument has go by their size.
"""

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.arrays import Ints
from meshwright.plans.records.traced_program import Dims, Nest, RecordedProgram

_NUMBER = re.compile(r"\d+")
_MORE = "FGKMPQRTUWXYZACIJO"  # letters for dims of weights that have no name of their own


class DimClasses:
    """Which dims are the same: each dim of each value has a class."""

    def __init__(self, program: RecordedProgram):
        ranks = np.array([len(shape) for shape, *_ in program.types], np.int64)[program.kind]
        self._first = np.concatenate([[0], np.cumsum(ranks)])
        self._class = self._connect(program)

    def of(self, value: int) -> list[int]:
        """The classes of a value's dims."""
        return self._class[self._first[value] : self._first[value + 1]].tolist()

    def among(self, classes: Iterable[int]) -> "Among":
        """Finds the dims of some classes, for many values at once."""
        is_among = np.zeros(len(self._class) + 1, bool)
        is_among[list(classes)] = True
        return Among(self._first, is_among[self._class])

    def _connect(self, program: RecordedProgram) -> Ints:
        one: list[Ints] = []
        other: list[Ints] = []
        for number, nest in enumerate(program.nests):
            ops = np.flatnonzero(program.nest == number)
            tensors = [program.reads[program.start[ops] + i] for i in range(len(nest.operands))]
            tensors += [program.first_made[ops] + i for i in range(len(nest.results))]
            for places in _same(nest):
                nodes = [self._first[tensors[tensor]] + dim for tensor, dim in places]
                one += [nodes[0]] * (len(nodes) - 1)
                other += nodes[1:]
        for result, argument in zip(program.made.tolist(), program.taken.tolist(), strict=True):
            if argument >= 0:
                rank = int(self._first[result + 1] - self._first[result])
                one.append(self._first[result] + np.arange(rank))
                other.append(self._first[argument] + np.arange(rank))
        size = int(self._first[-1])
        return connected(size, np.concatenate(one), np.concatenate(other)) if one else np.arange(size)


class Among(NamedTuple):
    """Whether dims are of some classes: those of value ``v`` are ``found[first[v] : first[v + 1]]``."""

    first: Ints
    found: NDArray[np.bool_]

    def at(self, values: Ints, dim: int) -> NDArray[np.bool_]:
        """Whether a dim of each of some values is of these classes."""
        return self.found[self.first[values] + dim]

    def dims(self) -> Ints:
        """For each value the first dim of these classes; -1 for none."""
        first_dims = np.full(len(self.first) - 1, -1)
        places = np.flatnonzero(self.found)[::-1]
        values = np.searchsorted(self.first, places, side="right") - 1
        first_dims[values] = places - self.first[values]
        return first_dims


def connected(size: int, one: Ints, other: Ints) -> Ints:
    """The component of each node, as its least member, given edges; edges are hooked and paths halved until none moves.

    >>> connected(5, np.array([3, 0]), np.array([1, 3])).tolist()
    [0, 0, 2, 0, 4]
    """
    label = np.arange(size)
    while True:
        a, b = label[one], label[other]
        moved = a != b
        if not moved.any():
            return label
        one, other, a, b = one[moved], other[moved], a[moved], b[moved]
        np.minimum.at(label, np.maximum(a, b), np.minimum(a, b))
        while not np.array_equal(shorter := label[label], label):
            label = shorter


def major_loops(nest: Nest, dims: Dims) -> list[int]:
    """For each dim of a tensor its major-most loop that is longer than one; -1 for none."""
    return [next((loop for loop in dim if nest.sizes[loop] > 1), -1) for dim in dims]


def _same(nest: Nest) -> list[list[tuple[int, int]]]:
    """Places ``(tensor, dim)`` that one loop runs over, tensors being operands and then results."""
    places_of: dict[int, list[tuple[int, int]]] = {}
    for tensor, dims in enumerate([*nest.operands, *nest.results]):
        for dim, loop in enumerate(major_loops(nest, dims)):
            if loop >= 0:
                places_of.setdefault(loop, []).append((tensor, dim))
    return [places for places in places_of.values() if len(places) > 1]


def name_dims(
    classes: DimClasses,
    parameters: Mapping[int, str],
    data: Iterable[int],
    looked_up: Iterable[int],
    experts: Iterable[int],
    stacked: Iterable[int],
    products: Container[int],
) -> dict[int, str]:
    """Letters of classes.

    Args:
        classes: The classes.
        parameters: Values of the parameters, with their paths.
        data: Values of the data.
        looked_up: Classes that are looked up by index, and so hold a vocabulary.
        experts: Classes that both weights and activations run over, one part of the one with one of the other.
        stacked: Classes of dims that count layers.
        products: Values of the parameters that are multiplied with activations; others (positions) have no features.
    """
    names: dict[int, str] = dict.fromkeys(looked_up, "V") | dict.fromkeys(stacked, "L")
    weights = {value: classes.of(value) for value in parameters}
    in_weights = {c for dims in weights.values() for c in dims}
    for value in data:
        dims = classes.of(value)
        of_data = [c for c in dims if c not in in_weights]
        for place, c in enumerate(of_data):
            names.setdefault(c, ("BRC" if len(dims) > 3 else "BST")[min(place, 2)])
    for c in experts:
        names.setdefault(c, "E")
    places = _places(weights, parameters)
    features = [_features(dims, names) for dims in weights.values() if len(dims) > 1]
    working = [_features(dims, names) for v, dims in weights.items() if len(dims) > 1 and v in products]
    counts = Counter(c for dims in features for c in dims if c not in names)
    if counts:
        hidden = places[max(counts, key=lambda c: (counts[c], -c))]
        # A chain of equal layers has a hidden dim between any two of them, and one at each end.
        names |= {c: "D" for c, where in places.items() if where <= hidden and c not in names}
    names |= _around_hidden(working, names)
    free = [letter for letter in _MORE if letter not in names.values()]
    for c in counts:
        if c not in names and free:
            letter = free.pop(0)
            names |= {other: letter for other, where in places.items() if where == places[c] and other not in names}
    return names


def _places(weights: Mapping[int, Sequence[int]], paths: Mapping[int, str]) -> dict[int, set[tuple[str, int]]]:
    """The places of classes in the weights; equal for dims at the same places of other layers' weights."""
    places: dict[int, set[tuple[str, int]]] = {}
    for value, dims in weights.items():
        for dim, c in enumerate(dims):
            places.setdefault(c, set()).add((_NUMBER.sub("*", paths[value]), dim))
    return places


def _features(classes: Sequence[int], names: Mapping[int, str]) -> list[int]:
    """A weight's dims but for experts and layers; of a convolution's, its channels, which come after its window."""
    features = [c for c in classes if names.get(c) not in ("E", "L")]
    return features if len(features) < 4 else features[-2:]


def _around_hidden(features: Iterable[Sequence[int]], names: Mapping[int, str]) -> dict[int, str]:
    """The dims beside the hidden dim: two dims are heads and head dim, one is the feed-forward's."""
    named: dict[int, str] = {}
    for classes in features:
        rest = [c for c in classes if names.get(c) != "D"]
        if len(rest) < len(classes):
            letters = {1: "F", 2: "NH"}.get(len(rest), "")
            named |= {c: letter for c, letter in zip(rest, letters, strict=False) if c not in names}
    return named
