"""Runs plans as whole programs on the devices of their mesh, in turn."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import jax
from jax.sharding import NamedSharding

from meshwright.graph.tracing.trace import Traced
from meshwright.plans.plan import PlanData, partition_spec
from meshwright.rehearsal.share.indices import Indices
from meshwright.rehearsal.share.program import drawn, longest
from meshwright.runtime.checking.verify import allocated_bytes
from meshwright.runtime.spmd import Program, spmd

ROUNDS = 5  # in turn; the quickest of each plan counts


def compiled_in(seconds: float, plan: PlanData, traced: Traced) -> "Step":
    """A plan's compiled program.

    Raises:
        TimeoutError: It takes longer. It is not waited for then, but goes on in a thread.
        jax.errors.JaxRuntimeError: It cannot be compiled.
    """
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(Step, plan, traced).result(None if seconds == float("inf") else seconds)
    finally:
        pool.shutdown(wait=False)


def step_times(steps: "Sequence[Step]") -> list[float]:
    """The quickest of several steps of each plan; the plans take turns, so that a busy moment spoils none of them.

    Raises:
        jax.errors.JaxRuntimeError: One of them cannot be run here, such as for want of memory.
    """
    for step in steps:
        step.time()  # the first step takes longer
    found = [float("inf")] * len(steps)
    for _ in range(ROUNDS):
        for number, step in enumerate(steps):
            found[number] = min(found[number], step.time())
    return found


class Step:
    """A plan's program, compiled; its arguments are drawn when it runs first, and follow from step to step."""

    def __init__(self, plan: PlanData, traced: Traced):
        self.plan, self.call, self.state = plan, traced.call, dict(traced.graph.state)
        self.indices = Indices.of(traced)
        self.program: Program = spmd(plan, traced.function)
        self.memory_bytes = allocated_bytes(self.program.compile(*self.call.arguments.fill(self.call.types)))

    @cached_property
    def values(self) -> list[Any]:
        """The arrays of the arguments."""
        tensors = [t for t in self.plan.arguments if t.role != "static"]
        rows, given, highest = self.indices.rows, self.indices.given, longest(tensors)
        values = [
            given[n].astype(kind.dtype) if n in given else drawn(t, kind, n, rows.get(n, highest))
            for n, (t, kind) in enumerate(zip(tensors, self.call.types, strict=True))
        ]
        places = [NamedSharding(self.program.mesh, partition_spec(t.spec)) for t in tensors]
        return [jax.device_put(x, place, may_alias=False) for x, place in zip(values, places, strict=True)]

    def time(self) -> float:
        """Seconds of one step."""
        arguments = self.call.arguments.fill(self.values)
        started = time.perf_counter()
        made = jax.block_until_ready(self.program(*arguments))
        seconds = time.perf_counter() - started
        results = jax.tree_util.tree_leaves(made)
        for result, argument in self.state.items():
            self.values[argument] = results[result]
        return seconds
