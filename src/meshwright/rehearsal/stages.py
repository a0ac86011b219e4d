"""`plan.rehearse` of a pipeline: measures one device's share of every different program of the stages.

The schedule is simulated again with the measured times of the passes; transfers and collectives are modelled. Equal
programs, such as those of equal stages, are compiled and measured once.
"""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, plain_table
from meshwright.graph import Traced
from meshwright.parallelism.subject.subject import Subjects
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Stage, StageTime
from meshwright.plans.stage_text import pipeline_text
from meshwright.profiler.measurements import open_database
from meshwright.rehearsal.memory import is_allowed, keep_memory, with_stages_memory
from meshwright.rehearsal.parts import stand_in_s
from meshwright.rehearsal.share.indices import Indices
from meshwright.rehearsal.share.stage_share import StageShare, described_engine
from meshwright.runtime.checking.compiled import flops_of, text_of
from meshwright.runtime.checking.stage_memory import Key, key_of, peak_bytes
from meshwright.runtime.checking.verify import Compared
from meshwright.runtime.checking.verify_stages import planned_flops
from meshwright.runtime.stages.cutting.stage_programs import PREPARE
from meshwright.runtime.stages.engine import Engine
from meshwright.schedules.base import FORWARD
from meshwright.schedules.instructions import UPDATE
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.simulation import Simulation
from meshwright.simulator.staged import staged_work
from meshwright.units import format_bytes, format_seconds

ROUNDS = 3  # the quickest counts: whatever else runs on the machine only ever adds time


@dataclass(frozen=True)
class StageRehearsal:
    """One device's share of a stage, as it was measured; times are None where they were not.

    Attributes:
        forward_s: Compute of one microbatch, forward, of all chunks; without the stand-ins of collectives.
        backward_s: The same backward, with recomputation.
        update_s: Compute of the update, once a step.
        memory: Peak bytes on one device: planned, and of the arrays and compiled programs.
        flops: FLOPs of products and convolutions in one step on one device, planned and compiled.
    """

    forward_s: float | None
    backward_s: float | None
    update_s: float | None
    memory: Compared
    flops: Compared


