"""Shape changes: the same elements under other indices."""

from math import gcd

from meshwright.rules.base import Dims, LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_leading


def reshape(op: Signature) -> LoopNest:
    """Splits and merges dims into the loops that both shapes have in common, major first.

    Where the shapes disagree ((6, 4) -> (4, 6)) the common major part (2) is still a loop; the rest stays whole.
    """
    loops = Loops()
    shape, target = op.operands[0].shape, op.results[0].shape
    order = op.params.get("dimensions") or range(len(shape))  # some reshapes transpose first
    source = tuple(shape[d] for d in order)
    if 0 in source:
        return loops.nest([loops.fixed(shape)], [loops.fixed(target)], fusible=True)
    dims, result = _common_loops(loops, source, target)
    operand = dict(zip(order, dims, strict=True))
    return loops.nest([tuple(operand[d] for d in range(len(shape)))], [result], fusible=True)


def _common_loops(loops: Loops, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Dims, Dims]:
    """Walks both shapes from the major end, taking the largest loop that leads the rest of both dims."""
    left = _Covering(loops, source)
    right = _Covering(loops, target)
    while left.more() and right.more():
        size = gcd(left.rest, right.rest)
        if size > 1:
            dim = loops.add(size)
            left.take(size, dim)
            right.take(size, dim)
        else:  # nothing in common until both have covered the same number of elements
            _skip(left, right)
    return left.close(), right.close()


def _skip(left: "_Covering", right: "_Covering") -> None:
    covered = [left.take_rest(), right.take_rest()]
    while covered[0] != covered[1]:
        behind = 0 if covered[0] < covered[1] else 1
        walk = (left, right)[behind]
        walk.more()
        covered[behind] *= walk.take_rest()


class _Covering:
    """One shape, being covered by loops from the major end."""

    def __init__(self, loops: Loops, shape: tuple[int, ...]) -> None:
        self.loops = loops
        self.shape = shape
        self.dims: list[tuple[int, ...]] = []
        self.rest = 1  # the factor that the last dim of `dims` still lacks

    def more(self) -> bool:
        """Moves to the next dim that is not covered; False at the end."""
        while self.rest == 1 and len(self.dims) < len(self.shape):
            self.rest = self.shape[len(self.dims)]
            self.dims.append(self.loops.add(1, "unsplittable") if self.rest == 1 else ())
        return self.rest > 1

    def take(self, size: int, dim: tuple[int, ...]) -> None:
        self.dims[-1] += dim
        self.rest //= size

    def take_rest(self) -> int:
        """Covers the rest of the dim by a loop that cannot be split."""
        size = self.rest
        self.take(size, self.loops.add(size, "unsplittable"))
        return size

    def close(self) -> Dims:
        self.more()
        return tuple(self.dims)


def transpose(op: Signature) -> LoopNest:
    """The same loops in another order."""
    loops = Loops()
    operand = loops.spread(op.operands[0].shape)
    return loops.nest([operand], [tuple(operand[i] for i in op.params["permutation"])], fusible=True)


def broadcast_in_dim(op: Signature) -> LoopNest:
    """New and widened dims are loops of the result alone."""
    loops = Loops()
    result = loops.spread(op.results[0].shape)
    shape = op.operands[0].shape
    operand = tuple(
        result[target] if size == op.results[0].shape[target] else loops.add(size, "unsplittable")
        for size, target in zip(shape, op.params["broadcast_dimensions"], strict=True)
    )
    rest = [loops.fixed(tensor.shape) for tensor in op.operands[1:]]
    return loops.nest([operand, *rest], [result], fusible=True)


def squeeze(op: Signature) -> LoopNest:
    """Drops dims of size 1."""
    loops = Loops()
    dropped = {d % len(op.operands[0].shape) for d in op.params["dimensions"]}
    operand = loops.spread(op.operands[0].shape)
    return loops.nest([operand], [tuple(dim for i, dim in enumerate(operand) if i not in dropped)], fusible=True)


def bitcast_convert_type(op: Signature) -> LoopNest | None:
    """The same bits as other numbers: between widths, one element becomes a dim or a dim one element."""
    return same_leading(op, fusible=True)


RULES: dict[str, Rule] = {
    "reshape": reshape,
    "transpose": transpose,
    "broadcast_in_dim": broadcast_in_dim,
    "squeeze": squeeze,
    "bitcast_convert_type": bitcast_convert_type,
}
