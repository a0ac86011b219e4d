"""Graph: a JAX function as a flat list of operations."""

from meshwright.graph.graph import Graph, Op, Tie
from meshwright.graph.phases import BACKWARD, FORWARD, UPDATE
from meshwright.graph.tracing.trace import Traced, trace

__all__ = ["BACKWARD", "FORWARD", "UPDATE", "Graph", "Op", "Tie", "Traced", "trace"]
