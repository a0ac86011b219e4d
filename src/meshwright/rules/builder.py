"""Builds loop nests whose rank is known only from the operation; `nest` is the shorter way where a text can say it."""

from collections.abc import Iterable, Sequence

from meshwright.rules.base import Dims, Loop, LoopNest, Signature, TensorType


class Loops:
    """Loops of a nest under construction: ask for loops, put their indices into dims, and close with `nest`."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def add(self, size: int, kind: str = "parallel", halo: int = 0) -> tuple[int, ...]:
        """A dim made of one new loop."""
        self.loops.append(Loop(size, kind, halo))
        return (len(self.loops) - 1,)

    def fixed(self, shape: Iterable[int]) -> Dims:
        """Dims that cannot be split, each with a loop of its own."""
        return tuple(self.add(size, "unsplittable") for size in shape)

    def spread(self, shape: Sequence[int], fixed: Iterable[int] = ()) -> Dims:
        """Dims each with a new loop: parallel, but unsplittable at the positions in ``fixed``."""
        held = set(fixed)
        return tuple(self.add(size, "unsplittable" if i in held else "parallel") for i, size in enumerate(shape))

    def nest(
        self,
        operands: Iterable[Dims],
        results: Iterable[Dims],
        flops: float = 0.0,
        *,
        fusible: bool = False,
        leads: bool = False,
    ) -> LoopNest:
        """The finished nest."""
        return LoopNest(tuple(self.loops), tuple(operands), tuple(results), flops, fusible=fusible, leads=leads)


def same_shape(
    op: Signature, fixed: Iterable[int] = (), *, fusible: bool = False, leads: bool = False
) -> LoopNest | None:
    """One loop for each dim of the common shape; rank-0 operands are needed whole; None where shapes differ."""
    tensors = (*op.operands, *op.results)
    shape = max((tensor.shape for tensor in tensors), key=len, default=())
    if any(tensor.shape and tensor.shape != shape for tensor in tensors):
        return None
    loops = Loops()
    full = loops.spread(shape, fixed)

    def dims(side: tuple[TensorType, ...]) -> list[Dims]:
        return [full if tensor.shape else () for tensor in side]

    return loops.nest(dims(op.operands), dims(op.results), fusible=fusible, leads=leads)
