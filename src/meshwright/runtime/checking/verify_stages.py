"""Compares a pipelined plan with the programs that XLA compiles from its stages, and with what the stages send.

All figures follow from the instructions that the runtime carries out: a program counts as often as it runs, a transfer
as often as it is made, and the memory of a stage is that of the arrays it holds at each instruction, with the temporary
memory of the program that runs.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph import Traced
from meshwright.parallelism.subject.subject import Subjects
from meshwright.parallelism.words import bytes_on_device
from meshwright.plans.plan import PlanData
from meshwright.plans.stage import Stage
from meshwright.runtime.checking.compiled import CompiledCollective, collectives_of, flops_of, text_of
from meshwright.runtime.checking.figures import (
    Compared,
    Kind,
    by_kind,
    byte_rows,
    figures_table,
    flops_row,
    kinds_to_json,
    named_kinds,
    total,
)
from meshwright.runtime.checking.rematerialized import Rematerialized, heard, rematerialized_lines
from meshwright.runtime.checking.stage_memory import Key, key_of, peak_bytes
from meshwright.runtime.spmd import check_types
from meshwright.runtime.stages.bound import Move
from meshwright.runtime.stages.engine import Engine
from meshwright.runtime.stages.pipeline_program import PipelineProgram
from meshwright.runtime.transfer.reshard import boxes
from meshwright.runtime.transfer.routes import find_route, volume
from meshwright.schedules.base import BACKWARD, FORWARD, WEIGHTS
from meshwright.schedules.instructions import EXCHANGE, PARAMETERS

ACTIVATIONS, GRADIENTS, SHARED = "activations sent", "gradients sent", "shared values sent"
_SENT = {FORWARD: ACTIVATIONS, BACKWARD: GRADIENTS, WEIGHTS: GRADIENTS, PARAMETERS: SHARED, EXCHANGE: SHARED}


@dataclass(frozen=True)
class StageVerification:
    """Planned and compiled figures of one stage, for one of its devices and one step.

    Attributes:
        collectives: Bytes inside the stage by kind and axes; axis x is that of the replicas.
        sent: Bytes to other stages: activations, their gradients, and shared values: parameters that several stages
            read, their gradients, and what the stages of an update tell each other.
        memory: Peak bytes: by the plan, and of the arrays and temporaries while the instructions are carried out.
        arrays: The part of the peak that is arrays between programs; the rest are temporaries, which XLA decides.
        flops: Flops of matrix products and convolutions; the plan's with its recomputation.
        made: Every collective of the compiled programs.
        texts: The compiled programs by name, as XLA writes them.
    """

    collectives: Mapping[Kind, Compared]
    sent: Mapping[str, Compared]
    memory: Compared
    arrays: Compared
    flops: Compared
    made: tuple[CompiledCollective, ...] = field(default=(), repr=False)
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def bytes(self) -> Compared:
        """Bytes of all collectives and transfers together."""
        return total((*self.collectives.values(), *self.sent.values()))

    def rows(self) -> Iterator[Sequence[str]]:
        """Rows of the table."""
        yield from byte_rows([*named_kinds(self.collectives), *self.sent.items(), ("all bytes", self.bytes)])
        yield from byte_rows([("memory", self.memory), ("of which arrays", self.arrays)])
        yield flops_row(self.flops)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        sent = {name: pair.to_json() for name, pair in self.sent.items()}
        figures = {name: getattr(self, name).to_json() for name in ("memory", "arrays", "flops")}
        return {"collectives": kinds_to_json(self.collectives), "sent": sent, **figures}


@dataclass(frozen=True)
class PipelineVerification:
    """Planned and compiled figures of a pipeline.

    Attributes:
        stages: Those of each stage.
        backend: The backend that the programs were compiled for.
        compile_s: How long the compilation took.
        rematerialized: As in `Verification`, of all stages together.
    """

    stages: tuple[StageVerification, ...]
    backend: str
    compile_s: float
    rematerialized: tuple[Rematerialized, ...] | None = ()

    @property
    def bytes(self) -> Compared:
        """Bytes of all collectives and transfers of one device, added over the stages."""
        return total(stage.bytes for stage in self.stages)

    @property
    def flops(self) -> Compared:
        """Flops of one device, added over the stages."""
        return total(stage.flops for stage in self.stages)

    @property
    def memory(self) -> Compared:
        """The most bytes of any device, planned and compiled."""
        found = [stage.memory for stage in self.stages]
        return Compared(max(pair.planned for pair in found), max(pair.compiled for pair in found))

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "backend": self.backend,
            "compile_s": self.compile_s,
            "stages": [stage.to_json() for stage in self.stages],
            "rematerialized": None if self.rematerialized is None else [asdict(one) for one in self.rematerialized],
        }

    def __str__(self) -> str:
        rows = [row for number, stage in enumerate(self.stages) for row in ((f"stage {number}",), *stage.rows())]
        count = sum(len(stage.texts) for stage in self.stages)
        head = f"Compiled {count} programs for {self.backend} in {self.compile_s:.1f} s"
        return "\n".join([head, *figures_table(rows), *rematerialized_lines(self.rematerialized)])


def verify_stages(
    plan: PlanData,
    traced: Traced,
    devices: Sequence[Any] | None,
    compiler_options: Mapping[str, Any] | None,
) -> PipelineVerification:
    """Compiles the stages of a plan for devices, which need not be there, and compares."""
    return verify_program(staged_program(plan, traced, devices), compiler_options)


def staged_program(plan: PlanData, traced: Traced, devices: Sequence[Any] | None) -> PipelineProgram:
    """The stages of a plan on devices, which need not be there: a program to examine, not to call."""
    check_types(_taken(plan), traced.call.program.input_types)
    donated = frozenset(i for i, t in enumerate(_taken(plan)) if t.donated)
    traced = replace(traced, graph=replace(traced.graph, donated=donated | traced.graph.donated))
    return PipelineProgram(plan, traced, [_batch(plan, traced)], devices, is_whole=True)


def verify_program(program: PipelineProgram, compiler_options: Mapping[str, Any] | None = None) -> PipelineVerification:
    """Compares the programs of a pipeline with its plan."""
    engine, plan = program.engine, program.plan
    started = time.perf_counter()
    with heard() as warnings:
        compiled = engine.compiled(options=compiler_options)
    seconds = time.perf_counter() - started
    stages = compare_stages(plan, engine, compiled)
    kind = engine.devices[0].mesh.devices.flat[0].device_kind
    count = sum(own.mesh.size for own in engine.devices)
    whole = warnings.found() if warnings.counted else None
    return PipelineVerification(stages, f"{count} {kind}", seconds, whole)


def compare_stages(plan: PlanData, engine: Engine, compiled: Mapping[Key, Any]) -> tuple[StageVerification, ...]:
    """The figures of each stage, given its compiled programs, or what has their text and their `memory_analysis`."""
    found, subjects = _Compiled(plan, engine, compiled), Subjects(plan)
    return tuple(found.stage(number, subjects[number]) for number in range(len(plan.stages)))


def _taken(plan: PlanData) -> list[Any]:
    return [t for t in plan.arguments if t.role != "static"]


def _batch(plan: PlanData, traced: Traced) -> int:
    """The argument that is the batch: the first whose leaves are data with rows."""
    leaves = iter(plan.arguments)
    for number, child in enumerate(traced.call.arguments.tree.children()):
        own = [next(leaves) for _ in range(child.num_leaves)]
        arrays = [tensor for tensor in own if tensor.role != "static"]
        if arrays and all(tensor.role == "data" and tensor.shape for tensor in arrays):
            return number
    raise ShardingError(
        "the plan has no argument that is a batch, and a pipeline takes one in microbatches: give the examples as one "
        "argument, stacked along the first dim of its arrays"
    )


class _Compiled:
    """The compiled programs of a pipeline, and how often each runs."""

    def __init__(self, plan: PlanData, engine: Engine, compiled: Mapping[Key, Any]):
        self.plan, self.engine, self.compiled = plan, engine, compiled
        self.texts = {key: text_of(one) for key, one in compiled.items()}
        self.runs = Counter(key_of(one.program) for one in engine.bound if one.program is not None)
        self.peaks = peak_bytes(engine, compiled)
        self.sent = self._sent()

    def stage(self, number: int, subject: Any) -> StageVerification:
        """The figures of one stage."""
        stage, keys = self.plan.stages[number], [key for key in self.runs if key[1] == number]
        made = [
            replace(item, trips=item.trips * self.runs[key])
            for key in keys
            for item in collectives_of(self.texts[key], stage.mesh.shape)
        ]
        planned = [item for item in subject.collectives if item.kind != "transfer"]
        scatters = self.engine.devices[number].mesh.devices.flat[0].platform != "cpu"
        flops = sum(self.runs[key] * flops_of(self.texts[key]) for key in keys)
        return StageVerification(
            by_kind(planned, made, scatters),
            self._transfers(number),
            Compared(stage.peak_bytes, self.peaks[number].total),
            Compared(stage.peak_bytes - stage.transient_bytes, self.peaks[number].arrays),
            Compared(planned_flops(stage), flops),
            tuple(made),
            {str(self.engine.lowered[key].program): self.texts[key] for key in sorted(keys)},
        )

    def _transfers(self, number: int) -> dict[str, Compared]:
        """Bytes that a device of a stage sends to other stages."""
        plan, stages = self.plan, self.plan.stages
        assert plan.pipeline is not None
        times = plan.pipeline.num_microbatches * plan.pipeline.interleave
        stage, before = stages[number], stages[number - 1]
        back = before.send_bytes * before.mesh.num_devices / stage.mesh.num_devices
        trains = any(s.backward.total_s for s in stages)
        planned = {
            ACTIVATIONS: times * stage.send_bytes,
            GRADIENTS: times * back * trains,
            SHARED: _shared_bytes(plan, number),
        }
        found = {name: self.sent[number, name] / stage.mesh.num_devices for name in planned}
        return {name: Compared(planned[name], found[name]) for name in planned if planned[name] or found[name]}

    def _sent(self) -> Counter[tuple[int, str]]:
        """Bytes that go from the devices of each stage to those of others."""
        hosts = _hosts(self.plan, self.engine)
        routes: dict[int, int] = {}
        found: Counter[tuple[int, str]] = Counter()
        for one in self.engine.bound:
            if isinstance(one.run, Move):
                if id(one.run) not in routes:
                    routes[id(one.run)] = _moved_bytes(one.run, hosts)
                found[one.source, _SENT[one.work]] += routes[id(one.run)]
        return found


def planned_flops(stage: Stage) -> float:
    """The flops of a stage's step; recomputed products are counted by their share of the time of products."""
    products = stage.forward.product_s + stage.backward.product_s
    return stage.flops * (1 + (stage.recompute.product_s / products if products else 0.0))


