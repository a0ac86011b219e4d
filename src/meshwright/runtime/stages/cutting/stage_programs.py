"""Cuts a step into the programs of its stages: what each prepares, its passes over a microbatch, and its update.

The step is cut into parts of the batch first (`runtime.microbatches`); a part is what one replica of a stage does of
one microbatch. Each instruction of the part's program belongs to a pass of one virtual stage, and a pass becomes one
program: its inputs are arguments, values that do not depend on the batch (which the stage prepares once a step), rows
of the batch, and values that other passes computed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import jax

from meshwright import jax_compat
from meshwright.plans.operations import OpPlan
from meshwright.plans.plan import PlanData
from meshwright.program.program import Program
from meshwright.runtime.microbatches.batch_parts import ALIKE
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part import Key, Piece
from meshwright.runtime.stages.cutting.assignment import Assignment, Pass, place_parts
from meshwright.runtime.stages.cutting.free_pieces import free_pieces, fused_pieces
from meshwright.runtime.stages.cutting.recomputation import kept_values
from meshwright.runtime.stages.cutting.update_rounds import Rounds, UpdateRounds
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.schedules.instructions import Link

PREPARE, UPDATE = "prepare", "update"


@dataclass(frozen=True)
class StageProgram:
    """One program of a stage.

    Attributes:
        work: ``prepare``, ``forward``, ``backward``, ``weights`` or ``update``.
        stage: The stage.
        place: The virtual stage of a pass, or the round of an update.
        pieces: What it runs, in order.
        inputs: The values that it reads.
        outputs: The values that other programs read.
        totals: Values that a pass adds to the totals over all microbatches, or whose totals an update reads first.
    """

    work: str
    stage: int
    place: int
    pieces: tuple[Piece, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    totals: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.work} {self.place}" if self.work != PREPARE else f"{self.work} {self.stage}"


@dataclass
class StagePrograms:
    """All programs of a pipelined step.

    Attributes:
        steps: The step cut into parts, for each stage: a part is one replica's share of a microbatch.
        assignment: Where its operations belong.
        prepare: By stage.
        passes: By kind of work and virtual stage.
        updates: By stage and round.
        rounds: The rounds of the update.
        links: Which passes send values to which others, of other stages.
        sent: For each link, the values.
        copies: For each large argument that other stages than its owner read, these stages.
        home: The stage of each total and stacked value.
    """

    steps: Sequence[CutStep]
    assignment: Assignment
    prepare: dict[int, StageProgram] = field(default_factory=dict)
    passes: dict[Pass, StageProgram] = field(default_factory=dict)
    updates: dict[tuple[int, int], StageProgram] = field(default_factory=dict)
    rounds: Rounds = field(default_factory=Rounds)
    links: tuple[Link, ...] = ()
    sent: dict[Link, tuple[Key, ...]] = field(default_factory=dict)
    copies: dict[int, tuple[int, ...]] = field(default_factory=dict)
    home: dict[int, int] = field(default_factory=dict)

    @property
    def num_stages(self) -> int:
        return self.assignment.num_stages

    def is_everywhere(self, leaf: int) -> bool:
        """Whether all stages have an argument's leaf: a single number, such as a count of steps, that is no layer's."""
        step = self.steps[0]
        is_single = prod(step.program.types[leaf].shape) == 1 and leaf not in self.assignment.pieces
        return is_single and step.inputs[leaf] == ALIKE

    def is_batch(self, leaf: int) -> bool:
        """Whether an argument's leaf is a stack of examples."""
        return self.steps[0].inputs[leaf] != ALIKE


def cut_stages(
    plan: PlanData,
    assignment: Assignment,
    steps: Sequence[CutStep],
    ops: Sequence[Mapping[int, OpPlan]],
) -> StagePrograms:
    """The programs of a step.

    Args:
        plan: A pipelined plan.
        assignment: Where its operations and arguments belong.
        steps: The step cut into parts, for each stage.
        ops: How each stage's replicas split their operations, by number.
    """
    programs = StagePrograms(steps, assignment)
    _Passes(programs, plan, ops).add()
    _add_updates(programs)
    _add_prepared(programs)
    _note_copies(programs)
    return programs


