"""`plan.rehearse`: measures one device's share of a plan, and prices the plan with what was measured."""

import logging
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from meshwright.console import Printed, plain_table
from meshwright.errors import ShardingError
from meshwright.graph.tracing.trace import Traced, trace
from meshwright.plans.plan import Cost, PlanData
from meshwright.plans.text import axes_text
from meshwright.profiler.measurements import open_database
from meshwright.profiler.measurements.turn import my_turn
from meshwright.rehearsal.learning.from_parts import Measured
from meshwright.rehearsal.measuring import Candidate, Measuring
from meshwright.rehearsal.memory import is_allowed, keep_memory, modelled_bytes, with_memory
from meshwright.rehearsal.parts import parts_of, stand_in_s
from meshwright.rehearsal.share.program import Share
from meshwright.rehearsal.stages import PipelineRehearsal, rehearse_stages
from meshwright.runtime.checking.compiled import flops_of, text_of
from meshwright.runtime.checking.verify import Compared, allocated_bytes
from meshwright.runtime.microbatches.planned_parts import traced_as_planned
from meshwright.units import format_bytes, format_seconds

log = logging.getLogger("meshwright")

_SEGMENT_COLUMNS = ("times", "planned", "measured", "ratio", "TFLOP/s")
ROUNDS = 3  # the quickest counts: whatever else runs on the machine only ever adds time


@dataclass(frozen=True)
class SegmentTime:
    """One part of the share, by itself.

    Attributes:
        label: The name of its largest operation.
        fingerprint: The segment's; of what belongs to no segment it begins with ``rest``.
        count: How often it runs in one step.
        compute_s: Measured compute of one run, without the stand-ins of its collectives; None where it failed.
        modelled_s: Modelled compute of one run, on a device that works alone.
        flops: FLOPs of products and convolutions of one run.
    """

    label: str
    fingerprint: str
    count: float
    compute_s: float | None
    modelled_s: float
    flops: float


@dataclass(frozen=True)
class Rehearsal(Printed):
    """One device's share of a plan, as it was measured.

    Attributes:
        plan: The plan.
        device: The kind of the device that it was measured on.
        measured_s: Time of one step of the share, stand-ins of collectives included; None where it was not run.
        stand_in_s: Modelled part of it that the stand-ins take: a collective's own time has it, too.
        memory: Bytes on one device, planned and as compiled for the share.
        flops: FLOPs of products and convolutions on one device, planned and compiled.
        peak_bytes: The most memory that was in use on the device; None where the device does not report it.
        compile_s: How long the compilation took.
        steps: How many steps were timed.
        segments: The parts of the share, each measured by itself; none where they were not asked for.
        remarks: What a reader should know, a sentence each.
    """

    plan: PlanData = field(repr=False)
    device: str
    measured_s: float | None
    stand_in_s: float
    memory: Compared
    flops: Compared
    peak_bytes: int | None
    compile_s: float
    steps: int
    segments: tuple[SegmentTime, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def cost(self) -> Cost:
        """The plan's cost with measured compute and modelled communication; as planned where nothing was measured."""
        if self.measured_s is None:
            return self.plan.cost
        return Cost(max(self.measured_s - self.stand_in_s, 0.0), self.plan.cost.communication)

    @property
    def corrected(self) -> PlanData:
        """The plan with the measured compute, and with the memory that the program of the share allocates."""
        return with_memory(replace(self.plan, cost=self.cost), int(self.memory.compiled))

    @property
    def step_s(self) -> float:
        """Time of one step: measured compute and modelled communication, one after the other."""
        return self.cost.total

    @property
    def tflops_per_device(self) -> float:
        """TFLOP/s of products and convolutions that each device reaches over a step."""
        return self.plan.flops / self.step_s / 1e12 if self.step_s else 0.0

    def __repr__(self) -> str:
        share = f"step {format_seconds(self.step_s)}, {self.tflops_per_device:.3g} TFLOP/s a device"
        known = share if self.measured_s is not None else "not run"
        return f"<Rehearsal: {axes_text(self.plan)} on {self.device}, {known}, {format_bytes(self.memory.compiled)}>"

    def __rich__(self) -> RenderableType:
        head = Text(f"One device's share of {self.plan.method} on mesh {axes_text(self.plan)}, run on {self.device}\n")
        head.stylize("bold", 0, len(head))
        table = plain_table("", ("",), ("planned", "rehearsed", "ratio", "known by"))
        cost, planned = self.cost, self.plan.cost
        how = "modelled" if self.measured_s is None else f"measured, {self.steps} steps"
        for name, before, now, known in (
            ("compute", planned.compute, cost.compute, how),
            ("communication", planned.communication, cost.communication, "modelled"),
            ("step", planned.total, cost.total, "the sum"),
        ):
            ratio = f"{now / before:.3f}" if before else ""
            table.add_row(name, format_seconds(before), format_seconds(now), ratio, known)
        for name, pair in (("memory", self.memory), ("FLOPs", self.flops)):
            form = format_bytes if name == "memory" else "{:.4g}".format
            table.add_row(name, form(pair.planned), form(pair.compiled), f"{pair.ratio:.3f}", "compiled")
        lines = [f"{self.tflops_per_device:.4g} TFLOP/s a device; compiled in {format_seconds(self.compile_s)}"]
        if self.stand_in_s and self.measured_s is not None:
            total, part = format_seconds(self.measured_s), format_seconds(self.stand_in_s)
            lines.append(f"the share took {total}, of which {part} are counted for the stand-ins of collectives")
        found: list[RenderableType] = [head, table, Text("\n".join(["", *lines, *self.remarks]))]
        return Group(*found, *([Text(), self._segments()] if self.segments else []))

    def _segments(self) -> RenderableType:
        table = plain_table("parts of the share, each by itself", ("largest operation",), _SEGMENT_COLUMNS)
        for item in self.segments:
            known, ratio, rate = "failed", "", ""
            if item.compute_s:
                known, rate = format_seconds(item.compute_s), f"{item.flops / item.compute_s / 1e12:.4g}"
                ratio = f"{item.compute_s / item.modelled_s:.3f}" if item.modelled_s else ""
            row = (f"{item.count:g}", format_seconds(item.modelled_s), known, ratio, rate)
            table.add_row(item.label or item.fingerprint, *row)
        return table

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "device": self.device,
            "step_s": self.step_s,
            "compute_s": self.cost.compute,
            "communication_s": self.cost.communication,
            "measured_s": self.measured_s,
            "stand_in_s": self.stand_in_s,
            "planned_compute_s": self.plan.cost.compute,
            "tflops_per_device": self.tflops_per_device,
            "memory_bytes": self.memory.compiled,
            "planned_memory_bytes": self.memory.planned,
            "peak_bytes": self.peak_bytes,
            "flops": self.flops.compiled,
            "planned_flops": self.flops.planned,
            "compile_s": self.compile_s,
            "steps": self.steps,
            "segments": [asdict(item) for item in self.segments],
            "remarks": list(self.remarks),
        }


