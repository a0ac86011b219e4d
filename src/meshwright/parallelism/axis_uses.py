"""The use of each mesh axis in each product of a weight with activations: the basis of verdicts and kinds.

In the forward pass every product (or look-up) of a parameter with activations has loops that index the parameter, the
activations, the result. The loop that an axis splits determines the use of the axis:

==============  ==================================================================
batch           a loop of activations and result that comes from the data's first dim, or experts' slots for tokens
sequence        one that comes from another dim of the data; of images, ``spatial``
column          a loop of parameter and result: each device makes a part of the features
row             a loop of parameter and activations that is summed: each device makes a partial sum
expert          a loop of all three that no data have: each device holds some of the experts
vocabulary      a loop that is looked up by index, or one of its result that is picked from by index
other           any other
idle            no loop: the devices along the axis all do the same
==============  ==================================================================
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from meshwright.parallelism.dim_names import DimClasses, major_loops, name_dims
from meshwright.plans.records.traced_program import VIRTUAL, Nest, RecordedProgram
from meshwright.rules.families.islands import ISLAND
from meshwright.strategy.sharding import Axes

if TYPE_CHECKING:
    from meshwright.plans.plan import Spec

_NEUTRAL, _ACTIVATION = -2, -1  # origins of a value: constants alone, activations; otherwise the parameter's value
_LOOKED_UP = ("sum", "or")  # reductions that combine the parts of a look-up in a split table


@dataclass(frozen=True, slots=True)
class Use:
    """One axis in one product of a parameter with activations, or in one look-up.

    Attributes:
        op: The operation.
        parameter: Value of the parameter.
        axis: Number of the axis.
        part: The use of the axis there: see the table above.
        dim_class: Class of the dim that it splits; -1 where it is idle.
        dim: The parameter's dim that it splits, as the product reads it; -1 for none.
        flops: Work of the operation in one step, all devices together; 0 for look-ups.
    """

    op: int
    parameter: int
    axis: int
    part: str
    dim_class: int
    dim: int
    flops: float


class AxisFacts:
    """The facts of a program about the uses of its axes.

    Args:
        program: The program.
        names: Names of the axes.
        sizes: Their sizes.
        roles: Role of each argument, by path.
    """

    def __init__(self, program: RecordedProgram, names: Sequence[str], sizes: Sequence[int], roles: Mapping[str, str]):
        self.program, self.names, self.axes = program, tuple(names), Axes(tuple(sizes))
        self.values = {path: value for value, path in enumerate(program.inputs)}
        by_role: dict[str, list[int]] = {"parameters": [], "optimizer": [], "data": []}
        for path, value in self.values.items():
            by_role.setdefault(roles.get(path, "data"), []).append(value)
        self.parameters, self.optimizer, self.data = (by_role[r] for r in ("parameters", "optimizer", "data"))

    def within(self, program: RecordedProgram) -> "AxisFacts":
        """The same facts about a part of the program: a stage's, in which fewer operations run.

        Dims and values keep their meanings in the whole program: a stage in the middle sees neither data nor loss.
        """
        part = copy(self)
        shared = {name: getattr(self, name) for name in ("letters", "weight_ops", "_kept", "_owners")}
        vars(part).update(shared, program=program)
        vars(part).pop("uses", None)
        return part

    @cached_property
    def classes(self) -> DimClasses:
        """Which dims are the same."""
        return DimClasses(self.program)

    @cached_property
    def _origin(self) -> list[int]:
        """For each value the parameter that it is made from alone, or whether it is constant or an activation."""
        program = self.program
        origins = [_NEUTRAL] * len(program.kind)
        for value in range(len(program.inputs)):
            origins[value] = _ACTIVATION
        for value in self.parameters:
            origins[value] = value
        reads, start, first = program.reads.tolist(), program.start.tolist(), program.first_made.tolist()
        counts = [len(nest.results) for nest in program.nests]
        for op, nest in enumerate(program.nest.tolist()):
            tags = {origins[value] for value in reads[start[op] : start[op + 1]]} - {_NEUTRAL}
            if not tags:
                continue
            mixed = _ACTIVATION in tags or program.nests[nest].flops > 0
            for value in range(first[op], first[op] + counts[nest]):
                origins[value] = _ACTIVATION if mixed else min(tags)
        return origins

    def parameter_of(self, value: int) -> int:
        """The parameter that a value is made from alone, by casts and the like; -1 for none."""
        return max(self._origin[value], -1)

    @cached_property
    def weight_ops(self) -> list[tuple[int, int, int]]:
        """Products of a parameter with activations, and look-ups: ``(operation, operand, parameter)``."""
        program, origin = self.program, self._origin
        forward = program.phases.index("forward")
        candidates = [n.flops > 0 or bool(looked_up(n)) for n in program.nests]
        products = []
        for op, nest in enumerate(program.nest.tolist()):
            if not candidates[nest] or program.phase[op] != forward or program.assignment[op] == VIRTUAL:
                continue
            if program.labels[program.label[op]].endswith(ISLAND):  # which products it runs, its loop nest does not say
                continue
            tags = [origin[value] for value in program.reads_of(op)]
            of_weights = [i for i, tag in enumerate(tags) if tag >= 0]
            if of_weights and _ACTIVATION in tags:
                products.append((op, of_weights[0], tags[of_weights[0]]))
        return products

    @cached_property
    def vocabulary(self) -> frozenset[int]:
        """Classes of dims that are indexed in a parameter, or in the result of a product with a parameter."""
        program, indexed = self.program, set()
        weights = [c for value in self.parameters for c in self.classes.of(value)]
        batch_like = self.batch | self.sequence
        sizes = [bool(looked_up(nest)) for nest in program.nests]
        for op, nest in enumerate(program.nest.tolist()):
            if sizes[nest]:
                table = self.classes.of(program.reads_of(op)[0])
                indexed |= {table[d] for d in looked_up(program.nests[nest]) if table[d] not in batch_like}
        indexed &= set(weights)
        lengths = {self._length(c) for c in indexed}
        # A head that is read otherwise than by index: the only weight that has this dim, as long as a vocabulary.
        matrices = [c for v in self.parameters if len(self.classes.of(v)) == 2 for c in self.classes.of(v)]
        return frozenset(indexed | {c for c in matrices if matrices.count(c) == 1 and self._length(c) in lengths})

    def _length(self, dim_class: int) -> int:
        for value in self.parameters:
            for c, size in zip(self.classes.of(value), self.program.shape(value), strict=True):
                if c == dim_class:
                    return size
        return 0

    @cached_property
    def batch(self) -> frozenset[int]:
        """Classes of the data's first dims; where that is a feature, as in ``weights @ columns``, of the next ones."""
        ahead = ([c for c in self.classes.of(value) if c not in self._features] for value in self.data)
        return frozenset(dims[0] for dims in ahead if dims)

    @cached_property
    def _rows(self) -> frozenset[int]:
        return frozenset(self.classes.of(v)[0] for v in self.data if self.program.shape(v))

    @cached_property
    def _given(self) -> frozenset[int]:
        """Classes of all dims of the data."""
        return frozenset(c for value in self.data for c in self.classes.of(value))

    @cached_property
    def sequence(self) -> frozenset[int]:
        """Classes of the data's other dims that are no features."""
        return self._given - self.batch - self._features

    @cached_property
    def is_image(self) -> bool:
        """Whether the data are images: batch, rows, columns, channels."""
        return any(len(self.program.shape(value)) > 3 for value in self.data)

    @cached_property
    def _features(self) -> frozenset[int]:
        return frozenset(c for value in self.parameters for c in self.classes.of(value))

    @cached_property
    def uses(self) -> list[Use]:
        """Every axis in every product and look-up of the forward pass."""
        running = [product for product in self.weight_ops if self.program.trips[product[0]] > 0]
        return [use for op, operand, parameter in running for use in self._uses(op, operand, parameter)]

    def _uses(self, op: int, operand: int, parameter: int) -> Iterator[Use]:
        program = self.program
        nest, assigned = program.nests[program.nest[op]], program.assignments[program.assignment[op]]
        flops = nest.flops * float(program.trips[op])
        for axis, loop in enumerate(assigned):
            if self.axes.sizes[axis] > 1:
                part, dim_class = self._part(op, nest, operand, loop)
                dim = next((d for d, dim in enumerate(nest.operands[operand]) if loop in dim), -1)
                yield Use(op, parameter, axis, part, dim_class, dim, flops)

    def _part(self, op: int, nest: Nest, operand: int, loop: int) -> tuple[str, int]:
        if loop < 0:
            return "idle", -1
        dim_class = self._class_of(op, nest, loop)
        if any(loop in dim for dim in nest.operands[operand]):
            place = "vocabulary" if dim_class in self.vocabulary else place_of(nest, operand, loop)
            if place == "expert" and dim_class in self._given:  # two arguments multiplied row by row, such as attention
                place = "batch" if dim_class in self._rows else "other"
            return place, dim_class
        if dim_class in self.batch:
            return "batch", dim_class
        if dim_class in self.sequence:
            return "spatial" if self.is_image else "sequence", dim_class
        # The other loops of experts' activations run over slots into which tokens of the batch were sorted.
        with_experts = self._experts.intersection(self.classes.of(self.program.reads_of(op)[operand]))
        return "batch" if with_experts or self._is_own_batch(op, nest, operand, loop) else "other", dim_class

    def _is_own_batch(self, op: int, nest: Nest, operand: int, loop: int) -> bool:
        """Whether a loop runs over the first dim of activations that the program makes itself, such as drawn noise."""
        reads = [
            (value, dims)
            for i, (value, dims) in enumerate(zip(self.program.reads_of(op), nest.operands, strict=True))
            if i != operand
        ]
        return any(dims and loop in dims[0] and self.classes.of(value)[0] not in self._given for value, dims in reads)

    def _class_of(self, op: int, nest: Nest, loop: int) -> int:
        tensors = [*zip(self.program.reads_of(op), nest.operands, strict=True)]
        tensors += [*zip(self.program.made_by(op), nest.results, strict=True)]
        for value, dims in tensors:
            for dim_class, major in zip(self.classes.of(value), major_loops(nest, dims), strict=True):
                if major == loop:
                    return dim_class
        return -1

    def is_kept(self, parameter: int, dim: int, axis: int) -> bool:
        """Whether some operation that meets activations reads a parameter as an axis splits one of its dims."""
        return (parameter, dim, axis) in self._kept

    @cached_property
    def _kept(self) -> set[tuple[int, int, int]]:
        program, origin = self.program, self._origin
        keeping: set[tuple[int, int, int]] = set()
        last = program.phases.index("update")
        for op in range(program.num_ops):
            if program.assignment[op] == VIRTUAL or program.phase[op] == last:
                continue
            assigned = program.assignments[program.assignment[op]]
            for value in program.reads_of(op):
                if origin[value] >= 0 and any(loop >= 0 for loop in assigned):
                    keeping.update(self._kept_by(op, origin[value], assigned))
        return keeping

    def _kept_by(self, op: int, parameter: int, assigned: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        if _ACTIVATION not in {self._origin[value] for value in self.program.reads_of(op)}:
            return
        nest, classes = self.program.nests[self.program.nest[op]], self.classes.of(parameter)
        for axis, loop in enumerate(assigned):
            if loop >= 0:
                dim_class = self._class_of(op, nest, loop)
                yield from ((parameter, dim, axis) for dim, c in enumerate(classes) if c == dim_class)

    @cached_property
    def letters(self) -> dict[int, str]:
        """Letters of the dims' classes."""
        paths = {value: self.program.inputs[value] for value in self.parameters}
        products = {p for op, _, p in self.weight_ops if self.program.nests[int(self.program.nest[op])].flops > 0}
        return name_dims(self.classes, paths, self.data, self.vocabulary, self._experts, self._stacked, products)

    @cached_property
    def _experts(self) -> set[int]:
        """Classes that a weight, the activations multiplied with it, and the result all have, and no data."""
        candidates = set()
        for op, *_ in self.weight_ops:
            nest = self.program.nests[self.program.nest[op]]
            loops = [{loop for dim in dims for loop in dim} for dims in (*nest.operands, nest.results[0])]
            shared = set.intersection(*loops) if nest.flops else set()
            candidates |= {self._class_of(op, nest, loop) for loop in shared if nest.sizes[loop] > 1}
        return (candidates & self._features) - self._given

    @cached_property
    def _stacked(self) -> set[int]:
        """Classes of dims of parameters that a scan takes one layer at a time from."""
        program = self.program
        slices = {i for i, label in enumerate(program.labels) if label.rpartition("/")[2] == "loop_slice"}
        taken = {program.reads_of(op)[0] for op, label in enumerate(program.label.tolist()) if label in slices}
        return {self.classes.of(value)[0] for value in taken & set(self.parameters)}

    def owner(self, value: int) -> int:
        """The parameter that optimizer state belongs to: of its dims' classes, and of the most similar path."""
        return self._owners.get(value, value)

    @cached_property
    def _owners(self) -> dict[int, int]:
        return find_owners(self.program, self.classes, self.parameters, self.optimizer)

    def letters_of(self, value: int) -> list[str]:
        """The letters of a value's dims; of dims that have one letter, as in ``x @ x``, the first alone shows it."""
        letters = [self.letters.get(c, "") for c in self.classes.of(value)]
        return ["" if letter in letters[:dim] else letter for dim, letter in enumerate(letters)]

    def spec_of(self, value: int, code: int) -> "Spec":
        """A sharding's code as axis names."""
        rank = len(self.program.shape(value))
        return tuple(tuple(self.names[a] for a in axes) for axes in self.axes.dims(code, rank))


def place_of(nest: Nest, operand: int, loop: int) -> str:
    """The use of an axis that splits a loop of a parameter, by the other tensors that the loop runs over."""
    in_others = any(loop in dim for i, dims in enumerate(nest.operands) if i != operand for dim in dims)
    in_result = any(loop in dim for dim in nest.results[0])
    if in_result:
        return "expert" if in_others else "column"
    return "row" if in_others else "vocabulary"


def looked_up(nest: Nest) -> list[int]:
    """Dims of the first operand that are looked up by index."""
    if nest.flops or len(nest.operands) < 2 or not nest.results:
        return []
    elsewhere = {loop for dims in (*nest.operands[1:], *nest.results) for dim in dims for loop in dim}
    places = enumerate(nest.operands[0])
    return [d for d, dim in places if any(nest.kinds[i] in _LOOKED_UP and i not in elsewhere for i in dim)]


def find_owners(
    program: RecordedProgram, classes: DimClasses, parameters: Iterable[int], optimizer: Iterable[int]
) -> dict[int, int]:
    """For each leaf of the optimizer the parameter of the same dims and of the most similar path; itself for none."""

    def dims(value: int) -> tuple[tuple[int, int], ...]:
        """Classes and sizes; a dim of one is like any other of one."""
        pairs = zip(classes.of(value), program.shape(value), strict=True)
        return tuple((dim_class if size > 1 else -1, size) for dim_class, size in pairs)

    paths = program.inputs
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for parameter in parameters:
        alike.setdefault(dims(parameter), []).append(parameter)
    owners = {}
    for value in optimizer:
        same, path = alike.get(dims(value), []), paths[value]
        ranked = [(_common_end(paths[parameter], path), -parameter) for parameter in same]
        owners[value] = -max(ranked)[1] if ranked else value
    return owners


def _common_end(one: str, other: str) -> int:
    """How many path components two paths have in common, counted from the end."""
    pairs: Iterable[tuple[str, str]] = zip(reversed(one.split("/")), reversed(other.split("/")), strict=False)
    count = 0
    for a, b in pairs:
        if a != b:
            break
        count += 1
    return count