@dataclass(frozen=True)
class PipelineRehearsal(Printed):
    """One device's share of each stage of a pipeline, as it was measured.

    Attributes:
        plan: The plan.
        device: The kind of the device that it was measured on.
        stages: Those of each stage.
        simulation: The schedule simulated with measured compute; as planned where nothing was measured.
        compile_s: How long the compilation took.
        num_programs: How many different programs were compiled.
        steps: How often each was run.
        remarks: What a reader should know, a sentence each.
    """

    plan: PlanData = field(repr=False)
    device: str
    stages: tuple[StageRehearsal, ...]
    simulation: Simulation = field(repr=False)
    compile_s: float
    num_programs: int
    steps: int
    remarks: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Time of one step: measured compute in the simulated schedule."""
        return self.simulation.step_s

    @property
    def tflops_per_device(self) -> float:
        """TFLOP/s of products and convolutions that each device reaches over a step, in the mean."""
        return self.plan.flops / self.step_s / 1e12 if self.step_s else 0.0

    @property
    def corrected(self) -> PlanData:
        """The plan with the memory that the programs of each stage allocate."""
        return with_stages_memory(self.plan, (int(stage.memory.compiled) for stage in self.stages))

    def __repr__(self) -> str:
        where = f"{len(self.stages)} stages on {self.device}"
        return f"<PipelineRehearsal: {where}, step {format_seconds(self.step_s)}>"

    def __rich__(self) -> RenderableType:
        head = Text(f"One device's share of each stage of {self.plan.method}, run on {self.device}\n", style="bold")
        columns = (
            "forward",
            "planned",
            "backward",
            "planned",
            "update",
            "planned",
            "memory",
            "planned",
            "FLOPs, ratio",
        )
        table = plain_table(pipeline_text(self.plan), ("stage",), columns)
        for number, (found, stage) in enumerate(zip(self.stages, self.plan.stages, strict=True)):
            times: list[str] = []
            for known, planned in zip(
                (found.forward_s, found.backward_s, found.update_s), _planned(stage), strict=True
            ):
                times += ["-" if known is None else format_seconds(known), format_seconds(planned)]
            sizes = format_bytes(found.memory.compiled), format_bytes(found.memory.planned)
            table.add_row(str(number), *times, *sizes, f"{found.flops.ratio:.3f}")
        lines = [
            f"step {format_seconds(self.step_s)} by simulation, {format_seconds(self.plan.cost.total)} as planned; "
            f"{self.tflops_per_device:.4g} TFLOP/s a device",
            f"{self.num_programs} different programs compiled in {format_seconds(self.compile_s)}",
        ]
        return Group(head, table, Text("\n".join(["", *lines, *self.remarks])))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "step_s": self.step_s,
            "planned_step_s": self.plan.cost.total,
            "tflops_per_device": self.tflops_per_device,
            "compile_s": self.compile_s,
            "num_programs": self.num_programs,
            "steps": self.steps,
            "stages": [asdict(stage) for stage in self.stages],
            "remarks": list(self.remarks),
        }


def rehearse_stages(plan: PlanData, traced: Traced, device: Any, steps: int, remarks: list[str]) -> PipelineRehearsal:
    """See `Plan.rehearse`."""
    started, is_its_own = time.perf_counter(), not remarks
    engine = described_engine(plan, traced)
    programs = _Programs(plan, engine, device, Indices.of(traced))
    compile_s = time.perf_counter() - started
    times = programs.time_all(steps, remarks) if steps else {}
    if programs.whole:
        names = ", ".join(sorted(programs.whole))
        remarks.append(f"Some operations could not be computed on one device's part, and ran whole: {names}.")
    stages = tuple(_stage(plan, number, engine, programs, times) for number in range(len(plan.stages)))
    if is_allowed() and is_its_own:
        fullest = max(stages, key=lambda stage: stage.memory.ratio)
        modelled = fullest.memory.planned / plan.provenance.get("memory factor", 1.0)
        with open_database() as database:
            keep_memory(database, plan, traced, int(fullest.memory.compiled), modelled)
    own = plan.mesh.cluster
    assert own is not None
    known = all(None not in (s.forward_s, s.backward_s, s.update_s) for s in stages)
    priced = replace(plan, stages=tuple(map(_priced, plan.stages, stages))) if known else plan
    simulation = simulate_work(staged_work(priced, own))
    return PipelineRehearsal(
        plan,
        device.device_kind,
        stages,
        simulation,
        compile_s,
        len(programs.different),
        ROUNDS * steps,
        tuple(remarks),
    )


class _Nothing:
    """In place of a program that is not rehearsed: what stages prepare once a step."""

    temp_size_in_bytes = output_size_in_bytes = alias_size_in_bytes = 0

    def memory_analysis(self) -> "_Nothing":
        return self


class _Programs:
    """One device's share of the programs of all stages, compiled.

    Attributes:
        compiled: The compiled program of each.
        different: The different ones, each with one of the shares.
        whole: Names of operations that were computed whole.
    """

    def __init__(self, plan: PlanData, engine: Engine, device: Any, indices: Indices):
        self.device = device
        self.compiled: dict[Key, Any] = {}
        self.different: dict[str, tuple[StageShare, Any]] = {}
        self.text_of: dict[Key, str] = {}
        self.whole: set[str] = set()
        for key, lowered in engine.lowered.items():
            if lowered.program.work == PREPARE:
                self.compiled[key] = _Nothing()
                continue
            share = StageShare(plan, engine.stages[lowered.program.stage], lowered, engine.packs, indices)
            module = share.lower(device)
            text = self.text_of[key] = module.as_text()
            if text not in self.different:
                self.different[text] = share, module.compile()
            self.compiled[key] = self.different[text][1]
            self.whole |= share.whole

    def time_all(self, steps: int, remarks: list[str]) -> dict[Key, float]:
        """Seconds of one run of each program that could be run."""
        import jax

        found: dict[str, float] = {}
        for text, (share, compiled) in self.different.items():
            try:
                found[text] = _seconds(share, compiled, self.device, steps)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                remarks.append(f"The device ran out of memory in {share.program}: {str(error).splitlines()[0][:120]}")
        return {key: found[text] for key, text in self.text_of.items() if text in found}


def _seconds(share: StageShare, compiled: Any, device: Any, steps: int) -> float:
    """Seconds of one run: the quickest of several rounds, each of some runs one after the other."""
    import jax

    values, heirs = share.draw(device), _heirs(share)

    def run() -> list["jax.Array"]:
        kept = {place: values[place].copy() for place in share.lowered.donated if place not in heirs}
        made = compiled(*values)
        for place in share.lowered.donated:
            values[place] = made[heirs[place]] if place in heirs else kept[place]
        return made

    jax.block_until_ready(run())
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(steps):
            made = run()
        jax.block_until_ready(made)
        found.append((time.perf_counter() - started) / steps)
    return min(found)


def _heirs(share: StageShare) -> dict[int, int]:
    """For each donated argument a result of its type, which is the argument of the next run."""
    free = [(kind.shape, kind.dtype) for kind in share.results]
    found: dict[int, int] = {}
    for place in share.lowered.donated:
        kind = share.types[place].shape, share.types[place].dtype
        number = next((n for n, other in enumerate(free) if other == kind and n not in found.values()), None)
        if number is not None:
            found[place] = number
    return found


def _stage(
    plan: PlanData, number: int, engine: Engine, programs: _Programs, times: Mapping[Key, float]
) -> StageRehearsal:
    """The figures of one stage."""
    stage = plan.stages[number]
    runs = Counter(key_of(one.program) for one in engine.bound if one.program is not None)
    own = [key for key in programs.text_of if key[1] == number]
    beside = _stand_ins(plan, number)
    by_work = {
        name: _total([times.get(key) for key in own if is_mine(key[0])], beside[name])
        for name, is_mine in (
            ("forward", lambda work: work == FORWARD),
            ("backward", lambda work: work not in (FORWARD, UPDATE)),
            ("update", lambda work: work == UPDATE),
        )
    }
    flops = sum(runs[key] * flops_of(text_of(programs.compiled[key])) for key in own)
    return StageRehearsal(
        by_work["forward"],
        by_work["backward"],
        by_work["update"],
        Compared(stage.peak_bytes, peak_bytes(engine, programs.compiled)[number].total),
        Compared(planned_flops(stage), flops),
    )


def _total(times: Sequence[float | None], beside_s: float) -> float | None:
    """The sum of some times without those of stand-ins; None where one is not known."""
    known = [seconds for seconds in times if seconds is not None]
    return max(sum(known) - beside_s, 0.0) if len(known) == len(times) else None


def _stand_ins(plan: PlanData, number: int) -> dict[str, float]:
    """Modelled seconds of the stand-ins of a stage's collectives: of one microbatch, and of the update."""
    assert plan.pipeline is not None
    found, many = {"forward": 0.0, "backward": 0.0, "update": 0.0}, plan.pipeline.num_microbatches
    for item in Subjects(plan)[number].collectives:
        if item.kind != "transfer":
            name = item.phase if item.phase in found else "update"
            found[name] += stand_in_s(plan.stages[number].mesh, item) / (1 if name == "update" else many)
    return found


def _planned(stage: Stage) -> tuple[float, float, float]:
    """Planned compute: forward, backward with recomputation, and the update."""
    return stage.forward.compute_s, stage.backward.compute_s + stage.recompute.compute_s, stage.update.compute_s


def _priced(stage: Stage, found: StageRehearsal) -> Stage:
    """A stage with measured compute and modelled communication."""

    def scaled(time: StageTime, known: float | None, planned: float) -> StageTime:
        factor = (known or 0.0) / planned if planned else 0.0
        return replace(time, compute_s=factor * time.compute_s, product_s=factor * time.product_s)

    forward, backward, update = _planned(stage)
    return replace(
        stage,
        forward=scaled(stage.forward, found.forward_s, forward),
        backward=scaled(stage.backward, found.backward_s, backward),
        recompute=scaled(stage.recompute, found.backward_s, backward),
        update=scaled(stage.update, found.update_s, update),
    )
