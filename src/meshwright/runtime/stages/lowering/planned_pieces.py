"""Runs the pieces of a pass, each operation split inside a replica as the plan says."""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

import jax

from meshwright import jax_compat
from meshwright.fallback import is_strict
from meshwright.parallelism.subject.subject import spread_of
from meshwright.plans.operations import Collective, OpPlan
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Stage
from meshwright.plans.tensor import Spec
from meshwright.program.matching import with_ids_of
from meshwright.program.parts import part_of
from meshwright.program.program import UNPLANNED, Operation, Program
from meshwright.runtime.microbatches.microbatches import CutStep
from meshwright.runtime.microbatches.one_part import OnePart
from meshwright.runtime.microbatches.part_program import Env, Instruction, Key, Whole
from meshwright.runtime.program.backend import OnDevices
from meshwright.runtime.program.contributions import Waiting
from meshwright.runtime.program.evaluate import Entry, Evaluator
from meshwright.runtime.stages.cutting.stage_programs import StageProgram
from meshwright.runtime.stages.lowering.layout import StageDevices


@dataclass(frozen=True)
class _Split:
    """The details of the plan of one replica: how its operations are split."""

    ops: tuple[OpPlan, ...]
    collectives: tuple[Collective, ...] = ()

    def make_record(self, limit: float | None) -> None:
        return None

    def make_judgement(self, plan: PlanData) -> NoReturn:
        raise NotImplementedError("a replica is judged as part of its stage")

    def make_form(self, plan: PlanData) -> str:
        return ""


