"""Sums that start together: XLA combines collectives that do not wait for each other, so they share a fixed time.

These are the sums of gradients, which only the update reads, and the sums of the update itself, such as the norms of
all gradients. Each costs its share of one start: a choice problem adds up costs and cannot count a cost once for all.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from meshwright.graph import UPDATE, Graph
from meshwright.graph.phases import PHASES
from meshwright.rules import LoopNest
from meshwright.rules.base import REDUCING


def find_starts(
    graph: Graph, nests: Mapping[int, LoopNest], gradients: Iterable[int], accumulated: Iterable[int]
) -> NDArray[np.float64]:
    """For each operation, the part of a collective's fixed time that settling its sums costs.

    Args:
        graph: The graph.
        nests: Loop nests by signature's number.
        gradients: Values that are gradients.
        accumulated: Operations whose results a loop adds up, which are gradients, too.
    """
    columns = graph.columns
    summing = [n for n, nest in nests.items() if any(loop.kind in REDUCING for loop in nest.loops)]
    sums = np.isin(columns.signature, summing)
    of_gradients = np.zeros(len(sums), bool)
    of_gradients[[*columns.producer[sorted(gradients)].tolist(), *accumulated]] = True
    of_update = ~of_gradients & (columns.phase == PHASES.index(UPDATE))
    starts = np.ones(len(sums))
    for together in (sums & of_gradients, sums & of_update):
        starts[together] = 1 / max(int(together.sum()), 1)
    return starts
