"""Bytes that a device of each stage of a pipeline holds while the stages' instructions are carried out."""

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from meshwright import jax_compat
from meshwright.runtime.stages.bound import Move
from meshwright.runtime.stages.engine import Engine
from meshwright.runtime.stages.lowering.lowered import Lowered

Key = tuple[str, int, int]  # of a program: its kind of work, stage and place


def key_of(lowered: Lowered) -> Key:
    """The key of a program."""
    return lowered.program.work, lowered.program.stage, lowered.program.place


class Peak(NamedTuple):
    """The most bytes of one device of a stage.

    Attributes:
        total: Its arrays, with the results and the temporary memory of the program that runs.
        arrays: Its arrays between two instructions, which do not depend on how XLA compiles the programs.
    """

    total: int
    arrays: int


def peak_bytes(engine: Engine, compiled: Mapping[Key, Any]) -> list[Peak]:
    """The most bytes of each stage.

    Args:
        engine: The instructions of all stages.
        compiled: The compiled programs.
    """
    sizes = _slot_bytes(engine)
    stage_of = {slot: name[1] for name, slot in engine.slots.items()}
    filled = {slot for one in engine.bound for slot in one.fills}
    held: list[set[int]] = [set() for _ in engine.devices]
    for slot in sizes.keys() - filled:
        held[stage_of[slot]].add(slot)
    # The caller keeps arguments unless they are donated.
    kept = {slot for name, slot in engine.slots.items() if name[0] == "leaf" and slot not in filled}
    peaks = [Peak(0, 0)] * len(held)
    for one in engine.bound:
        own, total = held[one.stage], 0
        if one.program is not None:
            memory = compiled[key_of(one.program)].memory_analysis()
            more = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
            total = sum(map(sizes.__getitem__, own)) + more
            own -= {one.reads[i] for i in one.program.donated}
        own |= {*one.fills}
        arrays, before = sum(map(sizes.__getitem__, own)), peaks[one.stage]
        peaks[one.stage] = Peak(max(before.total, total, arrays), max(before.arrays, arrays))
        for slot in one.drops:
            if slot not in kept:
                held[stage_of[slot]].discard(slot)
    return peaks


def _slot_bytes(engine: Engine) -> dict[int, int]:
    """The bytes of each slot's array on one device."""
    found: dict[int, int] = {}
    for one in engine.bound:
        if isinstance(one.run, Move):
            found[one.fills[0]] = _bytes(one.run.type, one.run.target)
        elif one.program is not None:
            program = one.program
            kinds = [*zip(program.types, program.places, strict=True)]
            kinds += zip(program.results, program.shardings, strict=True)
            for slot, kind in zip((*one.reads, *one.fills), kinds, strict=True):
                found[slot] = _bytes(*kind)
    return found


def _bytes(kind: Any, sharding: Any) -> int:
    """Bytes of an array on one device."""
    return prod(sharding.shard_shape(tuple(kind.shape))) * jax_compat.itemsize(kind.dtype)
