"""Carries out the instructions of a pipeline's stages that have devices of this process.

All processes know all instructions, in one order, and each carries out those of its own stages; a transfer is carried
out by the processes at both ends. So everyone sends and receives in the same order, and nobody waits for ever. What
another process sends is asked for in that order, ahead of its use, and waited for where it is used.

All arrays of a step have a slot in one list. Before the first step every instruction is bound to the slots that it
reads and fills, and to the slots that nobody reads after it; a step is one walk over the bound instructions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from meshwright.plans.operations import OpPlan
from meshwright.plans.plan import PlanData
from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part import Key
from meshwright.runtime.stages.bound import WAIT, Bound, Move, wait
from meshwright.runtime.stages.compiling import compile_programs
from meshwright.runtime.stages.cutting.assignment import Assignment
from meshwright.runtime.stages.cutting.packs import Packs
from meshwright.runtime.stages.cutting.stage_programs import PREPARE, StageProgram, cut_stages, result_owners
from meshwright.runtime.stages.lowering.layout import StageDevices, everywhere
from meshwright.runtime.stages.lowering.lowered import Lowered
from meshwright.runtime.stages.lowering.stage_lowering import StageLowering
from meshwright.runtime.stages.placing import absent, batch_placer, from_host, is_here, joined, number_placer, placer
from meshwright.runtime.transfer.choice import agree
from meshwright.schedules import table
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.schedules.instructions import (
    EXCHANGE,
    PARAMETERS,
    RUN,
    SEND,
    UPDATE,
    Instruction,
    Link,
    instruct,
)
from meshwright.schedules.order import proven_order


class Engine:
    """A pipelined step on some devices.

    Args:
        plan: The plan.
        assignment: Where the step's operations belong.
        steps: The step cut into parts, for each stage.
        devices: The devices of each stage.
        ops: How each stage's replicas split their operations.
        is_whole: Whether to bind the instructions of all stages, to examine them, rather than this process's own.

    Attributes:
        programs: The programs of the stages.
        lowered: The same as JAX has them.
        instructions: The instructions of each stage.
        bound: What this process carries out in a step, in order.
        transport: How stages of several processes send each other arrays, and why; empty until it is compiled.
    """

    def __init__(
        self,
        plan: PlanData,
        assignment: Assignment,
        steps: Sequence[CutStep],
        devices: Sequence[StageDevices],
        ops: Sequence[dict[int, OpPlan]],
        is_whole: bool = False,
    ):
        assert plan.pipeline is not None
        self.devices = devices
        self.programs = cut_stages(plan, assignment, steps, ops)
        self.packs = Packs.of(self.programs)
        self.stages = [StageLowering(self.programs, s, own, plan, ops[s]) for s, own in enumerate(devices)]
        self.lowered: dict[tuple[str, int, int], Lowered] = {}
        self._lower()
        pipeline = plan.pipeline
        self.num_microbatches = pipeline.num_microbatches
        rows = table(pipeline.schedule, len(devices), pipeline.num_microbatches, pipeline.interleave)
        rows = tuple(
            tuple(step for step in row if self._has(step.work, step.chunk * len(devices) + s))
            for s, row in enumerate(rows)
        )
        owners = self.programs.assignment.argument
        shares = sorted({(owners[leaf], s) for leaf, stages in self.programs.copies.items() for s in stages})
        self.instructions = instruct(rows, self.programs.links, shares, self.programs.rounds.num_rounds)
        self.everywhere = everywhere(devices)
        self._is_whole = is_whole
        self.transport = ""
        self._here = [is_whole or is_here(own.everywhere) for own in devices]
        self._slots: dict[Any, int] = {}
        self._moves: dict[Any, Move] = {}
        self._compiled: dict[tuple[str, int, int], Any] = {}
        self.bound = self._bind()

    def _has(self, work: str, virtual: int) -> bool:
        program = self.programs.passes.get((work, virtual))
        return program is not None and (work == FORWARD or bool(program.pieces))

    def _lower(self) -> None:
        """Lowers all programs, in the order in which values flow."""
        for stage, program in self.programs.prepare.items():
            self.lowered[program.work, stage, program.place] = self.stages[stage].prepare(program)
        last = self.programs.assignment.num_chunks - 1
        order = [(FORWARD, v) for v in range(last + 1)]
        order += [(work, v) for v in range(last, -1, -1) for work in (BACKWARD, WEIGHTS)]
        for where in order:
            if where in self.programs.passes:
                self._take_specs(where)
                one = self.programs.passes[where]
                self.lowered[one.work, one.stage, one.place] = self.stages[one.stage].one_pass(one)
        for (stage, turn), program in sorted(self.programs.updates.items()):
            self.lowered[program.work, stage, turn] = self.stages[stage].update(program, self.packs)

    def _take_specs(self, where: tuple[str, int]) -> None:
        """Values that a pass receives are split inside its replicas as in those of the sender, if that is possible."""
        for link, keys in self.programs.sent.items():
            if link.target == where:
                source, target = (self.stages[v % len(self.stages)] for _, v in link)
                for key in keys:
                    spec = source.specs.get(key)
                    target.specs.setdefault(key, spec if _fits(spec, source, target) else None)

    def compile(self, say: Callable[[str], None] | None = None) -> None:
        """Compiles all programs of this process's stages, and lets the instructions run them.

        With several processes all of them call this: they choose how they send each other arrays.
        """
        everyone = [device for own in self.devices for device in own.mesh.devices.flat]
        if len({device.process_index for device in everyone}) > 1:
            self.transport = str(agree(everyone))
            if say is not None:
                say(f"stages send each other arrays by {self.transport}")
        compiled = self.compiled(say)
        runs = {id(self.lowered[key]): in_turn(one, self.lowered[key].devices) for key, one in compiled.items()}
        self.bound = [one if one.program is None else replace(one, run=runs[id(one.program)]) for one in self.bound]
        for move in self._moves.values():
            move.prepare()

    def compiled(
        self, say: Callable[[str], None] | None = None, options: Mapping[str, Any] | None = None
    ) -> dict[tuple[str, int, int], Any]:
        """The compiled programs of this process's stages, by kind of work, stage and place."""
        if self._compiled and not options:
            return self._compiled
        mine = {key: one for key, one in self.lowered.items() if self._here[one.program.stage]}
        self._compiled = dict(zip(mine, compile_programs(list(mine.values()), say, options), strict=True))
        return self._compiled

    @property
    def slots(self) -> Mapping[Any, int]:
        """The slot of each array, by its name: its kind, the stage, and so on."""
        return self._slots

    def slot(self, *name: Any) -> int:
        """The slot of an array: by the kind of array, the stage and so on."""
        return self._slots.setdefault(name, len(self._slots))

    def run(self, leaves: Sequence[Any]) -> list[Any]:
        """The results of a step, given the arguments' leaves in their places: see `places`."""
        arrays: list[Any] = [None] * len(self._slots)
        for slot, index in self._given:
            arrays[slot] = index
        for slot, place, leaf in self._entering:
            arrays[slot] = place(leaves[leaf])
        for one in self.bound:
            made = one.run(*[arrays[i] for i in one.reads])
            for slot, array in zip(one.fills, made, strict=True):
                arrays[slot] = array
            for slot in one.drops:
                arrays[slot] = None
        return [take(leaves, arrays) for take, _ in self._leaving]

    def _bind(self) -> list[Bound]:
        found: list[Bound] = []
        for program in self.programs.passes.values():
            if program.totals and self._here[program.stage]:
                slots = [self.slot("total", program.stage, v) for v in program.totals]
                zeros = self.stages[program.stage].zeros(program)
                found.append(Bound(zeros, (), slots, f"zeros of {program}", "zeros", program.stage))
        ready: set[int] = set()
        for stage, one in proven_order(self.instructions):
            if one.do == RUN and stage not in ready:  # shared parameters have come
                ready.add(stage)
                if stage in self.programs.prepare and self._here[stage]:
                    found.append(self._program(PREPARE, stage, stage))
            found += self._instruction(stage, one)
        found = list(_waiting_late(found))
        self._entering = list(self._leaves())
        self._leaving = [self._result(place, v) for place, v in enumerate(self.programs.steps[0].program.outputs)]
        last: dict[int, int] = {}
        for number, bound in enumerate(found):
            last.update(dict.fromkeys((*bound.reads, *bound.fills), number))
        kept = {slot for _, slots in self._leaving for slot in slots}
        entering = {slot for slot, *_ in self._entering} | {slot for slot, _ in self._numbers}
        assert kept <= entering.union(*(bound.fills for bound in found)), "no stage computes a result of the step"
        drops: dict[int, list[int]] = {}
        for slot, number in last.items():
            if slot not in kept:
                drops.setdefault(number, []).append(slot)
        return [replace(bound, drops=drops.get(number, ())) for number, bound in enumerate(found)]

    @cached_property
    def _given(self) -> list[tuple[int, Any]]:
        """The slots of the microbatches' numbers, with the numbers on the devices."""
        return [(slot, from_host(np.int32(at), self.devices[stage].everywhere)) for slot, (stage, at) in self._numbers]

    @property
    def _numbers(self) -> list[tuple[int, tuple[int, int]]]:
        """The slots of the microbatches' numbers, with the stage and the number; the devices may only be described."""
        return [(slot, name[1:]) for name, slot in self._slots.items() if name[0] == "index"]

    def _leaves(self) -> Iterator[tuple[int, Callable[[Any], Any], int]]:
        """The slots of arguments, each with how it is placed and the number of the leaf.

        Rows of a batch may come from other processes, so all processes place the batches of all stages, in one order.
        """
        programs = self.programs
        for name, slot in list(self._slots.items()):
            if name[0] == "leaf" and self._here[name[1]]:
                _, stage, leaf = name
                if programs.is_everywhere(leaf):
                    yield slot, number_placer(self.devices[stage].everywhere), leaf
                elif programs.assignment.argument[leaf] == stage:
                    yield slot, placer(self.stages[stage].leaf(leaf)), leaf
        every = (*programs.prepare.values(), *programs.passes.values(), *programs.updates.values())
        inputs = programs.steps[0].program.inputs
        read = {(p.stage, v) for p in every for v, _ in p.inputs if v in inputs and programs.is_batch(v)}
        for stage, leaf in sorted(read):
            place = batch_placer(self.stages[stage].batch(leaf), self.num_microbatches)
            yield self.slot("batch", stage, leaf), place, leaf

    def _instruction(self, stage: int, one: Instruction) -> Iterator[Bound]:
        if one.do == RUN and self._here[stage]:
            yield self._program(one.work, stage, one.chunk, one.microbatch)
        elif one.do == UPDATE and (stage, one.round) in self.programs.updates and self._here[stage]:
            yield self._program(UPDATE, stage, one.round)
        elif one.do == EXCHANGE:
            yield from self._exchange(stage, one.round)
        elif one.do == SEND and one.work == PARAMETERS:
            for leaf, stages in self.programs.copies.items():
                if self.programs.assignment.argument[leaf] == stage and one.peer in stages:
                    places = [self.stages[s].leaf(leaf) for s in (stage, one.peer)]
                    ends = ("leaf", stage, leaf), ("leaf", one.peer, leaf)
                    yield from self._move(PARAMETERS, *ends, self._type(leaf), *places)
        elif one.do == SEND:
            for key in self.programs.sent[Link((one.work, one.chunk), one.target)]:
                here, there = (("value", s, key, one.microbatch) for s in (stage, one.peer))
                places = [self.stages[s].value(key) for s in (stage, one.peer)]
                yield from self._move(one.work, here, there, self.stages[stage].value_type(key), *places)

    def _exchange(self, stage: int, turn: int) -> Iterator[Bound]:
        """What a stage receives after a round of the update."""
        for pack, readers in self.packs.readers.items():
            if stage in readers and pack[1] == turn:
                kind = jax.ShapeDtypeStruct((len(self.packs.values[pack]),), pack[2])
                places = [self.devices[s].everywhere for s in (pack[0], stage)]
                yield from self._move(EXCHANGE, ("pack", pack[0], pack), ("pack", stage, pack), kind, *places)
        for value, source, target in self.programs.rounds.sent.get(turn, ()):
            if target == stage and value not in self.packs.place:
                places = [self.stages[s].update_place(value) for s in (source, stage)]
                ends = self._update_name(source, value), ("update", stage, value)
                yield from self._move(EXCHANGE, *ends, self._type(value), *places)

    def _type(self, value: int) -> Any:
        return self.programs.steps[0].program.types[value]

    def _update_name(self, stage: int, value: int) -> tuple[Any, ...]:
        if value in self.programs.steps[0].program.inputs:
            return ("leaf", stage, value)
        return ("update", stage, value)

    def _move(
        self, work: str, source: Any, target: Any, kind: Any, place: NamedSharding, goal: NamedSharding
    ) -> Iterator[Bound]:
        """The transfer of an array from stage to stage, if this process has devices of one of them."""
        if not (self._here[source[1]] or self._here[target[1]]):
            return
        key = (tuple(kind.shape), str(kind.dtype), place, goal)
        move = self._moves.setdefault(key, Move(kind, place, goal))
        reads = [self.slot(*source)] if self._here[source[1]] else []
        name, about = f"{source} to stage {target[1]}", (work, target[1])
        if self._is_whole or (place.is_fully_addressable and goal.is_fully_addressable):
            yield Bound(move, reads, [self.slot(*target)], name, *about, source=source[1])
            return
        arrival = self.slot("arrival", *target)
        yield Bound(move.post, reads, [arrival], name, *about, source=source[1])
        if self._here[target[1]]:
            yield Bound(wait, [arrival], [self.slot(*target)], f"wait for {name}", WAIT, target[1], source=source[1])

    def _program(self, work: str, stage: int, place: int, microbatch: int = -1) -> Bound:
        lowered = self.lowered[work, stage, place]
        program = lowered.program
        if work == UPDATE:
            reads = [slot for key in self.packs.single(program) for slot in self._update_slots(program, key[0])]
            reads += [self.slot("pack", stage, pack) for pack in self.packs.read(program)]
            fills = [self.slot("update", stage, v) for v, _ in program.outputs]
            fills += [self.slot("pack", stage, pack) for pack in self.packs.sent(stage, place)]
            return Bound(lowered.run, reads, fills, str(program), work, stage, lowered)
        reads = [self._input_slot(stage, key, microbatch) for key in program.inputs]
        if microbatch < 0:
            fills = [self.slot("prepared", stage, key) for key in program.outputs]
            return Bound(lowered.run, reads, fills, str(program), work, stage, lowered)
        totals = [self.slot("total", stage, v) for v in program.totals]
        fills = [self.slot("value", stage, key, microbatch) for key in program.outputs]
        index = self.slot("index", stage, microbatch)
        name = f"{program}, microbatch {microbatch}"
        return Bound(lowered.run, [index, *reads, *totals], [*fills, *totals], name, work, stage, lowered)

    def _input_slot(self, stage: int, key: Key, microbatch: int) -> int:
        value, _ = key
        prepared = self.programs.prepare.get(stage)
        if prepared is not None and key in prepared.outputs:
            return self.slot("prepared", stage, key)
        if value in self.programs.steps[stage].program.inputs:
            return self.slot("batch" if self.programs.is_batch(value) else "leaf", stage, value)
        return self.slot("value", stage, key, microbatch)

    def _update_slots(self, program: StageProgram, value: int) -> list[int]:
        stage, inputs = program.stage, self.programs.steps[program.stage].program.inputs
        if value in program.totals and value in self.stages[stage].totals:
            return [self.slot("total", stage, value)]
        if value in program.totals:
            return [self.slot("value", stage, (value, None), i) for i in range(self.num_microbatches)]
        if value in inputs and self.programs.is_batch(value):
            return [self.slot("batch", stage, value)]
        if value in inputs and (
            self.programs.is_everywhere(value) or self.programs.assignment.argument[value] == stage
        ):
            return [self.slot("leaf", stage, value)]
        return [self.slot("update", stage, value)]

    def _result(self, place: int, value: int) -> tuple[Callable[[Sequence[Any], list[Any]], Any], list[int]]:
        """How a result is taken from the arguments' leaves and the slots, and the slots that it needs."""
        program = self.programs.steps[0].program
        if value in program.inputs:
            return lambda leaves, arrays: leaves[value], []
        if value in program.constants:
            constant = jnp.asarray(program.constants[value])
            return lambda leaves, arrays: constant, []
        owners = result_owners(self.programs, place, value)
        mine = [stage for stage in owners if self._here[stage]]
        slots = [self.slot("update", stage, value) for stage in mine]
        if len(owners) > 1:
            return lambda leaves, arrays: joined([arrays[slot] for slot in slots], self.everywhere), slots
        if mine:
            return lambda leaves, arrays: arrays[slots[0]], slots
        kind, sharding = self._type(value), self.stages[owners[0]].update_place(value)
        return lambda leaves, arrays: absent(kind, sharding), []


def _waiting_late(found: Sequence[Bound]) -> Iterator[Bound]:
    """The same, with each wait right before what reads it."""
    waits: dict[int, Bound] = {}
    for one in found:
        if one.work == WAIT:
            waits[one.fills[0]] = one
            continue
        yield from (waits.pop(slot) for slot in one.reads if slot in waits)
        yield one
    yield from waits.values()


def _fits(spec: Any, source: StageLowering, target: StageLowering) -> bool:
    """Whether a stage's replicas can split a value as another stage's do."""
    return spec is not None and source.devices.mesh.shape == target.devices.mesh.shape
