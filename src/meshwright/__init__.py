"""Meshwright finds, explains, simulates and runs the best way to split single-device JAX code over a cluster.

Importing this package loads neither JAX nor numba: every public name is loaded when it is first used.
"""

from importlib import import_module
from typing import Any

from meshwright import lazy

_PUBLIC = {
    "CheckpointError": "errors",
    "ClusterError": "errors",
    "DeviceOutOfMemory": "errors",
    "DoesNotFit": "errors",
    "MeshwrightError": "errors",
    "OutputError": "errors",
    "PlanFileError": "errors",
    "ProblemError": "errors",
    "ProcessError": "errors",
    "RuleError": "errors",
    "ServingError": "errors",
    "ShardingError": "errors",
    "SimulationError": "errors",
    "TraceError": "errors",
    "TrainingError": "errors",
    "Cluster": "hardware",
    "Mesh": "hardware",
    "cluster": "profiler",
    "Loop": "rules",
    "LoopNest": "rules",
    "nest": "rules",
    "rule": "rules",
    "Auto": "planner.methods",
    "DataParallel": "planner.methods",
    "Manual": "planner.methods",
    "Plan": "facade",
    "TensorParallel": "planner.methods",
    "Zero": "planner.methods",
    "ThreeD": "pipeline.search.equal_stages",
    "boundary": "pipeline.boundary",
    "current_mesh": "graph.tracing.planned_mesh",
    "plan": "planning",
    "initialize": "runtime.processes.initialize",
    "preempted": "runtime.processes.preemption",
    "reshard": "runtime.transfer.reshard",
    "parallelize": "training.parallelize",
    "compare": "training.compare",
    "create_state": "training.state",
    "restore": "training.saving.checkpoints",
    "save": "training.saving.checkpoints",
    "saved_steps": "training.saving.checkpoints",
    "batches": "training.data",
    "follow": "training.state",
    "train": "trainer.train",
    "ChoiceProblem": "solver",
    "Solution": "solver",
    "solve": "contest",
    "explore": "exploration.explore",
    "simulate": "simulator.simulate",
    "find_blocks": "blocks",
    "get_model": "serving.api",
    "Slo": "serving.planning.promise",
    "plan_serving": "serving.planning.plan_serving",
    "place_models": "serving.planning.placement",
    "Traffic": "serving.planning.traffic",
}

_FOLDERS = ("hf",)  # packages whose names are used through this one, such as `mw.hf.load`

__version__ = "0.1.0"
__all__ = sorted(_PUBLIC)  # no folders: they need extras


def __getattr__(name: str) -> Any:
    return import_module(f"{__name__}.{name}") if name in _FOLDERS else lazy.load(__name__, _PUBLIC, name)


def __dir__() -> list[str]:
    return [*__all__, *_FOLDERS, "__version__"]
