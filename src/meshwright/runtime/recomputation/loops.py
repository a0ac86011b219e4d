"""Recomputation in a loop over layers: what one trip keeps for its backward pass, which is a trip of another loop.

JAX makes two loops of one that is differentiated. The first stacks up what each trip keeps, the second reads it. Both
bodies are seen as one region here, in which the second reads values of the first; then they are taken apart again, with
stacks of what is kept only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshwright.program.parts import Moving, part_of
from meshwright.program.program import SCAN, UNPLANNED, Operation, Program
from meshwright.program.regions import with_regions
from meshwright.runtime.recomputation.inlining import without_checkpoints
from meshwright.runtime.recomputation.layers import Layers, is_heavy, one_layer
from meshwright.runtime.recomputation.policies import Retained
from meshwright.runtime.recomputation.regions import host_copy, recomputation, replaced, slice_to

#: Says what a region keeps, given its layers and, of a loop's trip, its inputs that are activations and its length.
Keep = Callable[..., Retained]


def loop_pairs(program: Program, backward: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """The positions of each loop of the forward pass and of the one that is its backward pass."""
    stacked: dict[int, int] = {}
    taken: set[int] = set()
    for position, operation in enumerate(program.operations):
        if operation.name != SCAN or not operation.regions:
            continue
        if not backward[position]:
            stacked.update(dict.fromkeys(operation.outputs[operation.num_carry :], position))
            continue
        read = [stacked[value] for value in _slices(operation) if value in stacked]
        first = max(set(read), key=read.count) if read else -1
        if first >= 0 and first not in taken and _length(program.operations[first]) == _length(operation):
            taken.add(first)
            yield first, position


def recompute_trips(program: Program, first: int, second: int, keep: Keep) -> None:
    """Changes a loop and the loop of its backward pass, so that the second computes again what is not kept.

    Args:
        program: The program with both, which is changed.
        first, second: Their positions.
        keep: Says what is kept.
    """
    ahead, behind = program.operations[first], program.operations[second]
    pair = _joined(ahead, behind)
    trip = _Trip(pair, keep(pair.joint, pair.layers, pair.carried, _length(ahead)))
    elsewhere = _read_elsewhere(program, ahead, second, pair)
    stacks = [program.add_value(_stacked(pair.joint.types[value], _length(ahead))) for value in trip.stacked]
    body = part_of(
        pair.joint,
        [*pair.joint.inputs],
        [*pair.ahead, *trip.copies],
        [*pair.returned[: ahead.num_carry], *(pair.returned[ahead.num_carry + n] for n in elsewhere), *trip.stacked],
    )
    made = [*ahead.outputs[: ahead.num_carry], *(ahead.outputs[ahead.num_carry + n] for n in elsewhere), *stacks]
    results = [*(ahead.result_ids[n] for n in elsewhere), *(UNPLANNED for _ in stacks)]
    same = ahead._replace(kept_ids=(ahead.carry_ids, ahead.slice_ids, results))
    loop = with_regions(program, same, [body], ahead.inputs, (ahead.num_consts, ahead.num_carry), made)
    consts, xs = [*pair.own_consts, *trip.shared], [*pair.own_slices, *trip.slices, *trip.stacked]
    read = [*consts, *pair.gradients, *xs]
    outside = dict(zip(pair.joint.inputs, ahead.inputs, strict=True)) | pair.outside
    outside |= dict(zip(trip.stacked, stacks, strict=True))
    body = part_of(pair.joint, read, trip.operations, trip.outputs)
    operands, counts = [outside[value] for value in read], (len(consts), len(pair.gradients))
    ids = dict(zip(_slices(behind), behind.slice_ids, strict=True))
    slices = [ids.get(outside[value], UNPLANNED) for value in xs]
    same = behind._replace(kept_ids=(behind.carry_ids, slices, behind.result_ids))
    program.operations[first] = loop
    program.operations[second] = with_regions(program, same, [body], operands, counts, behind.outputs)


@dataclass(frozen=True)
class _Pair:
    """The bodies of a loop and of its backward pass as one region.

    Attributes:
        joint: The region; its inputs are those of the first body, its outputs those of the second.
        layers: The region as one layer.
        ahead: The operations of the first body.
        returned: What the first body returns.
        num_shared: How many inputs of the first body are alike for all trips; its carry follows.
        carried: Its carry.
        own_consts, gradients, own_slices: The inputs of the second body that are no values of the first.
        outside: What these are in the program around the loops.
    """

    joint: Program
    layers: Layers
    ahead: list[Operation]
    returned: list[int]
    num_shared: int
    carried: list[int]
    own_consts: list[int]
    gradients: list[int]
    own_slices: list[int]
    outside: dict[int, int]


def _joined(ahead: Operation, behind: Operation) -> _Pair:
    joint = without_checkpoints(ahead.regions[0].copy())
    body, returned = behind.regions[0], list(joint.outputs)
    num_consts, num_carry = behind.num_consts, behind.num_carry
    known = dict(zip(ahead.outputs[ahead.num_carry :], returned[ahead.num_carry :], strict=True))
    slices = dict(zip(_slices(ahead), [*joint.inputs][ahead.num_consts + ahead.num_carry :], strict=True))
    consts = dict(zip(ahead.inputs[: ahead.num_consts], joint.inputs, strict=False))
    numbers: dict[int, int] = {}
    own: tuple[list[int], list[int], list[int]] = ([], [], [])
    outside: dict[int, int] = {}
    for place, (value, inner) in enumerate(zip(behind.inputs, body.inputs, strict=True)):
        which = 0 if place < num_consts else 1 if place < num_consts + num_carry else 2
        there = (consts, {}, known | slices)[which]
        if value in there:
            numbers[inner] = there[value]
        else:
            numbers[inner] = joint.add_value(body.types[inner])
            own[which].append(numbers[inner])
            outside[numbers[inner]] = value
    first, moving = list(joint.operations), Moving(body, joint, numbers)
    joint.operations.extend(map(moving.operation, body.operations))
    joint.outputs[:] = map(moving.number, body.outputs)
    joint = without_checkpoints(joint)
    carried = [*joint.inputs][ahead.num_consts : ahead.num_consts + ahead.num_carry]
    layers = one_layer(joint, len(first), returned[: ahead.num_carry])
    return _Pair(joint, layers, joint.operations[: len(first)], returned, ahead.num_consts, carried, *own, outside)


class _Trip:
    """A trip of the backward loop.

    Attributes:
        operations: What it runs.
        outputs: What it returns.
        shared, slices, stacked: The values of the forward trip that it reads: alike for all trips, slices of what the
            forward loop reads, and those that the forward loop stacks up for it.
        copies: What the forward trip runs as well: copies to the host of some that are stacked up.
    """

    def __init__(self, pair: _Pair, retained: Retained):
        joint, behind, kept = pair.joint, pair.joint.operations[len(pair.ahead) :], retained.at_all
        inputs, num_ahead = set(joint.inputs), len(pair.ahead)
        computed = {value for operation in pair.ahead for value in operation.outputs}
        cheap = _invariant(pair)
        there = {value for n in range(num_ahead) if kept[n] for value in joint.operations[n].outputs} - cheap
        needed = {value for operation in behind for value in operation.inputs} | set(joint.outputs)
        wanted = sorted((needed & computed) - there)
        again, read = slice_to(joint, pair.ahead, wanted, there | inputs)
        new: dict[int, int] = {}
        made: list[Operation] = []
        if again:
            operation, new = recomputation(joint, again, sorted(read), wanted, prevent_cse=False)
            made = [operation]
        self.operations = [*made, *(replaced(operation, new) for operation in behind)]
        self.outputs = [new.get(value, value) for value in joint.outputs]
        reads = {value for one in self.operations for value in one.inputs} | set(self.outputs)
        carried = set(pair.carried)
        consts = [value for value in joint.inputs if value in reads - carried]
        shared = set([*joint.inputs][: pair.num_shared])
        self.shared = [value for value in consts if value in shared]
        self.slices = [value for value in consts if value not in shared]
        self.stacked = sorted(reads & (there | carried) & (computed | carried))
        self.copies: list[Operation] = []
        self._keep_on_host(pair, retained)

    def _keep_on_host(self, pair: _Pair, retained: Retained) -> None:
        """Lets some of what is stacked up go to the host: what a trip keeps there, and what it hands to the next."""
        maker = {value: n for n, one in enumerate(pair.ahead) if retained.on_host[n] for value in one.outputs}
        maker |= {value: maker[out] for value, out in zip(pair.carried, pair.returned, strict=False) if out in maker}
        fetched = []
        for number, value in enumerate(self.stacked):
            if value in maker and pair.joint.types[value].shape:
                copy, fetch = host_copy(pair.joint, value, pair.ahead[maker[value]])
                self.copies.append(copy)
                fetched.append(fetch)
                self.stacked[number] = copy.outputs[0]
        self.operations[:0] = fetched


def _invariant(pair: _Pair) -> set[int]:
    """Values that are the same for all trips and cheap to compute, of which a stack would hold as many copies."""
    found = {*list(pair.joint.inputs)[: pair.num_shared], *pair.joint.constants}
    for operation in pair.ahead:
        if not is_heavy(operation) and all(value in found for value in operation.inputs):
            found.update(operation.outputs)
    return found


def _read_elsewhere(program: Program, ahead: Operation, second: int, pair: _Pair) -> list[int]:
    """Which of the stacks of a loop anything but its backward pass reads, by number."""
    read = {value for n, one in enumerate(program.operations) if n != second for value in one.inputs}
    read |= {*program.outputs, *pair.outside.values()}
    return [n for n, value in enumerate(ahead.outputs[ahead.num_carry :]) if value in read]


def _slices(operation: Operation) -> tuple[int, ...]:
    """What each trip of a loop reads a slice of."""
    return operation.inputs[operation.num_consts + operation.num_carry :]


def _length(operation: Operation) -> int:
    return int(operation.equation.params["length"])


def _stacked(aval: Any, length: int) -> Any:
    return aval.update(shape=(length, *aval.shape))
