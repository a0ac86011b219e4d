"""The subjects of judgements and explanations: the one program of a plan, or each stage of a pipelined plan."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from meshwright.arrays import Ints
from meshwright.cost.sustained import sustained_s
from meshwright.errors import PlanFileError
from meshwright.hardware.clusters import AXIS_NAMES
from meshwright.parallelism.axis_uses import AxisFacts
from meshwright.parallelism.dim_names import Among, major_loops
from meshwright.parallelism.words import bytes_on_device
from meshwright.plans.operations import Collective
from meshwright.plans.records.record import MEMORY_ROLES, Record
from meshwright.plans.records.staged_record import StagedRecord, StageMemory, StageView, cut
from meshwright.plans.records.traced_program import VIRTUAL, RecordedProgram
from meshwright.plans.stage import EXCHANGED, Stage
from meshwright.plans.tensor import Tensor
from meshwright.strategy.sharding import Axes

if TYPE_CHECKING:
    from meshwright.hardware import Mesh
    from meshwright.plans.plan import PlanData

_SPREAD_FROM = {"optimizer": 1, "gradients": 2, "parameters": 3}


@dataclass(frozen=True, eq=False)
class Subject:
    """A program with the problem that was solved for it.

    Attributes:
        plan: The plan.
        record: Program and problem; of a stage, those of its own layers for one microbatch.
        find_facts: Finds the uses of the axes, which the explanation of a tensor does not need.
        mesh: The mesh of the problem; of a stage, its inner axis.
        names: Names of that mesh's axes in the plan.
        number: The stage's number; None for a plan without stages.
        level_bytes: The excess of the problem's memory over a device's need, where the problem's model is coarser.
    """

    plan: "PlanData"
    record: Record
    find_facts: Callable[[], AxisFacts]
    mesh: "Mesh"
    names: tuple[str, ...]
    number: int | None = None
    level_bytes: float = 0.0

    @cached_property
    def facts(self) -> AxisFacts:
        """The uses of the axes."""
        return self.find_facts()

    @cached_property
    def tensors(self) -> Sequence[Tensor]:
        """The arguments of the program or stage."""
        if self.stage is None:
            return self.plan.arguments
        values, here = self.facts.values, self.record.program.touched
        return (*self.stage.tensors, *(t for t in self.plan.arguments if t.role == "data" and values[t.path] in here))

    @property
    def stage(self) -> Stage | None:
        return None if self.number is None else self.plan.stages[self.number]

    @property
    def spread(self) -> int:
        """How much of a stage's state is spread over its replicas, as ZeRO counts it: 0 to 3."""
        return 0 if self.stage is None else spread_of(self.stage)

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of one step; of a stage, those of all microbatches."""
        if self.number is None:
            return self.plan.collectives
        return tuple(_stage_collectives(self))


def facts_of(plan: "PlanData", program: RecordedProgram) -> AxisFacts:
    """The uses of a mesh's axes in a plan's program."""
    return AxisFacts(program, plan.mesh.names, plan.mesh.sizes, {t.path: t.role for t in plan.arguments})


class Subjects(Sequence[Subject]):
    """The subjects of a plan, each computed on first use; there are none if the plan keeps no record."""

    def __init__(self, plan: "PlanData"):
        self.plan, self.record = plan, plan.record
        self._known: dict[int, Subject] = {}
        self._whole: dict[int, AxisFacts] = {}

    def __len__(self) -> int:
        if self.record is None:
            return 0
        return len(self.plan.stages) if isinstance(self.record, StagedRecord) else 1

    def __getitem__(self, number: int) -> Subject:  # type: ignore[override]  # nobody takes a slice of it
        if not 0 <= number < len(self):
            raise IndexError(number)
        if number not in self._known:
            self._known[number] = self._find(number)
        return self._known[number]

    def of(self, tensor: Tensor) -> Subject:
        """The subject that decides a tensor's sharding: in a pipelined plan, the stage that owns it."""
        return self[0 if len(self) == 1 else self._stage_of(tensor)]

    def whole(self, number: int) -> AxisFacts:
        """The facts of the whole program on a stage's mesh; the same for stages that are split alike."""
        record = self.plan.staged_record
        view, stage = record.view[number], self.plan.stages[number]
        if view not in self._whole:
            program, names, sizes = record.views[view].record.program, stage.mesh.names, stage.mesh.sizes
            roles = {t.path: t.role for t in self.plan.arguments}
            inner = AxisFacts(program, names[1:], sizes[1:], roles)
            self._whole[view] = AxisFacts(lifted(inner, sizes[0]), names, sizes, roles)
        return self._whole[view]

    def _find(self, number: int) -> Subject:
        plan, record = self.plan, self.record
        if not isinstance(record, StagedRecord):
            assert record is not None
            return Subject(plan, record, lambda: facts_of(plan, record.program), plan.mesh, plan.mesh.names)
        return _stage_subject(plan, record, number, partial(self.whole, number))

    def _stage_of(self, tensor: Tensor) -> int:
        record = self.plan.staged_record
        program: RecordedProgram = record.views[0].record.program
        if tensor.path in program.inputs:
            unit = int(record.argument_unit[list(program.inputs).index(tensor.path)])
        elif tensor.path not in program.outputs:
            raise PlanFileError(f"the plan is damaged: its record knows no {tensor.path!r:.60}; save the plan again")
        else:
            place = list(program.outputs).index(tensor.path)
            argument, value = int(program.taken[place]), int(program.made[place])
            argument = argument if argument >= 0 or value >= len(program.inputs) else value
            unit = int(record.argument_unit[argument] if argument >= 0 else self._made_in(program, value))
        shares = [record.share(stage.chunks or (stage.layers,))[unit] for stage in self.plan.stages]
        return next(number for number, share in enumerate(shares) if share > 0)

    def _made_in(self, program: RecordedProgram, value: int) -> int:
        producer = int(program.producer[value])
        return int(self.plan.staged_record.unit[producer]) if producer >= 0 else 0


