"""Compares a plan with the program that XLA compiles from it: collectives by kind and axes, memory, flops."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshwright.errors import ShardingError
from meshwright.plans.plan import PlanData
from meshwright.runtime.checking.compiled import CompiledCollective, collectives_of, flops_of
from meshwright.runtime.spmd import spmd
from meshwright.units import format_bytes


@dataclass(frozen=True)
class Compared:
    """One figure, planned and compiled."""

    planned: float
    compiled: float

    @property
    def ratio(self) -> float:
        """Compiled ÷ planned; 1 where both are zero."""
        return self.compiled / self.planned if self.planned else (1.0 if not self.compiled else float("inf"))


@dataclass(frozen=True)
class Verification:
    """Planned and compiled figures, for one device and one step.

    Attributes:
        collectives: Bytes by kind and axes.
        memory: Peak bytes: by the plan's liveness, and as XLA allocates them (packed, which may exceed the peak of
            live bytes).
        flops: Flops of matrix products and convolutions.
        backend: The backend that the program was compiled for.
        compile_s: How long the compilation took.
        made: Every collective of the compiled program.
        text: The compiled program, as XLA writes it.
    """

    collectives: Mapping[tuple[str, tuple[str, ...]], Compared]
    memory: Compared
    flops: Compared
    backend: str
    compile_s: float
    made: tuple[CompiledCollective, ...] = field(default=(), repr=False)
    text: str = field(default="", repr=False)

    @property
    def bytes(self) -> Compared:
        """Bytes of all collectives together."""
        found = self.collectives.values()
        return Compared(sum(c.planned for c in found), sum(c.compiled for c in found))

    def __str__(self) -> str:
        rows = [("", "planned", "compiled", "ratio")]
        named = [(f"{kind} over {', '.join(axes)}", pair) for (kind, axes), pair in sorted(self.collectives.items())]
        for name, pair in [*named, ("all collectives", self.bytes), ("memory", self.memory)]:
            rows.append((name, format_bytes(pair.planned), format_bytes(pair.compiled), f"{pair.ratio:.3f}"))
        rows.append(("flops", f"{self.flops.planned:.3g}", f"{self.flops.compiled:.3g}", f"{self.flops.ratio:.3f}"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
        return "\n".join([f"Compiled for {self.backend} in {self.compile_s:.1f} s", *lines])


def verify(
    plan: PlanData,
    function: Any = None,
    args: Sequence[Any] = (),
    devices: Sequence[Any] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
) -> Verification:
    """See `Plan.verify`."""
    if function is None:
        if plan.origin is None:
            raise ShardingError(
                "a plan that was loaded does not know its function: call plan.verify(function, *arguments), with the "
                "arguments or their types"
            )
        call = plan.origin.call
        function, args = plan.origin.function, call.arguments.fill(call.types)
    started = time.perf_counter()
    lowered = spmd(plan, function, devices).lower(*args)
    compiled = lowered.compile(compiler_options=dict(compiler_options or {}))
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    made = collectives_of(text, plan.mesh.shape)
    # XLA's CPU backend has no reduce-scatter; it sends the same bytes in an all-reduce, followed by a slice.
    scatters = _devices(devices)[0].platform != "cpu"
    return Verification(
        _by_kind(plan.collectives, made, scatters),
        Compared(plan.memory.peak_bytes, allocated_bytes(compiled)),
        Compared(plan.flops, flops_of(text)),
        _backend(devices),
        seconds,
        tuple(made),
        text,
    )


def allocated_bytes(compiled: Any) -> int:
    """Bytes that a compiled program allocates on one device: arguments, temporaries, results that alias none."""
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return int(memory.argument_size_in_bytes + memory.temp_size_in_bytes + results)


def _by_kind(planned: Any, made: Any, scatters: bool) -> dict[tuple[str, tuple[str, ...]], Compared]:
    totals: list[Counter[tuple[str, tuple[str, ...]]]] = []
    for items in (planned, made):
        total: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for item in items:
            kind = "all_reduce" if item.kind == "reduce_scatter" and not scatters else item.kind
            total[kind, tuple(item.axes)] += item.bytes * item.trips
        totals.append(total)
    keys = sorted({*totals[0], *totals[1]})
    return {key: Compared(float(totals[0][key]), float(totals[1][key])) for key in keys}


def _backend(devices: Sequence[Any] | None) -> str:
    found = _devices(devices)
    return f"{len(found)} {found[0].device_kind}"


def _devices(devices: Sequence[Any] | None) -> list[Any]:
    import jax

    return list(jax.devices() if devices is None else devices)
