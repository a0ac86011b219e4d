"""Which values of the forward pass are in memory when the backward pass begins: what a stage keeps for it.

The planner prices these values, and the runtime keeps exactly these: a backward pass computes again what XLA would have
fused into its kernels, had both passes been one program.
"""

import numpy as np

from meshwright.cost.xla_gpu.liveness import Liveness
from meshwright.graph.facts import Bools
from meshwright.graph.graph import Graph
from meshwright.graph.phases import BACKWARD, FORWARD, PHASES


def held_for_backward(graph: Graph, live: Liveness) -> Bools:
    """For each value, whether a forward operation computes it and it is in memory when the backward pass begins."""
    columns, made = graph.columns, graph.columns.producer
    backward = np.flatnonzero(columns.phase == PHASES.index(BACKWARD))
    if not len(backward):
        return np.zeros(columns.num_values, bool)
    held = live.stored & (made >= 0) & (live.start < backward[0]) & (live.stop > backward[0])
    held[made >= 0] &= columns.phase[made[made >= 0]] == PHASES.index(FORWARD)
    return held
