"""Factors on modelled times, from measurements.

Those of compute are by operation, and by the strategy of the operation that leads it. Those of collectives are by kind:
one for the time of starting, and one for the time per byte.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.cost.sustained import sustained_ways
from meshwright.hardware import Mesh
from meshwright.hardware.collectives import Way, least_s
from meshwright.strategy.candidates import Assignment
from meshwright.units import Numeric

SHARES = ("start", "bytes")  # of a collective's time
CollectiveFactors = Mapping[tuple[str, str], float]
Sizes = tuple[int, ...]
Axes = tuple[int, ...]
Strategy = tuple[int, ...]  # the loop that each axis splits, or -1


@dataclass(frozen=True)
class Corrections:
    """Measured ÷ modelled time, and memory.

    Attributes:
        usual: For an operation, by index, the factor of strategies that were not measured; 1 where there is none.
        measured: For the sizes of a mesh, an operation that leads a group and a strategy of it, the factor that was
            measured for the operations of the group.
        collectives: For a kind of collective, and ``"start"`` or ``"bytes"``, the factor of the fixed time, or of the
            time per byte; 1 where there is none.
        memory: Of the whole step, measured ÷ modelled bytes of one device.
        stages_memory: The same of the stages of a pipeline, which are modelled by themselves.
        alone: Whether compute is priced as on a device that works alone, where it was measured, on any cluster.
        about: What is known of the chip, for the provenance of a plan.
    """

    usual: Mapping[int, float] = field(default_factory=dict)
    measured: Mapping[tuple[Sizes, int, Strategy], float] = field(default_factory=dict)
    collectives: CollectiveFactors = field(default_factory=dict)
    memory: float = 1.0
    stages_memory: float = 1.0
    alone: bool = False
    about: str = ""

    def factors(
        self, sizes: Sizes, operation: int, leader: int | None, loops: Assignment | None
    ) -> NDArray[np.float64] | float:
        """The factor of an operation for each strategy of its group.

        Args:
            sizes: Sizes of the mesh's axes.
            operation: The operation.
            leader: The operation that leads its group; None where an argument does.
            loops: The leader's strategies, ``[strategy, axis]``.
        """
        usual = self.usual.get(operation, 1.0)
        if leader is None or loops is None or not self.measured:
            return usual
        return np.array([self.measured.get((sizes, leader, tuple(row)), usual) for row in loops.tolist()])


UNCORRECTED = Corrections()


@dataclass(frozen=True)
class CorrectedTimes:
    """The times of collectives on a mesh, inside a step and as they were measured.

    Attributes:
        mesh: The mesh, by whose links they are modelled.
        factors: As `Corrections.collectives`.
    """

    mesh: Mesh
    factors: CollectiveFactors
    _known: dict[tuple[str, Axes], list[Way]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.mesh.sizes

    def collective_s(self, kind: str, axes: Sequence[int], num_bytes: Numeric, start: float = 1.0) -> Numeric:
        """As `Mesh.collective_s`."""
        return least_s([(start * alpha, beta) for alpha, beta in self._ways(kind, axes)], num_bytes)

    def divided(self, kind: str, axes: Sequence[int], num_bytes: float, seconds: float) -> tuple[float, float]:
        """The modelled time of a collective that takes some seconds as corrected: of its start, and of its bytes."""
        _, beta = min(self._ways(kind, axes), key=lambda way: way[0] + way[1] * num_bytes)
        bytes_s = min(beta * num_bytes, seconds)  # XLA starts some collectives together, which favours other ways
        start, per_byte = (self.factors.get((kind, share), 1.0) for share in SHARES)
        return (seconds - bytes_s) / start, bytes_s / per_byte

    def _ways(self, kind: str, axes: Sequence[int]) -> list[Way]:
        key = kind, tuple(axes)
        if key not in self._known:
            start, per_byte = (self.factors.get((kind, share), 1.0) for share in SHARES)
            ways = sustained_ways(self.mesh, kind, axes)
            self._known[key] = [(start * alpha, per_byte * beta) for alpha, beta in ways]
        return self._known[key]
