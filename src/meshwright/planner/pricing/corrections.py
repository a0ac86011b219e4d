"""Factors on modelled compute, from measurements: by operation, and by the strategy of the operation that leads it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from meshwright.strategy.candidates import Assignment

Sizes = tuple[int, ...]
Strategy = tuple[int, ...]  # the loop that each axis splits, or -1


@dataclass(frozen=True)
class Corrections:
    """Measured ÷ modelled compute.

    Attributes:
        usual: For an operation, by index, the factor of strategies that were not measured; 1 where there is none.
        measured: For the sizes of a mesh, an operation that leads a group and a strategy of it, the factor that was
            measured for the operations of the group.
    """

    usual: Mapping[int, float] = field(default_factory=dict)
    measured: Mapping[tuple[Sizes, int, Strategy], float] = field(default_factory=dict)

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