class _Passes:
    """Makes the passes over a microbatch."""

    def __init__(self, programs: StagePrograms, plan: PlanData, ops: Sequence[Mapping[int, OpPlan]]):
        assert plan.pipeline is not None
        self.programs, self.checkpoint, self.ops = programs, plan.pipeline.checkpoint, ops
        self.apart = plan.pipeline.schedule == "zb-h1"

    def add(self) -> None:
        programs, count = self.programs, self.programs.num_stages
        pieces: dict[Pass, list[Piece]] = {}
        for stage, step in enumerate(programs.steps):
            places = place_parts(programs.assignment, step.program, step.part.pieces)
            free = free_pieces(step)
            for one, where in zip(step.part.pieces, places, strict=True):
                if where[1] % count == stage and not free.keys() & one.outs:
                    pieces.setdefault(where, []).append(one)
        for virtual in range(programs.assignment.num_chunks):
            pieces.setdefault((FORWARD, virtual), [])
            if pieces.get((BACKWARD, virtual)) and self.apart:
                self._split(pieces, virtual)
        for virtual in range(programs.assignment.num_chunks):
            self._recompute(pieces, virtual)
        for where in sorted(pieces, key=_turn):
            self._add_free(pieces, where)
        self._connect(pieces)

    def _add_free(self, pieces: dict[Pass, list[Piece]], where: Pass) -> None:
        """Lets a pass compute for itself what needs neither the batch nor another pass, and XLA can fuse.

        So no random bits are sent, and nothing is broadcast for all passes at once.

        A backward pass takes random numbers from its forward pass, as they take longer to draw again than to keep.
        """
        step = self.programs.steps[where[1] % self.programs.num_stages]
        free = fused_pieces(step, self.programs.assignment.is_held) | free_pieces(step)
        ahead = {key for one in pieces[FORWARD, where[1]] for key in one.outs} if where[0] != FORWARD else set()
        wanted, own = [key for one in pieces[where] for key in one.ins], dict[int, Piece]()
        while wanted:
            key = wanted.pop()
            if key in free and not (free[key].is_drawn and key in ahead):
                number, one = free[key].number, free[key].piece
                if number not in own:
                    own[number] = one
                    wanted += one.ins
        pieces[where] = [*(own[number] for number in sorted(own)), *pieces[where]]

    def _split(self, pieces: dict[Pass, list[Piece]], virtual: int) -> None:
        """Moves what no other pass waits for, the weights' gradients, to a pass of its own."""
        own = pieces[BACKWARD, virtual]
        others = {key for where, some in pieces.items() if where[1] != virtual for one in some for key in one.ins}
        wanted, first = set(others), []
        for one in reversed(own):
            if not wanted.isdisjoint(one.outs):
                first.append(one)
                wanted.update(one.ins)
        kept = set(map(id, first))
        pieces[BACKWARD, virtual] = first[::-1]
        pieces[WEIGHTS, virtual] = [one for one in own if id(one) not in kept]

    def _recompute(self, pieces: dict[Pass, list[Piece]], virtual: int) -> None:
        """Lets the backward pass compute again what the forward pass does not keep for it."""
        ahead = pieces[FORWARD, virtual]
        later = [where for where in ((BACKWARD, virtual), (WEIGHTS, virtual)) if where in pieces]
        stage = virtual % self.programs.num_stages
        step, ops = self.programs.steps[stage], self.ops[stage]
        kept = kept_values(ahead, self.checkpoint, step, self.programs.assignment, ops)
        if self.checkpoint == "none":  # what runs again is fused into its readers: every pass has its own
            for where in later:
                pieces[where] = [*_again(ahead, pieces[where], kept), *pieces[where]]
        elif later:
            readers = [one for where in later for one in pieces[where]]
            pieces[later[0]] = [*_again(ahead, readers, kept), *pieces[later[0]]]

    def _connect(self, pieces: dict[Pass, list[Piece]]) -> None:
        """Finds inputs, outputs and links."""
        programs, count = self.programs, self.programs.num_stages
        order = sorted(pieces, key=lambda where: where[0] == FORWARD)  # the first to compute a value comes last
        made = {key: where for where in order for one in pieces[where] for key in one.outs}
        again = {where: {key for one in some for key in one.outs} for where, some in pieces.items()}
        inputs = {where: _read(some, again[where]) for where, some in pieces.items()}

        def source(key: Key, reader: Pass) -> Pass | None:
            """The pass that a pass has a value from; gradients of weights take what was recomputed."""
            before = (BACKWARD, reader[1])
            return before if reader[0] == WEIGHTS and key in again[before] else made.get(key)

        after = {v for step in programs.steps for v in step.stacked}
        for where, some in pieces.items():
            stage = where[1] % count
            step = programs.steps[stage]
            mine = [key for key in again[where] if made[key] == where]
            outside = {key for other, read in inputs.items() for key in read if source(key, other) == where != other}
            ready = [key for key in mine if key[1] is None and key[0] in after]
            outputs = sorted({*outside, *ready}, key=_number)
            totals = sorted(v for v, d in mine if d is None and v in step.contributions)
            inner = [key for key in inputs[where] if key[0] not in step.program.constants]
            programs.passes[where] = StageProgram(
                where[0], stage, where[1], tuple(some), tuple(inner), tuple(outputs), tuple(totals)
            )
            programs.home.update((v, stage) for v in (*totals, *(v for v, d in outputs if v in after)))
        first: dict[tuple[Key, int], Link] = {}  # a stage receives a value once, for the first pass that reads it
        for where in sorted(inputs, key=_turn):
            for key in inputs[where]:
                origin = source(key, where)
                if origin is not None and origin[1] % count != where[1] % count:
                    first.setdefault((key, where[1] % count), Link(origin, where))
        sent: dict[Link, list[Key]] = {}
        for (key, _), link in first.items():
            sent.setdefault(link, []).append(key)
        programs.sent = {link: tuple(sorted(keys, key=_number)) for link, keys in sorted(sent.items())}
        programs.links = tuple(programs.sent)


