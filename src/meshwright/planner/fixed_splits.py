"""A method that fixes which loops of some operations are split, as profiling and enumeration do for blocks."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from meshwright.graph import Graph
from meshwright.hardware import Mesh
from meshwright.planner.grouping.roles import Roles
from meshwright.planner.methods import Method
from meshwright.planner.pricing.formulation import Restrictions
from meshwright.strategy.sharding import Axes


@dataclass(frozen=True)
class FixedSplits(Method):
    """Splits given loops of some operations; all else is optimised.

    Args:
        splits: For an operation's index in the graph, the indices of loops in its loop nest: every axis of the mesh
            splits one of them.
    """

    splits: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def pins(self, graph: Graph, roles: Roles) -> dict[int, Hashable]:
        return {graph.ops[index].outputs[0]: ("splits", loops) for index, loops in self.splits.items()}

    def restrict(self, graph: Graph, roles: Roles, mesh: Mesh, axes: Axes) -> Restrictions:
        return Restrictions(splits={index: frozenset(loops) for index, loops in self.splits.items()})
