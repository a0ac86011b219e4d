"""The inner form of a problem, and its choices: impossible costs are inf, and only times that can matter have a cap."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshwright.jit import kernel
from meshwright.solver.model import numpy_kernels
from meshwright.solver.problem.problem import IMPOSSIBLE, ChoiceProblem


class Model(NamedTuple):
    """Flat arrays that the compiled kernels read; every time has its own cap, so that constants can be moved there."""

    off: np.ndarray  # int64 [nodes + 1], states of node i are off[i]:off[i + 1] of cost
    cost: np.ndarray  # float64, finite
    eu: np.ndarray  # int32 [edges]
    ev: np.ndarray  # int32 [edges]
    eoff: np.ndarray  # int64 [edges], where the edge's row-major matrix begins in mat; edges may share one
    mat: np.ndarray  # float64, inf where impossible
    rnode: np.ndarray  # int32 [rows]
    rstart: np.ndarray  # int32 [rows], in compressed times
    rend: np.ndarray  # int32 [rows]
    roff: np.ndarray  # int64 [rows], where the row's vector begins in usage
    usage: np.ndarray  # float64
    cap: np.ndarray  # float64 [times]
    when: np.ndarray  # int32 [times], the time's number before any was dropped: carries prices from model to model

    @property
    def num_nodes(self) -> int:
        return len(self.off) - 1


def from_problem(problem: ChoiceProblem) -> Model:
    """Compresses the times of a problem and marks impossible costs; nodes and strategies keep their numbers."""
    times, start, end = maximal_times(problem.row_start, problem.row_end)
    rnode, roff, usage = problem.row_node, problem.row_first, problem.usage
    if np.isinf(problem.limit):
        times, start, end = times[:0], start[:0], end[:0]
        rnode, roff, usage = rnode[:0], roff[:0], usage[:0]
    return Model(
        off=problem.first.copy(),  # writable like all the others, so that kernels are compiled for one type only
        cost=np.where(problem.cost >= IMPOSSIBLE, np.inf, problem.cost),
        eu=problem.edge_nodes[:, 0].copy(),
        ev=problem.edge_nodes[:, 1].copy(),
        eoff=problem.matrix_first[problem.edge_matrix],
        mat=_clamped(problem.matrix),
        rnode=np.array(rnode),
        rstart=start.astype(np.int32),
        rend=end.astype(np.int32),
        roff=np.array(roff),
        usage=np.array(usage),
        cap=np.full(len(times), problem.limit),
        when=np.arange(len(times), dtype=np.int32),
    )


def maximal_times(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keeps only the times whose set of live rows lies within no other time's set.

    Between two ends the live set only grows, so the last moment before each end (if anything started since the end
    before it) holds every set in between. Returns those moments and every row's first and past-last one.
    """
    if len(start) == 0:
        return start, start, end
    moments = np.unique(np.concatenate([start, end]))
    begins = np.isin(moments, start)
    ends = np.isin(moments, end)
    started = np.concatenate([[0], np.cumsum(begins)])  # starts before each moment
    last = np.flatnonzero(ends)
    since = np.concatenate([[0], last[:-1]])
    grew = started[last] - started[since] > 0
    kept = moments[last[grew] - 1]
    return kept, np.searchsorted(kept, start), np.searchsorted(kept, end)


def read_only(array: np.ndarray) -> np.ndarray:
    """The same array, not to be written: problems' own matrices are not, and kernels are compiled for one type only."""
    view = array.view()
    view.flags.writeable = False
    return view


def _clamped(matrix: np.ndarray) -> np.ndarray:
    impossible = matrix >= IMPOSSIBLE
    return np.where(impossible, np.inf, matrix) if impossible.any() else matrix


@kernel(plain=numpy_kernels.extent)
def extent(costs, impossible):
    """The least and the most of the costs that are possible (inf and -inf where none is), and whether all are whole."""
    least, most, whole = np.inf, -np.inf, True
    for cost in costs:
        if abs(cost) < impossible:
            least, most = min(least, cost), max(most, cost)
            whole = whole and cost == np.floor(cost)
    return least, most, whole


@dataclass(eq=False)
class State:
    """A choice of a model, what it costs, and the memory at every time."""

    choice: np.ndarray
    cost: float
    load: np.ndarray

    @classmethod
    def of(cls, model: Model, choice: np.ndarray) -> "State":
        choice = np.asarray(choice, dtype=np.int64)
        return cls(choice, cost_of(model, choice), load_of(model, choice))

    def fits(self, model: Model) -> bool:
        return bool((self.load <= model.cap * (1 + 1e-12)).all()) and np.isfinite(self.cost)


def cost_of(model: Model, choice: np.ndarray) -> float:
    """Node plus edge costs."""
    return float(model_cost(model.off, model.cost, model.eu, model.ev, model.eoff, model.mat, choice))


def load_of(model: Model, choice: np.ndarray) -> np.ndarray:
    """Memory at every time."""
    load = np.zeros(len(model.cap))
    choice_load(model.rnode, model.rstart, model.rend, model.roff, model.usage, choice, load)
    return load


@kernel
def model_cost(off, cost, eu, ev, eoff, mat, choice):
    """Node plus edge costs of a choice."""
    total = 0.0
    for u in range(len(off) - 1):
        total += cost[off[u] + choice[u]]
    for e in range(len(eu)):
        v = ev[e]
        total += mat[eoff[e] + choice[eu[e]] * (off[v + 1] - off[v]) + choice[v]]
    return total


@kernel
def choice_load(rnode, rstart, rend, roff, usage, choice, load):
    """Load at every time under a choice."""
    change = np.zeros(len(load) + 1)
    for r in range(len(rnode)):
        used = usage[roff[r] + choice[rnode[r]]]
        change[rstart[r]] += used
        change[rend[r]] -= used
    running = 0.0
    for t in range(len(load)):
        running += change[t]
        load[t] = running
