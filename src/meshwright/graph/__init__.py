"""Graph: a JAX function as a flat list of operations."""

from meshwright.graph.graph import BACKWARD, FORWARD, UPDATE, Graph, Op, Tie
from meshwright.graph.trace import Traced, trace

__all__ = ["BACKWARD", "FORWARD", "UPDATE", "Graph", "Op", "Tie", "Traced", "trace"]
