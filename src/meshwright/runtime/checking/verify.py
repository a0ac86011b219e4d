"""Compares a plan with the program that XLA compiles from it: collectives by kind and axes, memory, flops."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from meshwright.errors import ShardingError
from meshwright.graph import trace
from meshwright.plans.loops import loops_of, trips_not_stated
from meshwright.plans.operations import Collective
from meshwright.plans.plan import PlanData
from meshwright.runtime.checking.compiled import CompiledCollective, collectives_of, flops_of, frames_of, text_of
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
from meshwright.runtime.checking.verify_stages import PipelineVerification, verify_stages
from meshwright.runtime.spmd import spmd


@dataclass(frozen=True)
class Verification:
    """Planned and compiled figures, for one device and one step.

    Attributes:
        collectives: Bytes by kind and axes.
        memory: Peak bytes: by the plan's liveness, and as XLA allocates them (packed, which may exceed the peak of
            live bytes).
        flops: Flops of matrix products, convolutions and fused attention.
        backend: The backend that the program was compiled for.
        compile_s: How long the compilation took.
        rematerialized: Values that XLA gathers whole because it knows no better way to reshard them; None where XLA's
            warnings of them are turned off.
        hidden: Bytes by kind and axes of collectives that run beside compute: as the plan is simulated, and compiled
            asynchronous with work between start and end. Empty for backends without asynchronous collectives.
        made: Every collective of the compiled program.
        text: The compiled program, as XLA writes it.
    """

    collectives: Mapping[Kind, Compared]
    memory: Compared
    flops: Compared
    backend: str
    compile_s: float
    rematerialized: tuple[Rematerialized, ...] | None = ()
    hidden: Mapping[Kind, Compared] = field(default_factory=dict)
    made: tuple[CompiledCollective, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)

    @property
    def bytes(self) -> Compared:
        """Bytes of all collectives together."""
        return total(self.collectives.values())

    @property
    def hidden_share(self) -> float:
        """The part of the bytes planned as hidden that is compiled to run beside compute; 1 where none is planned."""
        planned = total(self.hidden.values()).planned
        return sum(min(pair.planned, pair.compiled) for pair in self.hidden.values()) / planned if planned else 1.0

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        kinds = kinds_to_json(self.collectives)
        figures = {"collectives": kinds, "memory": self.memory.to_json(), "flops": self.flops.to_json()}
        figures |= {"hidden": kinds_to_json(self.hidden)}
        whole = None if self.rematerialized is None else [asdict(one) for one in self.rematerialized]
        return {"backend": self.backend, "compile_s": self.compile_s, **figures, "rematerialized": whole}

    def __str__(self) -> str:
        bytes_of = [*named_kinds(self.collectives), ("all collectives", self.bytes), ("memory", self.memory)]
        beside = [("beside compute",), *byte_rows(named_kinds(self.hidden))] if self.hidden else []
        lines = figures_table([*byte_rows(bytes_of), flops_row(self.flops), *beside])
        head = f"Compiled for {self.backend} in {self.compile_s:.1f} s"
        return "\n".join([head, *lines, *rematerialized_lines(self.rematerialized)])


def verify(
    plan: PlanData,
    function: Any = None,
    args: Sequence[Any] = (),
    devices: Sequence[Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    hidden: Mapping[Kind, float] | None = None,
) -> Verification | PipelineVerification:
    """See `Plan.verify`; ``hidden`` are the bytes that are planned to be sent beside compute."""
    if function is None and plan.origin is None:
        raise ShardingError(
            "a plan that was loaded does not know its function: call plan.verify(function, *arguments), with the "
            "arguments or their types"
        )
    if plan.stages:
        traced = plan.origin if function is None else trace(function, *args, cluster=plan.mesh.cluster)
        return verify_stages(plan, traced, devices, compiler_options)
    if function is None:
        call = plan.origin.call
        function, args = plan.origin.function, call.arguments.fill(call.types)
    started = time.perf_counter()
    lowered = spmd(plan, function, devices).lower(*args)
    with heard() as warnings:
        compiled = lowered.compile(compiler_options=dict(compiler_options or {}))
    seconds = time.perf_counter() - started
    text = text_of(compiled)
    made = collectives_of(text, plan.mesh.shape)
    scatters = _devices(devices)[0].platform != "cpu"
    return Verification(
        by_kind(_as_stated(plan), made, scatters),
        Compared(plan.memory.peak_bytes, allocated_bytes(compiled)),
        Compared(_stated_flops(plan), flops_of(text)),
        _backend(devices),
        seconds,
        warnings.found(frames_of(text)) if warnings.counted else None,
        _hidden(hidden or {}, made) if scatters else {},
        tuple(made),
        text,
    )


def _as_stated(plan: PlanData) -> list[Collective]:
    """The plan's collectives with the trips that XLA states: one of a loop whose length follows from no constant."""
    loops = loops_of(plan)
    if not loops:
        return list(plan.collectives)
    return [replace(one, trips=one.trips / trips_not_stated(loops, one.serial)) for one in plan.collectives]


def _stated_flops(plan: PlanData) -> float:
    """The plan's FLOPs, likewise."""
    loops, more = loops_of(plan), 0.0
    for op in plan.ops if loops else ():
        if op.load is not None:
            more += op.load.flops * op.load.trips * (1 - 1 / trips_not_stated(loops, op.serial))
    return plan.flops - more


def _hidden(planned: Mapping[Kind, float], made: Sequence[CompiledCollective]) -> dict[Kind, Compared]:
    """Bytes beside compute by kind and axes, planned and compiled."""
    compiled: Counter[Kind] = Counter()
    for item in made:
        compiled[item.kind, item.axes] += item.bytes * item.trips if item.beside else 0
    kinds = sorted({kind for kind, size in {**planned, **compiled}.items() if size})
    return {kind: Compared(planned.get(kind, 0.0), float(compiled[kind])) for kind in kinds}


def allocated_bytes(compiled: Any) -> int:
    """Bytes that a compiled program allocates on one device: arguments, temporaries, results that alias none."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)


def _backend(devices: Sequence[Any] | None) -> str:
    found = _devices(devices)
    return f"{len(found)} {found[0].device_kind}"


def _devices(devices: Sequence[Any] | None) -> list[Any]:
    import jax

    return list(jax.devices() if devices is None else devices)
