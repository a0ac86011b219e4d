"""Runs the pieces of a pass, each operation split inside a replica as the plan says."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from meshwright import jax_compat
from meshwright.plans.operations import Collective, OpPlan
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Stage
from meshwright.plans.tensor import Spec
from meshwright.runtime.microbatches.microbatches import CutStep
from meshwright.runtime.microbatches.one_part import OnePart
from meshwright.runtime.microbatches.part_program import Env, Instruction, Key
from meshwright.runtime.program.contributions import Waiting
from meshwright.runtime.program.evaluate import Entry, Evaluator
from meshwright.runtime.program.serials import count, count_ops, is_operation
from meshwright.runtime.stages.assignment import UNPLANNED, Assignment
from meshwright.runtime.stages.layout import StageDevices
from meshwright.runtime.stages.stage_programs import StageProgram


@dataclass(frozen=True)
class _Split:
    """The details of the plan of one replica: how its operations are split."""

    ops: tuple[OpPlan, ...]
    collectives: tuple[Collective, ...] = ()

    def make_record(self, limit: float | None) -> None:
        return None

    def make_judgement(self, plan: PlanData) -> Any:
        raise NotImplementedError("a replica is judged as part of its stage")


class PieceEvaluator(Evaluator):
    """Evaluates pieces of a plan's program, whose operands another pass may have added up already."""

    def _operation(self, eqn: Any, op: OpPlan | None, ins: list[Entry]) -> list[Entry]:
        hands_on = op is not None and op.waits and not op.sums
        if op is not None and hands_on and not any(isinstance(spec, Waiting) for _, spec, _ in ins):
            op = replace(op, waits=())
        return super()._operation(eqn, op, ins)


class PlannedPieces:
    """The pieces of one stage's passes."""

    def __init__(
        self,
        plan: PlanData,
        stage: Stage,
        devices: StageDevices,
        ops: Mapping[int, OpPlan],
        assignment: Assignment,
        step: CutStep | OnePart,
    ):
        self.devices, self.ops, self.step = devices, ops, step
        self.serial = {id(unit): n for unit, n in zip(step.program.units, assignment.serial, strict=True)}
        self.plan = replace(plan, mesh=stage.replica, stages=(), pipeline=None, details=_Split(tuple(ops.values())))

    def spec(self, program: StageProgram, key: Key) -> Spec | None:
        """The planned sharding of a value that a single operation of a program computes; None if there is none."""
        for piece in program.pieces:
            if key in piece.outs and piece.unit is not None and is_operation(piece.unit.eqn):
                op = self.ops.get(self.serial[id(piece.unit)])
                return None if op is None else op.results[piece.outs.index(key)]
        return None

    def run(
        self,
        program: StageProgram,
        env: Env,
        index: Any,
        specs: Mapping[Key, Spec | None],
        made: dict[Key, Spec | None],
    ) -> Env:
        """Runs all pieces.

        Args:
            program: What they are of.
            env: The values that they read.
            index: The number of the part.
            specs: How values that come in are split inside a replica.
            made: Is filled with the same of values that are computed.
        """
        if not self.ops:
            for piece in program.pieces:
                piece(env, index)
            return env
        evaluator = self.evaluator()
        entries: dict[Key, Entry] = {key: (x, specs.get(key), "forward") for key, x in env.items()}
        for piece in program.pieces:
            self._piece(evaluator, piece, entries, index)
        found: Env = {}
        for key in (*program.outputs, *((v, None) for v in program.totals)):
            found[key], made[key] = self.given(evaluator, entries[key])
        return found

    def evaluator(self) -> Evaluator:
        """What evaluates the pieces."""
        return PieceEvaluator(self.plan, self.devices.mesh)

    def given(self, evaluator: Evaluator, entry: Entry) -> tuple[Any, Spec | None]:
        """A computed value that others read, and its sharding."""
        value, spec, _ = evaluator.settled(entry)
        return value, spec

    def type_of(self, key: Key, entry: Entry) -> Any:
        """The type of a value in one replica; of one that is yet to be added up, that of the sum."""
        value, spec, _ = entry
        kind = jax_compat.abstract(value)
        if not isinstance(spec, Waiting):
            return kind
        return jax.ShapeDtypeStruct(kind.shape[len(spec.axes) :], kind.dtype)

    def _piece(self, evaluator: Evaluator, piece: Instruction, entries: dict[Key, Entry], index: Any) -> None:
        constants = self.step.program.constants
        known = {key: constants[key[0]] for key in piece.ins if key[0] in constants}
        read = [key for key in dict.fromkeys(piece.ins) if key not in known]

        def run(index: Any, *values: Any) -> list[Any]:
            env = known | dict(zip(read, values, strict=True))
            piece(env, index)
            return [env[key] for key in piece.outs]

        given: list[Entry] = [(index, None, "forward"), *(entries[key] for key in read)]
        types = [self.type_of(key, entry) for key, entry in zip(read, given[1:], strict=True)]
        closed = jax.make_jaxpr(run)(jax_compat.abstract(index), *types)
        serial = UNPLANNED
        if piece.unit is not None and count_ops(closed) == count(piece.unit.eqn):
            serial = self.serial[id(piece.unit)]
        else:
            given = [evaluator.settled(entry) for entry in given]
        outs = evaluator.piece(closed, given, serial)
        entries.update(zip(piece.outs, outs, strict=True))