def spread_of(stage: Stage) -> int:
    """How much of a stage's state is spread over its replicas, as ZeRO counts it: 0 to 3."""
    roles = {t.role for t in stage.tensors if any("x" in axes for axes in t.spec)}
    if "parameters" in roles:
        return 3
    return 0 if "optimizer" not in roles else 2 if "gradients" in stage.method else 1


def _stage_subject(plan: "PlanData", record: StagedRecord, number: int, find_whole: Callable[[], AxisFacts]) -> Subject:
    stage, view = plan.stages[number], record.views[record.view[number]]
    share = record.share(stage.chunks or (stage.layers,))
    part = cut(view, record.unit, record.argument_unit, share, _memory(plan, number))

    def find_facts() -> AxisFacts:
        whole = find_whole()
        return whole.within(replace(whole.program, trips=part.program.trips, node=part.program.node))

    level = (part.problem.limit or 0.0) - (view.record.problem.limit or 0.0)
    return Subject(plan, part, find_facts, stage.replica, stage.mesh.names[1:], number, level)


def _memory(plan: "PlanData", number: int) -> StageMemory:
    from meshwright.schedules import in_flight

    stage, pipeline = plan.stages[number], plan.pipeline
    assert pipeline is not None
    sizes = (len(plan.stages), pipeline.num_microbatches, pipeline.interleave)
    others = in_flight(pipeline.schedule, *sizes)[number] / pipeline.interleave - 1
    spread, data = spread_of(stage), stage.mesh.sizes[0]
    replicas = [data if spread >= _SPREAD_FROM.get(role, len(EXCHANGED)) else 1 for role in MEMORY_ROLES]
    return StageMemory(max(others, 0.0) * stage.activation_bytes, replicas, stage.peak_bytes)


