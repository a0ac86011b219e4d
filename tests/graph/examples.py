"""What the tests of memory trace."""

import jax
import jax.numpy as jnp

from meshwright.graph import trace
from meshwright.rules import loop_nest


def shaped(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def traced(function, *args):
    """A function's graph, and the loop nests of its operations."""
    graph = trace(function, *args).graph
    return graph, [loop_nest(op.signature) for op in graph.ops]
