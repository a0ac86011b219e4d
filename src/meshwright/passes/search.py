"""The search pass: the plan that measured segments lead to, its strategies block by block, and its step time."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from rich.console import Group, RenderableType

from meshwright.blocks import Block, Blocks
from meshwright.console import Printed, bare_table
from meshwright.graph import Traced
from meshwright.hardware import Cluster
from meshwright.planner.methods import Auto
from meshwright.planning import plan_traced
from meshwright.plans.plan import PlanData
from meshwright.progress import Say
from meshwright.rehearsal.learning.from_parts import leaders
from meshwright.rehearsal.whole_steps import Step
from meshwright.units import format_bytes, format_seconds

RUNS = 3
STEPS = 100  # of each run


@dataclass(frozen=True, slots=True)
class Chosen:
    """The strategies of one block: for each axis of the mesh, the type of the loop that it splits."""

    block: int
    label: str
    strategy: str


@dataclass(frozen=True, repr=False)
class ProfiledPlan(Printed):
    """What the search pass found.

    Attributes:
        plan: The plan.
        chosen: The strategies of the blocks of one occurrence of each segment, and of others that differ from it.
        runs_s: The mean step time of each run; empty where the devices are not here.
        steps: The steps of each run.
        seconds: How long the search took, measuring included.
    """

    plan: PlanData
    chosen: tuple[Chosen, ...]
    runs_s: tuple[float, ...]
    steps: int
    seconds: float

    @property
    def step_s(self) -> float:
        """The best run's step, or the planned one."""
        return min(self.runs_s, default=self.plan.cost.total)

    @property
    def tflops(self) -> float:
        """TFLOP of one device in one step."""
        return self.plan.flops / 1e12

    def __repr__(self) -> str:
        return f"<Search: {format_seconds(self.step_s)} a step, {self.tflops / self.step_s:.3g} TFLOP/s a device>"

    def __rich__(self) -> RenderableType:
        table = bare_table("block", "first contraction", "strategy", right=("block",))
        for one in self.chosen:
            table.add_row(str(one.block), one.label, one.strategy)
        shape = "×".join(map(str, self.plan.mesh.sizes))
        why = "its devices are not here" if self.steps else "no steps were asked for"
        runs = ", ".join(map(format_seconds, self.runs_s)) or f"not run: {why}"
        planned, memory = format_seconds(self.plan.cost.total), format_bytes(self.plan.memory.peak_bytes)
        lines = [
            f"step time, {RUNS} runs of {self.steps} steps: {runs}",
            f"planned step: {planned}; memory: {memory}",
            f"{self.tflops:.4g} TFLOP and {self.tflops / self.step_s:.4g} TFLOP/s per device",
            *self.plan.remarks,
        ]
        return Group(f"mesh {shape}, found in {format_seconds(self.seconds)}", "", table, "", *lines)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "mesh": self.plan.mesh.shape,
            "strategies": {one.block: one.strategy for one in self.chosen},
            "runs_s": list(self.runs_s),
            "steps": self.steps,
            "planned_s": self.plan.cost.total,
            "memory_bytes": self.plan.memory.peak_bytes,
            "tflop_per_device": self.tflops,
            "tflops_per_device": self.tflops / self.step_s if self.step_s else 0.0,
            "seconds": self.seconds,
            "remarks": list(self.plan.remarks),
        }


def search_plan(
    traced: Traced,
    blocks: Blocks,
    cluster: Cluster,
    mesh: tuple[int, ...] | dict[str, int] | None,
    seconds: float,
    steps: int = STEPS,
    say: Say = lambda _: None,
) -> ProfiledPlan:
    """Plans with measured segments, and runs the plan where its devices are here.

    Args:
        traced: The program.
        blocks: Its blocks.
        cluster: The cluster.
        mesh: One mesh view; None for all.
        seconds: The time that further measuring may take.
        steps: Steps of each of three runs; 0 runs nothing.
        say: Called with the progress.
    """
    started = time.perf_counter()
    say("searching")
    plan = plan_traced(traced, cluster, mesh, Auto(profile=True, profile_seconds=seconds), on_progress=say)
    taken = time.perf_counter() - started
    return ProfiledPlan(plan, tuple(_chosen(plan, blocks)), tuple(_run(plan, traced, steps, say)), steps, taken)


def _run(plan: PlanData, traced: Traced, steps: int, say: Say) -> list[float]:
    chip, here = plan.mesh.chip, jax.local_devices()
    fits = plan.mesh.num_devices <= len(here) and chip is not None and here[0].device_kind in chip.device_kinds
    if not (steps and fits) or jax.process_count() > 1:
        return []
    say("compiling the plan")
    step = Step(plan, traced)
    step.time()  # the first step takes longer
    seconds = []
    for run in range(RUNS):
        say(f"run {run + 1} of {RUNS}: {steps} steps")
        seconds.append(sum(step.time() for _ in range(steps)) / steps)
    return seconds


def _chosen(plan: PlanData, blocks: Blocks) -> list[Chosen]:
    """Strategies of the first occurrence of each segment, and of later ones where they differ."""
    strategies = leaders(plan)
    chosen: list[Chosen] = []
    for segment in blocks.segments:
        seen: set[tuple[str, ...]] = set()
        for numbers in segment.block_numbers:
            texts = tuple(_strategy(blocks.blocks[n], strategies, plan.mesh.names) for n in numbers)
            if texts not in seen:
                seen.add(texts)
                chosen += [Chosen(n, blocks.blocks[n].entries[0].name, t) for n, t in zip(numbers, texts, strict=True)]
    return sorted(chosen, key=lambda one: one.block)


def _strategy(block: Block, strategies: dict[int, tuple[int, ...]], names: Sequence[str]) -> str:
    """The types of the loops that the axes split in a block's first entry; ``-`` for an axis that splits none."""
    entry = block.entries[0]
    types = {loop: name for name, loops in entry.loops.items() for loop in loops}
    strategy = strategies.get(entry.operation)
    if strategy is None:
        return "not chosen by itself"
    return ", ".join(f"{axis}: {types.get(loop, '-')}" for axis, loop in zip(names, strategy, strict=True))