def _shared_bytes(plan: PlanData, number: int) -> float:
    """Bytes that a stage sends for parameters that another one reads, too: the owner the parameter, the other its
    gradient."""
    whole = {t.path: t.shape for t in plan.arguments}
    sent = 0.0
    for tensor in plan.stages[number].tensors:
        if tensor.role == "parameters" and tensor.shape == whole.get(tensor.path):
            others = [s for s in plan.stages if any(t.path == tensor.path for t in s.tensors)]
            size = bytes_on_device(tensor.shape, tensor.dtype, tensor.spec, plan.stages[number].mesh.shape)
            owns = others[0] is plan.stages[number]
            sent += size * (len(others) - 1 if owns else 1)
    return sent


def _hosts(plan: PlanData, engine: Engine) -> dict[Any, Any]:
    """The host of the plan's cluster that each device stands for."""
    found: dict[Any, Any] = {}
    for stage, own in zip(plan.stages, engine.devices, strict=True):
        for place, device in enumerate(own.mesh.devices.flat):
            found[device] = stage.submesh.first_host + place // stage.submesh.devices_per_host
    return found


def _moved_bytes(move: Move, hosts: Mapping[Any, Any]) -> int:
    """Bytes that pass from the source's devices to others, as the hosts of the plan's cluster would send them."""
    itemsize, shape = jax_compat.itemsize(move.type.dtype), tuple(move.type.shape)
    source, target = boxes(shape, move.source), boxes(shape, move.target)
    route = find_route(source, target, itemsize, hosts.__getitem__)
    return itemsize * sum(volume(one.box) for one in route.fetches if one.source != one.target)
