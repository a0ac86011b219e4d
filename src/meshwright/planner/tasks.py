"""The tasks of one search: each step that it plans is grouped, and priced on each mesh, once for all methods."""

from collections.abc import Callable

from meshwright.graph import Traced
from meshwright.hardware import Mesh
from meshwright.planner.methods import Method
from meshwright.planner.planner import Task, program_task
from meshwright.planner.pricing.corrections import Corrections
from meshwright.planner.pricing.user_shardings import meshes_as_written

_MOST = 4  # tasks that are kept, since another method may plan the same step


class Tasks:
    """The tasks of the latest steps.

    Args:
        corrections: What was measured of a step on a mesh.
    """

    def __init__(self, corrections: Callable[[Traced, Mesh], Corrections | None]):
        self._corrections = corrections
        self._latest: dict[int, tuple[Traced, Task]] = {}  # by the identity of the step, which is kept alive for that

    def of(self, traced: Traced, meshes: list[Mesh], method: Method) -> tuple[Task, list[Mesh]]:
        """What is to be planned as one program by a method, and the meshes to try."""
        known = self._latest.pop(id(traced), None)
        if known is None:
            corrections = self._corrections(traced, meshes[0])
            known = traced, program_task(traced, meshes, method, corrections)[0]
        self._latest[id(traced)] = known
        while len(self._latest) > _MOST:
            del self._latest[next(iter(self._latest))]
        return known[1].by(method), meshes_as_written(traced.graph, meshes)
