"""A step whose backward pass computes again what a policy does not keep: the same numbers, for less memory.

Whatever the user's own `jax.checkpoint` computes again is kept first; then the policy decides. The result has the form
that `jax.checkpoint` has in a program, so all that reads a program knows it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from meshwright.graph.phases import BACKWARD, FORWARD, PHASES
from meshwright.program.numbering import Changed, numbered, unchanged
from meshwright.program.program import SCAN, Operation, Program
from meshwright.program.regions import with_regions
from meshwright.runtime.recomputation.inlining import without_checkpoints
from meshwright.runtime.recomputation.layers import OUTSIDE, Layers, is_heavy, layers_of, phases_of
from meshwright.runtime.recomputation.loops import Keep, loop_pairs, recompute_trips
from meshwright.runtime.recomputation.policies import LEVELS, NONE, Deciding, Retained, all_kept
from meshwright.runtime.recomputation.unrolled import recompute_layers


def recomputed(program: Program, policy: str) -> Changed:
    """A program whose backward pass computes again what a policy does not keep.

    Args:
        program: The program; it stays the same object where it has no backward pass.
        policy: The policy, as in `policies.py`. Kinds and places of one that names any are those of the program without
            its own checkpoints.
    """
    if not _has_both_passes(program):
        return unchanged(program)
    if policy.partition(":")[0] in LEVELS and "|" not in policy:
        return _recomputed(program, policy)
    plain = _recomputed(program, NONE)
    return _recomputed(plain.program, policy).after(plain)


def _recomputed(program: Program, policy: str) -> Changed:
    deciding = Deciding(policy)
    region = _region(program, deciding)
    deciding.check_count()
    return numbered(region)


@dataclass(frozen=True)
class Region:
    """A region of a step that has layers.

    Attributes:
        program: The region, with its forward and its backward pass.
        layers: Its layers.
        moving: Its inputs that are activations; nothing for a whole step.
        trips: How often a loop repeats it, all alike, while what each trip keeps adds up; 0 where it is in no loop.
    """

    program: Program
    layers: Layers
    moving: set[int]
    trips: int


def regions_of(program: Program) -> list[Region]:
    """The regions of a step without checkpoints, in the order in which a policy names their kinds of layers."""
    found: list[Region] = []

    def record(region: Program, layers: Layers, moving: Collection[int] = (), trips: int = 0) -> Retained:
        if layers.num_kinds:
            found.append(Region(region.copy(), layers, set(moving), trips))
        return all_kept(region)

    if _has_both_passes(program):
        _region(program, record)
    return found


def _region(program: Program, keep: Keep) -> Program:
    """A region that has a forward and a backward pass, changed as a policy says."""
    whole = without_checkpoints(program.copy())
    for operation in [one for one in whole.operations if one.name == SCAN and one.regions]:
        if _has_both_passes(operation.regions[0]):
            _replace_body(whole, operation, keep)
    _recompute_loops(whole, keep)
    layers = layers_of(whole)
    recompute_layers(whole, layers, keep(whole, layers))
    live = whole.live
    whole.operations[:] = [one for number, one in enumerate(whole.operations) if number in live]
    return whole


def _has_both_passes(region: Program) -> bool:
    phases = {PHASES[number] for number in np.unique(phases_of(region)).tolist()}
    loops = (one for one in region.operations if one.name == SCAN and one.regions)
    return {FORWARD, BACKWARD} <= phases or any(_has_both_passes(loop.regions[0]) for loop in loops)


def _replace_body(whole: Program, loop: Operation, keep: Keep) -> None:
    """Changes a loop each trip of which has both passes: the user's own microbatches."""
    body, counts = _region(loop.regions[0], keep), (loop.num_consts, loop.num_carry)
    place = next(number for number, one in enumerate(whole.operations) if one.outputs == loop.outputs)
    whole.operations[place] = with_regions(whole, loop, [body], loop.inputs, counts, loop.outputs)


def _recompute_loops(whole: Program, keep: Keep) -> None:
    """Changes the loops over layers; those within a layer are computed again with it."""
    done: set[int] = set()
    while True:
        layers = layers_of(whole)
        waiting = (
            (first, second)
            for first, second in loop_pairs(whole, layers.backward)
            if layers.layer[first] == OUTSIDE and whole.operations[second].outputs[0] not in done
        )
        pair = next(waiting, None)
        if pair is None:
            return
        first, second = (whole.operations[number] for number in pair)
        done.add(second.outputs[0])
        if any(map(is_heavy, first.regions[0].walk())):
            recompute_trips(whole, *pair, keep)
        elif any(one.is_checkpoint for loop in (first, second) for one in loop.regions[0].walk()):
            recompute_trips(whole, *pair, lambda region, *_: all_kept(region))
