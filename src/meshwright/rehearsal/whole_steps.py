"""Runs plans as whole programs on the devices of their mesh, in turn, and says which is faster."""

import time
from typing import Any

import jax

from meshwright.graph.tracing.trace import Traced
from meshwright.plans.plan import PlanData
from meshwright.rehearsal.program import drawn
from meshwright.runtime.spmd import Program, spmd

ROUNDS = 5  # in turn; the quickest of each plan counts


def faster(one: PlanData, other: PlanData, traced: Traced) -> tuple[PlanData, float]:
    """The plan whose step takes less time, and that time.

    Raises:
        jax.errors.JaxRuntimeError: One of them cannot be run here, such as for want of memory.
    """
    times = step_times([one, other], traced)
    return (one, times[0]) if times[0] <= times[1] else (other, times[1])


def step_times(plans: list[PlanData], traced: Traced) -> list[float]:
    """The quickest of several steps of each plan; the plans take turns, so that a busy moment spoils none of them."""
    steps = [Step(plan, traced) for plan in plans]
    found = [float("inf")] * len(plans)
    for _ in range(ROUNDS):
        for number, step in enumerate(steps):
            found[number] = min(found[number], step.time())
    return found


class Step:
    """A plan's program with arguments, which follow from step to step."""

    def __init__(self, plan: PlanData, traced: Traced):
        call = traced.call
        self.program: Program = spmd(plan, traced.function)
        self.arguments, self.state = call.arguments, dict(traced.graph.state)
        tensors = [t for t in plan.arguments if t.role != "static"]
        highest = max((max(t.shape, default=1) for t in tensors if t.role == "parameters"), default=2)
        pairs = zip(tensors, call.types, strict=True)
        self.values: list[Any] = [
            jax.device_put(drawn(tensor, kind, seed, highest), may_alias=False)  # its own: it may be donated
            for seed, (tensor, kind) in enumerate(pairs)
        ]
        self.time()  # compiles

    def time(self) -> float:
        started = time.perf_counter()
        made = jax.block_until_ready(self.program(*self.arguments.fill(self.values)))
        seconds = time.perf_counter() - started
        results = jax.tree_util.tree_leaves(made)
        for result, argument in self.state.items():
            self.values[argument] = results[result]
        return seconds