def _stage_collectives(subject: Subject) -> Iterator[Collective]:
    """Communication inside the replicas, then between them, then with the next stage."""
    stage, plan, record = subject.stage, subject.plan, subject.plan.staged_record
    assert stage is not None and subject.number is not None and plan.pipeline is not None
    view: StageView = record.views[record.view[subject.number]]
    many, share = plan.pipeline.num_microbatches, record.share(stage.chunks or (stage.layers,))[record.unit]
    for number, op in zip(view.sent.tolist(), view.sent_op.tolist(), strict=True):
        kind, axes, size, seconds, phase, operation, source, purpose, trips = view.sent_kinds[number]
        times = float(share[op]) * (1 if phase == "update" or purpose == "gradient" else many)
        if times:
            named = tuple(subject.names[AXIS_NAMES.index(axis)] for axis in axes)
            yield Collective(kind, named, size, seconds * times, phase, operation, source, purpose, trips * times)
    size = parameter_bytes(stage)
    once, each = EXCHANGED[spread_of(stage)] if stage.mesh.sizes[0] > 1 and stage.backward.total_s else ((), ())
    for kinds, times in ((once, 1), (each, many)):
        for kind in kinds:
            phase, what = ("update", "parameters") if kind == "all_gather" else ("backward", "gradients")
            seconds = times * sustained_s(stage.mesh, kind, (0,), size)
            label = f"{what} of stage {subject.number}"
            yield Collective(kind, ("x",), size, seconds, phase, label, "", "gradient", times)
    if stage.send_bytes:
        times = many * len(stage.chunks or (stage.layers,))
        ways = (("forward", "activations"), ("backward", "their gradients"))[: 1 + bool(stage.backward.total_s)]
        for phase, what in ways:
            seconds, label = times * stage.transfer_s, f"{what} of stage {subject.number}"
            yield Collective("transfer", (), stage.send_bytes, seconds, phase, label, "", "stage", times)


def parameter_bytes(stage: Stage) -> int:
    """Bytes of a stage's parameters on one device, before any sharding over the replicas."""
    mesh = stage.mesh.shape | {"x": 1}
    return sum(bytes_on_device(t.shape, t.dtype, t.spec, mesh) for t in stage.tensors if t.role == "parameters")


def lifted(facts: AxisFacts, replicas: int) -> RecordedProgram:
    """The program on two axes: the first splits every dim that comes from the data's first, the second as it did.

    Args:
        facts: Of the program of one replica, on the inner axis.
        replicas: The number of replicas; if it is 1, the first axis splits nothing.
    """
    program = facts.program
    batch = facts.classes.among(facts.batch if replicas > 1 else ())
    inner, sizes = facts.axes, (replicas, *facts.axes.sizes)
    code = Axes(sizes).pack(np.column_stack([batch.dims(), inner.unpack(program.code)]))
    loops = np.array([*program.assignments, (VIRTUAL,) * inner.num_axes], np.int64)[program.assignment]
    both = np.column_stack([_batch_loops(program, batch), loops])
    distinct, assignment = np.unique(both, axis=0, return_inverse=True)
    virtual = program.assignment == VIRTUAL
    return replace(
        program,
        code=code,
        assignments=list(map(tuple, distinct.tolist())),
        assignment=np.where(virtual, VIRTUAL, assignment.reshape(-1)),
    )


def _batch_loops(program: RecordedProgram, batch: Among) -> Ints:
    """For each operation the loop that runs over the batch; -1 for none."""
    loops = np.full(program.num_ops, -1)
    for number, nest in enumerate(program.nests):
        ops = np.flatnonzero(program.nest == number)
        tensors = [(program.reads[program.start[ops] + i], dims) for i, dims in enumerate(nest.operands)]
        tensors += [(program.first_made[ops] + i, dims) for i, dims in enumerate(nest.results)]
        for values, dims in tensors:
            for dim, loop in enumerate(major_loops(nest, dims)):
                if loop >= 0:
                    mine = batch.at(values, dim) & (loops[ops] < 0)
                    loops[ops[mine]] = loop
    return loops