def _again(ahead: Sequence[Piece], readers: Iterable[Piece], kept: set[Key]) -> list[Piece]:
    """What of a forward pass must run again for some readers, given what it keeps."""
    wanted = {key for one in readers for key in one.ins}
    found: list[Piece] = []
    for one in reversed(ahead):
        if any(key in wanted and key not in kept for key in one.outs):
            found.append(one)
            wanted.update(one.ins)
    return found[::-1]


def _number(key: Key) -> tuple[int, int]:
    """The place of a value among others: equal stages have equal values in equal places, so that one is compiled."""
    value, dim = key
    return value, -1 if dim is None else dim


def _turn(where: Pass) -> tuple[int, int]:
    """The place of a pass in the order in which the passes over one microbatch run."""
    work, virtual = where
    return (0, virtual) if work == FORWARD else (1 + (work == WEIGHTS), -virtual)


def _read(pieces: Iterable[Piece], made: set[Key]) -> list[Key]:
    """What some pieces read and do not compute themselves."""
    return sorted({key for one in pieces for key in one.ins if key not in made}, key=_number)


def _add_updates(programs: StagePrograms) -> None:
    """Makes the rounds of the update."""
    step, count = programs.steps[0], programs.num_stages
    status = step.analysis.status
    program = _outside_of_parts(step)
    wanted: dict[int, list[int]] = {stage: [] for stage in range(count)}
    for place, value in enumerate(program.outputs):
        for stage in result_owners(programs, place, value):
            wanted[stage].append(value)
    parts = {*step.contributions, *step.stacked}
    once = [
        n
        for n in program.ancestors({v for values in wanted.values() for v in values})
        if not any(o in parts for o in program.operations[n].outputs)
        and not isinstance(status[next(iter(program.operations[n].outputs), 0)], int)
    ]
    large = [i for i in program.inputs if not programs.is_batch(i) and not programs.is_everywhere(i)]
    home = {i: programs.assignment.argument[i] for i in large} | programs.home
    found = UpdateRounds(program, once, home, wanted).found
    programs.rounds = found
    for stage in range(count):
        outputs = {*wanted[stage], *(v for sent in found.sent.values() for v, at, _ in sent if at == stage)}
        _add_rounds(programs, program, stage, outputs)


def _outside_of_parts(step: CutStep) -> Program:
    """A step's operations of which those that run on parts are cut down to the results that are alike for all parts: a
    counter that a loop carries beside the examples."""
    found = replace(step.program, operations=[])
    for unit in step.program.operations:
        used = [step.analysis.status[o] == ALIKE for o in unit.outputs]
        found.operations.append(unit.trimmed(used) if any(used) and not all(used) else unit)
    return found


