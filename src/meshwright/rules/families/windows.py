"""Windowed reductions, and how a sliding window ties the dim it slides over to the dim it makes.

A window of ``reach`` elements (holes counted) moves over a dim in steps of ``stride``. If the dim is exactly ``stride``
elements for each of the positions, then positions and elements can be split alike, and a shard needs only a *halo*: the
elements of its neighbours that its first and last windows reach.
"""

from dataclasses import dataclass

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops

Dim = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sliding:
    """One dim under a moving window.

    Attributes:
        size: Elements of the dim.
        positions: Positions of the window.
        reach: Elements from a window's first to its last.
        stride: Elements from one position to the next.
        low: Padding before the first element; negative where elements are cut off.
        dilation: Distance of neighbouring elements as the window sees them.
    """

    size: int
    positions: int
    reach: int
    stride: int = 1
    low: int = 0
    dilation: int = 1

    @property
    def halo(self) -> int | None:
        """Elements of the neighbours that a shard needs, both sides together; None where no split is legal."""
        if self.dilation == 1 and self.size == self.positions * self.stride:
            halo = max(self.low, 0) + max(self.reach - self.stride - self.low, 0)
        elif self.stride == 1 and self.size * self.dilation == self.positions and not self._cuts_between:
            halo = max(self.low // self.dilation, 0) + max((self.reach - 2 - self.low) // self.dilation + 1, 0)
        else:
            return None
        # With a halo beyond half the dim, even two shards would each need most of the other's elements.
        return halo if 2 * halo <= self.size else None

    @property
    def _cuts_between(self) -> bool:
        """Whether what is cut off ends between two elements: XLA's partitioner ends the process over that."""
        return self.low < 0 and self.low % self.dilation > 0

    def dims(self, loops: Loops, kind: str = "parallel") -> tuple[Dim, Dim]:
        """The dim slid over and the dim of positions, by a common loop where a split is legal."""
        halo = self.halo
        if halo is None:
            return loops.add(self.size, "unsplittable"), loops.add(self.positions, "unsplittable")
        common = loops.add(min(self.size, self.positions), kind, halo)
        within = loops.add(max(self.stride, self.dilation), "unsplittable") if self.size != self.positions else ()
        return (common, common + within) if self.size < self.positions else (common + within, common)


def reduce_window(op: Signature) -> LoopNest | None:
    """Reduces windows of one or several arrays of one shape; initial values are scalars."""
    arrays = [tensor for tensor in op.operands if tensor.shape] or list(op.operands)
    if any(tensor.shape != arrays[0].shape for tensor in arrays):
        return None
    loops = Loops()
    pairs = [window.dims(loops) for window in _windows(op, arrays[0].shape, op.results[0].shape)]
    operand, result = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
    return loops.nest([operand if t.shape else () for t in op.operands], [result] * len(op.results))


def select_and_scatter(op: Signature) -> LoopNest:
    """Gives each window's value to the element it selects; windows that overlap keep their dim whole."""
    whole = op.results[0].shape
    source_at = 0 if op.primitive == "select_and_scatter_add" else 1
    loops = Loops()
    operand, source = [], []
    for window in _windows(op, whole, op.operands[source_at].shape):
        apart = window.halo == 0 and window.low == 0
        pair = window.dims(loops, "parallel" if apart else "unsplittable")
        operand.append(pair[0])
        source.append(pair[1])
    arrays = [tuple(operand), tuple(source)]
    if source_at == 0:
        arrays.reverse()
    return loops.nest([*arrays, *([()] * (len(op.operands) - 2))], [tuple(operand)])


def _windows(op: Signature, whole: tuple[int, ...], made: tuple[int, ...]) -> list[Sliding]:
    ones = (1,) * len(whole)
    params = op.params
    return [
        Sliding(size, positions, (width - 1) * holes + 1, stride, padding[0], dilation)
        for size, positions, width, holes, stride, padding, dilation in zip(
            whole,
            made,
            params["window_dimensions"],
            params.get("window_dilation") or ones,
            params["window_strides"],
            params["padding"],
            params.get("base_dilation") or ones,
            strict=True,
        )
    ]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"), reduce_window),
    "select_and_gather_add": reduce_window,
    "select_and_scatter_add": select_and_scatter,
    "select_and_scatter": select_and_scatter,
}
