"""The facts that models of fusion use: the kind of each operation, the producer and number of readers of each value."""

from collections.abc import Callable, Sequence

import numpy as np

from meshwright.arrays import Bools
from meshwright.graph.graph import Graph
from meshwright.rules.base import LoopNest, Signature

Dims = tuple[int, ...]

COSTLY = frozenset(
    "exp exp2 expm1 log log1p logistic tanh sin cos tan atan2 pow sqrt rsqrt cbrt erf erfc erf_inv div rem".split()  # noqa: SIM905
)


class Facts:
    """Facts about a graph, as columns."""

    def __init__(self, graph: Graph, nests: Sequence[LoopNest]):
        self.graph, self.columns, self.nests = graph, graph.columns, nests
        signatures = self.columns.signatures
        self._kinds = [(n, signatures[n].primitive, nests[i]) for n, i in self.columns.examples.items()]
        self.fusible = self.where(lambda name, nest: nest.fusible or name == "gather")
        self.contracts = self.where(lambda _, nest: nest.flops > 0)
        self.stacks = np.flatnonzero(self.where(lambda name, _: name == "loop_stack"))
        self.made = np.flatnonzero(self.columns.producer >= 0)
        self.maker = self.columns.producer[self.made]
        self.num_readers = np.bincount(self.columns.reads, minlength=self.columns.num_values)
        self.ends = [*graph.outputs, *(t.made for t in graph.ties)]  # for the caller, or for a loop's next trip
        self.cut_out = self._slices_in_kernels()
        self.fusible |= self.cut_out

    def where(self, test: Callable[[str, LoopNest], bool]) -> Bools:
        """The operations whose primitive and loop nest pass a test."""
        passes = np.zeros(len(self.columns.signatures), bool)
        passes[[number for number, name, nest in self._kinds if test(name, nest)]] = True
        return passes[self.columns.signature]

    def _slices_in_kernels(self) -> Bools:
        """The slices of loops' stacks that elementwise kernels cut out as they read; a product reads a copy.

        So it does where it reads what follows from one slice alone, such as another type of it.
        """
        columns, large = self.columns, self.graph.sizes[self.columns.reads] > 1
        alone = np.bincount(columns.reader[large], minlength=len(columns.signature)) == 1
        copied = np.zeros(columns.num_values, bool)
        copied[columns.reads[(self.contracts | (alone & self.fusible))[columns.reader]]] = True
        slices = self.where(lambda name, _: name == "loop_slice" and not self.graph.on_cpu)
        return slices & ~copied[columns.first_made % columns.num_values]


def product_dims(op: Signature, side: int) -> tuple[Dims, Dims, Dims]:
    """How a product reads an operand as matrices: its batch dims, the dims of rows, the dims of columns."""
    contract, batch = op.params["dimension_numbers"]
    summed, along = tuple(contract[side]), tuple(batch[side])
    free = tuple(d for d in range(len(op.operands[side].shape)) if d not in summed and d not in along)
    return (along, summed, free) if side else (along, free, summed)