class PlannedPieces:
    """The pieces of one stage's passes.

    Attributes:
        waits: For each total that devices of a replica contribute to, whether it is added up once, after all
            microbatches, which may take more memory: with each microbatch devices could hold parts of the sum alone.
    """

    def __init__(
        self,
        plan: PlanData,
        stage: Stage,
        devices: StageDevices,
        ops: Mapping[int, OpPlan],
        step: CutStep | OnePart,
    ):
        self.devices, self.ops, self.step = devices, ops, step
        self.waits: dict[int, bool] = {}
        limit = plan.memory.limit_bytes
        self._spare = 0 if limit is None or spread_of(stage) > 1 else max(0, limit - stage.peak_bytes)
        self.plan = replace(plan, mesh=stage.replica, stages=(), pipeline=None, details=_Split(tuple(ops.values())))

    def spec(self, program: StageProgram, key: Key) -> Spec | None:
        """The planned sharding of a value that a single operation of a program computes; None if there is none."""
        for piece in program.pieces:
            if key in piece.outs and piece.unit is not None and not piece.unit.regions:
                op = self.ops.get(piece.unit.id)
                return None if op is None else op.results[piece.outs.index(key)]
        return None

    def run(
        self,
        program: StageProgram,
        env: Env,
        index: Any,
        specs: Mapping[Key, Spec | None],
        made: dict[Key, Spec | None],
        waiting: dict[int, Waiting],
    ) -> Env:
        """Runs all pieces.

        Args:
            program: What they are of.
            env: The values that they read.
            index: The number of the part.
            specs: How values that come in are split inside a replica.
            made: Is filled with the same of values that are computed.
            waiting: Is filled with how contributions to totals are split, and over which axes they are to be added up.
        """
        if not self.ops:
            for piece in program.pieces:
                piece(env, index)
            return env
        evaluator = self.evaluator()
        entries: dict[Key, Entry] = {key: (x, specs.get(key), "forward") for key, x in env.items()}
        sums = {(v, None) for v in program.totals if self.step.analysis.status[v] == "sum"}
        for piece in program.pieces:
            self._piece(evaluator, piece, entries, index, sums)
        found: Env = {}
        for key in program.outputs:
            found[key], made[key] = self.given(evaluator, entries[key])
        for v in program.totals:
            found[v, None], waiting[v] = self._contribution(evaluator, v, entries[v, None])
            made[v, None] = waiting[v].settled
        return found

    def evaluator(self) -> Evaluator:
        """What evaluates the pieces."""
        return Evaluator(self.plan, OnDevices(self.plan, self.devices.mesh))

    def given(self, evaluator: Evaluator, entry: Entry) -> tuple[Any, Spec | None]:
        """A computed value that others read, and its sharding."""
        value, spec, _ = evaluator.settled(entry)
        return value, spec

    def _contribution(self, evaluator: Evaluator, value: int, entry: Entry) -> tuple[Any, Waiting]:
        """A value that is added to a total, and its sharding; the total of all devices unless it may wait."""
        found, spec, _ = entry
        if isinstance(spec, Waiting) and spec.plus is None and self._may_wait(value, spec.partial, spec.settled):
            return found, spec
        found, known = self.given(evaluator, entry)
        return found, Waiting((), known or (), known or ())

    def _may_wait(self, value: int, partial: Spec | None, settled: Spec | None) -> bool:
        """Whether a total's contributions fit into the memory that the plan leaves, if they take more than the sum."""
        if value not in self.waits:
            kind = self.step.program.types[value]
            parts = [
                prod(self.devices.mesh.shape[a] for axes in spec or () for a in axes) for spec in (partial, settled)
            ]
            size = prod(kind.shape) * max(4, jax_compat.itemsize(kind.dtype))  # half precision is added up in float32
            more = size // parts[0] - size // parts[1]
            self.waits[value] = more <= self._spare
            self._spare -= more * self.waits[value]
        return self.waits[value]

    def _defers(self, op: OpPlan | None, value: int) -> bool:
        """Whether an operation's sum over devices, which is added to a total, is left to the end of the step."""
        return op is not None and bool(op.sums) and not op.waits and self._may_wait(value, op.partial[0], op.results[0])

    def type_of(self, key: Key, entry: Entry) -> jax.ShapeDtypeStruct:
        """The type of a value in one replica; of one that is yet to be added up, that of the sum."""
        value, spec, _ = entry
        kind = jax_compat.abstract(value)
        if not isinstance(spec, Waiting):
            return kind
        return jax.ShapeDtypeStruct(kind.shape[len(spec.axes) :], kind.dtype)

    def _piece(
        self,
        evaluator: Evaluator,
        piece: Instruction,
        entries: dict[Key, Entry],
        index: Any,
        sums: Collection[Key],
    ) -> None:
        read = [key for key in dict.fromkeys(piece.ins) if key[0] not in self.step.program.constants]
        values, given = [value for value, _ in piece.outs], [entries[key] for key in read]
        if isinstance(piece, Whole):  # it runs as it is, with the plan's ids
            program = part_of(self.step.program, [value for value, _ in read], [piece.unit], values)
            is_planned = True
        else:
            given = [(index, None, "forward"), *given]
            traced = self._traced(piece, read, given)
            matched = None if piece.unit is None else self._planned(piece.unit, traced, values)
            program, is_planned = matched or traced, matched is not None
        ends: list[tuple[int, int]] = []
        if is_planned:
            made = zip(program.outputs, piece.outs, strict=True)
            ends = [(_maker(program, output), key[0]) for output, key in made if key in sums]
        else:
            given = [evaluator.settled(entry) for entry in given]
        evaluator.deferred = [number for number, value in ends if self._defers(self.ops.get(number), value)]
        outs = evaluator.region(program, given)
        entries.update(zip(piece.outs, outs, strict=True))

    def _traced(self, piece: Instruction, read: Sequence[Key], given: Sequence[Entry]) -> Program:
        """What a piece does for a part of the batch, given the number of the part and the values that it reads."""
        constants = self.step.program.constants
        known = {key: constants[key[0]] for key in piece.ins if key[0] in constants}

        def run(index: Any, *values: Any) -> list[Any]:
            env = known | dict(zip(read, values, strict=True))
            piece(env, index)
            return [env[key] for key in piece.outs]

        types = [self.type_of(key, entry) for key, entry in zip(read, given[1:], strict=True)]
        return Program.of(jax.make_jaxpr(run)(jax_compat.abstract(given[0][0]), *types), UNPLANNED)

    def _planned(self, unit: Operation, traced: Program, values: Sequence[int]) -> Program | None:
        """What was traced of an operation, with the ids of the plan; None if it is not what was planned."""
        program = with_ids_of(unit, traced, values)
        ops = [] if program is not None else [self.ops.get(n) for n in range(unit.id, unit.id + unit.num_ids)]
        if any(op is not None and any(map(any, filter(None, op.results))) for op in ops):
            said = f"{unit} is not split as the plan says: what runs for a part of the batch is not what was planned"
            if is_strict():
                raise AssertionError(said)
            warnings.warn(f"{said}. Its values are whole on every device.", stacklevel=2)
        return program


def _maker(program: Program, value: int) -> int:
    """The id of the operation that computes a value, which may be inside of a checkpoint; -1 if none does."""
    for operation in program.operations:
        if value in operation.outputs:
            if not operation.is_checkpoint:
                return -1 if operation.regions else operation.id
            body = operation.regions[0]
            return _maker(body, body.outputs[operation.outputs.index(value)])
    return -1