def rehearse(
    plan: PlanData,
    function: Any = None,
    args: Sequence[Any] = (),
    device: Any = None,
    steps: int = 10,
    segments: bool = True,
) -> "Rehearsal | PipelineRehearsal":
    """See `Plan.rehearse`."""
    import jax

    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ShardingError(f"steps is {steps!r}; give the number of steps to time, 0 to compile alone")
    traced = traced_function(plan, function, args)
    device = jax.local_devices()[0] if device is None else device
    if plan.stages:
        return rehearse_stages(plan, traced, device, steps, _other_chip(plan, device))
    started = time.perf_counter()
    share = Share.of(plan, traced)
    compiled = share.compile(device)
    compile_s, memory_bytes = time.perf_counter() - started, allocated_bytes(compiled)
    remarks = _remarks(plan, share, device)
    if is_allowed() and not _other_chip(plan, device):
        with open_database() as database:
            keep_memory(database, plan, traced, memory_bytes, modelled_bytes(plan))
    measured_s = None
    if steps and _fits(memory_bytes, device, remarks):
        given = traced.call.arguments.pick(tuple(args)) if function is not None else None
        try:
            measured_s = time_share(share, compiled, share.draw(device, given), steps)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            remarks.append(f"The device ran out of memory: {str(error).splitlines()[0][:120]}")
    timed = _segment_times(plan, traced, device, remarks) if segments and measured_s is not None else ()
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use") if device.platform != "cpu" else None
    return Rehearsal(
        plan,
        device.device_kind,
        measured_s,
        sum(stand_in_s(plan.mesh, item) for item in plan.collectives),
        Compared(plan.memory.peak_bytes, memory_bytes),
        Compared(plan.flops, flops_of(text_of(compiled))),
        peak,
        compile_s,
        ROUNDS * steps,
        timed,
        tuple(remarks),
    )


def _segment_times(plan: PlanData, traced: Traced, device: Any, remarks: list[str]) -> tuple[SegmentTime, ...]:
    candidates = [Candidate(plan, traced, part) for part in parts_of(plan, traced.graph)]
    with my_turn(log.warning), open_database() as database:
        measuring = Measuring(device, database)
        found = measuring.measure(candidates)
    remarks += measuring.remarks
    rows = [Measured(plan, c.part, found.get(c.key(device))) for c in candidates]
    return tuple(
        SegmentTime(p.label, p.fingerprint, p.count, row.compute_s(), p.modelled_s, p.flops)
        for p, row in ((row.part, row) for row in rows)
    )


def traced_function(plan: PlanData, function: Any, args: Sequence[Any]) -> Traced:
    """The function of a plan, traced; a fresh plan knows its own.

    Raises:
        ShardingError: The plan was loaded and no function is given.
    """
    if function is not None:
        return traced_as_planned(plan, trace(function, *args, cluster=plan.mesh.cluster))
    if plan.origin is None:
        raise ShardingError(
            "a plan that was loaded does not know its function: call plan.rehearse(function, *arguments), with the "
            "arguments or their types"
        )
    return traced_as_planned(plan, plan.origin)


def time_share(share: Share, compiled: Any, values: Sequence[Any], steps: int) -> float:
    """Seconds of one step: the quickest of several rounds, each of some steps one after the other."""
    import jax

    values = jax.block_until_ready(share.step(compiled, values))
    found = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(steps):
            values = share.step(compiled, values)
        jax.block_until_ready(values)
        found.append((time.perf_counter() - started) / steps)
    return min(found)


def _remarks(plan: PlanData, share: Share, device: Any) -> list[str]:
    found = _other_chip(plan, device)
    if share.device.whole:
        names = ", ".join(sorted(share.device.whole))
        found.append(f"Some operations could not be computed on one device's part, and ran whole: {names}.")
    return found


def _other_chip(plan: PlanData, device: Any) -> list[str]:
    chip = plan.mesh.chip
    if chip is None or device.device_kind in chip.device_kinds:
        return []
    return [f"It was measured on {device.device_kind}; the plan is for {chip.name}."]


def _fits(needed: int, device: Any, remarks: list[str]) -> bool:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if not limit or needed <= limit:
        return True
    remarks.append(f"It was not run: it needs {format_bytes(needed)}, and the device has {format_bytes(limit)}.")
    return False
