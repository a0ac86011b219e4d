"""Plans to look at: zoo models of test size on abstract meshes, each traced once."""

from functools import cache

import meshwright as mw
from meshwright.planner.planner import Task
from tests.planner.examples import traced_zoo


@cache
def traced(name, options=()):
    return traced_zoo(name, **dict(options))


def plan_of(name, shape, method, memory_bytes=None, **options):
    """A plan on a mesh where compute is free, so that every product must be split."""
    mesh = mw.Mesh.abstract(shape, 1.0, 1e-3, memory_bytes)
    return mw.Plan.of(Task(traced(name, tuple(sorted(options.items()))), method).plan([mesh], lambda _: None))


@cache
def tensor_parallel():
    """GPT, data parallel over x and tensor parallel over y."""
    return plan_of("gpt-tiny", (4, 2), mw.TensorParallel())


@cache
def found():
    """GPT as the search likes it."""
    return plan_of("gpt-tiny", (4, 2), mw.Auto())
