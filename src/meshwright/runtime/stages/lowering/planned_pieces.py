"""Runs the passes of a stage as regions of the step, each operation split inside a replica as the plan says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NoReturn

from meshwright import jax_compat
from meshwright.parallelism.subject.subject import spread_of
from meshwright.plans.operations import Collective, OpPlan
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Stage
from meshwright.plans.tensor import Spec
from meshwright.program.program import Program
from meshwright.runtime.microbatches.cut_step import CutStep
from meshwright.runtime.microbatches.part import Key
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
    """Runs the passes of one stage.

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
        step: CutStep,
    ):
        self.devices, self.ops, self.step = devices, ops, step
        self.waits: dict[int, bool] = {}
        limit = plan.memory.limit_bytes
        self._spare = 0 if limit is None or spread_of(stage) > 1 else max(0, limit - stage.peak_bytes)
        self.plan = replace(plan, mesh=stage.replica, stages=(), pipeline=None, details=_Split(tuple(ops.values())))

    def spec(self, program: StageProgram, key: Key) -> Spec | None:
        """The planned sharding of a value that a single operation of a program computes; None if there is none."""
        for piece in program.pieces:
            if key in piece.outs and not piece.unit.regions:
                op = self.ops.get(piece.unit.id)
                return None if op is None else op.results[piece.outs.index(key)]
        return None

    def run(
        self,
        program: StageProgram,
        given: Mapping[Key, Any],
        index: Any,
        specs: Mapping[Key, Spec | None],
        made: dict[Key, Spec | None],
        waiting: dict[int, Waiting],
    ) -> dict[Key, Any]:
        """Runs a pass.

        Args:
            program: The pass.
            given: The values that it reads.
            index: The number of the part.
            specs: How values that come in are split inside a replica.
            made: Is filled with the same of values that are computed.
            waiting: Is filled with how contributions to totals are split, and over which axes they are to be added up.
        """
        totals: list[Key] = [(v, None) for v in program.totals]
        wanted = list(dict.fromkeys([*program.outputs, *totals]))
        region = self.step.part.region(program.pieces, given, wanted)
        if not self.ops:
            return dict(zip(wanted, region.run([index, *given.values()]), strict=True))
        evaluator = self.evaluator()
        evaluator.deferred = self._deferred(region, dict(zip(wanted, region.outputs, strict=True)), program.totals)
        entries: list[Entry] = [(index, None, "forward")]
        entries += [(x, specs.get(key), "forward") for key, x in given.items()]
        ends = dict(zip(wanted, evaluator.region(region, entries), strict=True))
        found: dict[Key, Any] = {}
        for key in program.outputs:
            found[key], made[key] = self.given(evaluator, ends[key])
        for v in program.totals:
            found[v, None], waiting[v] = self._contribution(evaluator, v, ends[v, None])
            made[v, None] = waiting[v].settled
        return found

    def _deferred(self, region: Program, numbers: Mapping[Key, int], totals: Sequence[int]) -> list[int]:
        """The operations whose sums over devices are left to the end of the step: they are added to totals."""
        sums = [v for v in totals if self.step.analysis.status[v] == "sum"]
        ends = [(_maker(region, numbers[v, None]), v) for v in sums]
        return [number for number, v in ends if self._defers(self.ops.get(number), v)]

    def evaluator(self) -> Evaluator:
        """What evaluates a pass."""
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


def _maker(program: Program, value: int) -> int:
    """The id of the operation that computes a value, which may be inside of a checkpoint; -1 if none does."""
    for operation in program.operations:
        if value in operation.outputs:
            if not operation.is_checkpoint:
                return -1 if operation.regions else operation.id
            body = operation.regions[0]
            return _maker(body, body.outputs[operation.outputs.index(value)])
    return -1
