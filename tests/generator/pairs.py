"""Pairs of a drawn program and a plan: plans it, runs it on virtual devices, and compares with one device."""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

import meshwright as mw
from meshwright.graph import trace
from meshwright.planner.budget import Budget
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.runtime.spmd import spmd
from meshwright.solver.problem.solution import Solution, Status
from tests.generator.programs import Drawn, differences

MESHES = ((2,), (4,), (8,), (2, 4), (2, 2, 2), (3,), (6,))
METHODS = (mw.Auto(), mw.DataParallel(), mw.Zero(stage=1), mw.Zero(stage=2), mw.Zero(stage=3), mw.TensorParallel())
CLUSTERS = ("1x8 cpu", "2x4 h100", "1x4 cpu", "1x2 cpu")
PLANS = ("random", "random", "random", "method", "cluster")  # of each program
MICROBATCHES = (2, 4)
BATCH = 8


@dataclass(frozen=True)
class Outcome:
    """What came of a pair.

    Attributes:
        pair: The pair, in words.
        seconds: How long planning took.
        trouble: What went wrong; empty for nothing.
    """

    pair: str
    seconds: float
    trouble: str


def outcome(seed: int, number: int) -> Outcome:
    """Plans one program in one of the ways of `PLANS`, runs it and compares; one program in five in microbatches."""
    rng = np.random.default_rng((seed, number))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program, expected, trust = _on_one_device(seed)
        started, kind = time.perf_counter(), PLANS[number % len(PLANS)]
        seconds, trouble = 0.0, ""
        try:
            kind, run = _cut(program, rng) if program.batch else _planned(program, kind, rng)
            seconds = time.perf_counter() - started
            found = run(*program.args)
            trouble = "; ".join(differences(expected, found, trust))
            # XLA gets some programs wrong on one device; then their operations, one by one, are what counts.
            if trouble and not differences(program.on_one_device(*program.args), found, trust):
                trouble = ""
        except Exception as error:
            trouble = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            seconds = seconds or time.perf_counter() - started
    return Outcome(f"{seed}.{number} {kind} of {program}", seconds, trouble)


@lru_cache(maxsize=1)
def _on_one_device(seed: int) -> tuple[Drawn, Any, tuple[int, ...]]:
    """A program, its results on one device, and how strictly each of them is compared."""
    program = Drawn(seed, 4, BATCH, kernels=True) if seed % 5 == 4 else Drawn(seed, kernels=True)
    results = jax.block_until_ready(jax.jit(program.on_one_device)(*program.args))
    return program, results, tuple(program.trust)


def _planned(program: Drawn, kind: str, rng: np.random.Generator) -> tuple[str, Callable[..., Any]]:
    name, plan = plan_of(program, kind, rng)
    return name, spmd(plan, program)


def plan_of(program: Drawn, kind: str, rng: np.random.Generator) -> tuple[str, mw.Plan]:
    if kind == "cluster":
        cluster = str(rng.choice(CLUSTERS))
        return f"Auto on {cluster}", mw.plan(program, *program.args, cluster=cluster)
    shape = MESHES[rng.integers(len(MESHES))]
    mesh = _mesh(shape)
    if kind == "method":
        method = METHODS[rng.integers(len(METHODS))]
        plan = _or_auto(lambda by: mw.plan(program, *program.args, mesh=mesh, method=by), method)
        return f"{method.name} on {shape}", plan
    return f"{kind} on {shape}", random_plan(program, program.args, mesh, rng)


def random_plan(function: Any, args: tuple[Any, ...], mesh: mw.Mesh, rng: np.random.Generator) -> mw.Plan:
    """A plan with a strategy drawn for each group."""
    task = Task(trace(function, *args), mw.Auto(), folding=bool(rng.random() < 0.5))
    view = View(task.formulate(mesh), None)
    choice = np.array([rng.integers(len(cost)) for cost in view.formulation.costs])
    drawn = Solution(Status.FEASIBLE, choice, 0.0, 0.0, 0.0)
    return task._read_back(ViewState(view, latest=drawn, free=drawn), [], Budget(0.0))


def _cut(program: Drawn, rng: np.random.Generator) -> tuple[str, Callable[..., Any]]:
    method, shape, count = METHODS[rng.integers(2)], MESHES[rng.integers(4)], int(rng.choice(MICROBATCHES))

    def planned(method: Any) -> Callable[..., Any]:
        step = mw.parallelize(
            program, mesh=_mesh(shape), method=method, microbatches=count, batch_argnums=(0, 1), donate_argnums=()
        )
        step.plan(*program.args)
        return step

    return f"{method.name} on {shape} in {count} microbatches", _or_auto(planned, method)


def _or_auto(planned: Callable[[Any], Any], method: Any) -> Any:
    """What is planned by a method, or by Auto where the method refuses rows that devices cannot share evenly."""
    try:
        return planned(method)
    except mw.ShardingError as error:
        if "cannot share evenly" not in str(error):
            raise
        return planned(METHODS[0])


def _mesh(shape: tuple[int, ...]) -> mw.Mesh:
    return mw.Mesh.abstract(shape, alpha=1.0, beta=(1.0, 0.1, 0.05)[: len(shape)])
