"""Builds loop nests whose rank depends on the operation; for a fixed rank, a text for `nest` is shorter."""

from collections.abc import Iterable, Sequence

from meshwright.rules.base import Dims, Loop, LoopNest, Mixing, Sent, Signature


class Loops:
    """Loops of a nest under construction: ask for loops, put their indices into dims, and close with `nest`."""

    def __init__(self) -> None:
        self.loops: list[Loop] = []

    def add(self, size: int, kind: str = "parallel", halo: int = 0) -> tuple[int, ...]:
        """A dim made of one new loop."""
        self.loops.append(Loop(size, kind, halo))
        return (len(self.loops) - 1,)

    def fixed(self, shape: Iterable[int]) -> Dims:
        """Dims that cannot be split, each with its own loop."""
        return tuple(self.add(size, "unsplittable") for size in shape)

    def spread(self, shape: Sequence[int], fixed: Iterable[int] = ()) -> Dims:
        """Dims each with a new loop: parallel, but unsplittable at the positions in ``fixed``."""
        whole = set(fixed)
        return tuple(self.add(size, "unsplittable" if i in whole else "parallel") for i, size in enumerate(shape))

    def nest(
        self,
        operands: Iterable[Dims],
        results: Iterable[Dims],
        flops: float = 0.0,
        *,
        fusible: bool = False,
        leads: bool = False,
        fetching: tuple[int, ...] = (),
        sent: tuple[Sent, ...] = (),
        mixing: Mixing | None = None,
    ) -> LoopNest:
        """The finished nest."""
        return LoopNest(
            tuple(self.loops),
            tuple(operands),
            tuple(results),
            flops,
            fusible=fusible,
            leads=leads,
            fetching=fetching,
            sent=sent,
            mixing=mixing or Mixing(),
        )


def ordered(dims: dict[int, tuple[int, ...]]) -> Dims:
    """The dims of a tensor in their order, of those that were found in another."""
    return tuple(dims[d] for d in range(len(dims)))


def same_shape(
    op: Signature, fixed: Iterable[int] = (), *, fusible: bool = False, leads: bool = False
) -> LoopNest | None:
    """One loop for each dim of the results' common shape.

    Operands of rank 0 are needed whole, and so are dims of size 1 that are broadcast. None if shapes differ otherwise.
    """
    shape = op.results[0].shape
    if any(tensor.shape != shape for tensor in op.results):
        return None
    if any(not _broadcasts(tensor.shape, shape) for tensor in op.operands):
        return None
    loops = Loops()
    full = loops.spread(shape, fixed)
    operands = [
        tuple(
            dim if size == whole else loops.add(size, "unsplittable")
            for size, whole, dim in zip(tensor.shape, shape, full, strict=False)
        )
        for tensor in op.operands
    ]
    return loops.nest(operands, [full] * len(op.results), fusible=fusible, leads=leads)


def _broadcasts(shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    return not shape or (
        len(shape) == len(target) and all(size in (1, whole) for size, whole in zip(shape, target, strict=True))
    )


def same_leading(op: Signature, *, fusible: bool = False) -> LoopNest | None:
    """One operand and one result that share their leading dims; further dims of either stay whole."""
    shapes = op.operands[0].shape, op.results[0].shape
    rank = min(len(shape) for shape in shapes)
    if shapes[0][:rank] != shapes[1][:rank]:
        return None
    loops = Loops()
    common = loops.spread(shapes[0][:rank])
    operand, result = ((*common, *loops.fixed(shape[rank:])) for shape in shapes)
    return loops.nest([operand], [result], fusible=fusible)
