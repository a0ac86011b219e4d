"""Liveness without a model of the compiler: each value is stored from its producer to its last reader.

This is the fallback if the model of XLA's compiler fails on a program.
"""

import numpy as np

from meshwright.cost.xla_gpu.liveness import Copies, Liveness, pin_ends
from meshwright.cost.xla_gpu.traffic import plain_traffic
from meshwright.graph.graph import Graph


def plain_liveness(graph: Graph) -> Liveness:
    """As `liveness`, without fusion, copies or gradients that wait."""
    columns = graph.columns
    num_ops, num_values = len(columns.signature), columns.num_values
    step, none = np.arange(num_ops), np.zeros(0, np.int64)
    stored = np.ones(num_values, bool)
    stored[list(graph.constants)] = False
    start = np.maximum(columns.producer, 0)
    stop = np.where(columns.producer >= 0, start + 1, 0)
    np.maximum.at(stop, columns.reads, columns.reader + 1)
    for first, end in sorted(graph.loops, key=lambda loop: loop[0] - loop[1]):
        # Values that a loop reads from outside, carries or stacks are live from its first trip to its last.
        read = columns.reads[columns.start[first] : columns.start[end]]
        outside = read[start[read] < first]
        stop[outside] = np.maximum(stop[outside], end)
        stacked = [i for i in range(first, end) if columns.primitive(i) == "loop_stack"]
        start[columns.first_made[stacked]] = first
    for tie in graph.ties:
        stop[tie.made] = max(stop[tie.made], *(end for first, end in graph.loops if first <= start[tie.carry] < end), 0)
    pin_ends(graph, stored, stop, num_ops)
    nothing = Copies(none, none, none, none.astype(float))
    fuses = np.zeros(num_ops, bool)
    return Liveness(stored, start, stop, nothing, fuses, step, start + 1, step, step * 0 - 1, plain_traffic(graph))