def result_owners(programs: StagePrograms, place: int, value: int) -> list[int]:
    """The stages on which a result is wanted."""
    count, leaf = programs.num_stages, programs.assignment.state.get(place)
    if value in programs.steps[0].program.constants:
        return [count - 1]
    single = prod(programs.steps[0].program.types[value].shape) == 1 and leaf not in programs.assignment.pieces
    if (leaf is not None and programs.is_everywhere(leaf)) or (single and jax.process_count() > 1):
        return list(range(count))  # so that every process can read it
    if leaf is not None and not programs.is_batch(leaf):
        return [programs.assignment.argument[leaf]]
    return [programs.home.get(value, count - 1)]


def is_packed(program: Program, value: int) -> bool:
    """Whether a value is sent along with others between two rounds of the update; arguments are sent as they are."""
    kind = program.types[value]
    return prod(kind.shape) == 1 and not jax_compat.is_key_dtype(kind.dtype) and value not in program.inputs


def _add_rounds(programs: StagePrograms, program: Program, stage: int, outputs: set[int]) -> None:
    """The update programs of one stage."""
    found = programs.rounds
    by_round = {
        turn: [Piece.whole(program.operations[n]) for n in numbers]
        for (s, turn), numbers in found.units.items()
        if s == stage
    }
    reads = {turn: {key for one in pieces for key in one.ins} for turn, pieces in by_round.items()}
    own = {v for v, home in programs.home.items() if home == stage}
    packed = {v for sent in found.sent.values() for v, _, _ in sent if is_packed(program, v)}
    first = {v: 0 for v in own if v in outputs}  # the round in which totals over all microbatches are added up
    for turn in sorted(reads):
        for v in own:
            if (v, None) in reads[turn]:
                first.setdefault(v, turn)
    for turn in range(found.num_rounds):
        pieces = tuple(by_round.get(turn, ()))
        made = {key for one in pieces for key in one.outs}
        later = {key for other, read in reads.items() if other > turn for key in read}
        sums = {(v, None) for v, when in first.items() if when == turn}
        ready = sums | {(v, None) for v, _, to in found.sent.get(turn - 1, ()) if to == stage and v in packed & outputs}
        inputs = sorted({*(key for key in _read(pieces, made) if key[0] not in program.constants), *ready}, key=_number)
        out = {key for key in made | ready if key[0] in outputs or key in later}
        if pieces or out:
            outs, totals = tuple(sorted(out, key=_number)), tuple(sorted(v for v, _ in sums))
            programs.updates[stage, turn] = StageProgram(UPDATE, stage, turn, pieces, tuple(inputs), outs, totals)


def _add_prepared(programs: StagePrograms) -> None:
    """Makes the programs of what stages compute once a step for all their passes."""
    passed = {key for p in programs.passes.values() for key in p.outputs}
    for stage in range(programs.num_stages):
        step = programs.steps[stage]
        mine = [p for p in programs.passes.values() if p.stage == stage]
        read = {key for p in mine for key in p.inputs}
        alike = {(v, None) for v, status in step.analysis.status.items() if status == ALIKE}  # also for fused pieces
        shared = {key for key in read & alike - passed if key[0] not in step.program.inputs}
        sliced = {key for key in step.sliced if key in read and not _is_batch_rows(step, key)}
        values = {v for v, _ in (*shared, *sliced)}
        pieces = tuple(map(Piece.whole, step.program.needed(values)))
        made = {key for one in pieces for key in one.outs}
        inputs = {key for key in _read(pieces, made) if key[0] not in step.program.constants}
        inputs |= {(v, None) for v in values if v in step.program.inputs}
        if shared or sliced:
            outputs = tuple(sorted({*shared, *sliced}, key=_number))
            programs.prepare[stage] = StageProgram(
                PREPARE, stage, stage, pieces, tuple(sorted(inputs, key=_number)), outputs
            )


def _is_batch_rows(step: CutStep, key: Key) -> bool:
    """Whether a value is an argument that is cut along its first dim, as it is given."""
    return key[0] in step.program.inputs and step.inputs[key[0]] != ALIKE


def _note_copies(programs: StagePrograms) -> None:
    """Notes which stages read large arguments of other stages in their passes."""
    found: dict[int, set[int]] = {}
    for program in (*programs.prepare.values(), *programs.passes.values()):
        step = programs.steps[program.stage]
        for value, dim in program.inputs:
            if dim is None and value in step.program.inputs:
                owner = programs.assignment.argument[value]
                if not programs.is_batch(value) and not programs.is_everywhere(value) and owner != program.stage:
                    found.setdefault(value, set()).add(program.stage)
    programs.copies = {leaf: tuple(sorted(stages)) for leaf, stages in sorted(found.items())}
