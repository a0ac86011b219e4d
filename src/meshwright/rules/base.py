"""The contract of a rule: an operation described as a loop nest, from which every strategy is derived.

A loop nest says which loops index which dims of which operands and results. A dim is a tuple of loops, major first
(most dims hold one loop; a dim merged by a reshape holds several). A loop is

* ``parallel``: each of its iterations writes its own part of the results,
* reducing (``sum``, ``max``, …): iterations that fall on different devices leave partial results, which an
  all-reduce or a reduce-scatter of that kind settles,
* ``unsplittable``: all its iterations must be on one device.

An operand that a loop does not index is needed whole by every device that shares that loop's work. A shard may use its
own offset: it counts an iota from there, and looks up in, or writes to, only its part of a split table. Where results
are partial, an operand outside the loop (the table that a scatter-add adds to) is used by one device, and is replaced
by the kind's identity on the others.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from meshwright.errors import RuleError

REDUCING = ("sum", "max", "min", "prod", "and", "or")
KINDS = ("parallel", "unsplittable", *REDUCING)

Dims = tuple[tuple[int, ...], ...]

#: How it is known how often a `while` loop runs: exactly, from arguments that were given, as a bound, or not at all.
EXACT, GIVEN, AT_MOST, UNKNOWN = "exact", "given", "at most", "unknown"


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype name of one operand or result, and whether it is in the memory of the host."""

    shape: tuple[int, ...]
    dtype: str
    itemsize: int = 4
    on_host: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes of the devices' memory."""
        return 0 if self.on_host else self.copied_bytes

    @property
    def copied_bytes(self) -> int:
        """Bytes that a copy moves, wherever it is."""
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """The information that a rule may use: the primitive, its parameters and the types of operands and results."""

    primitive: str
    params: Mapping[str, Any]
    operands: tuple[TensorType, ...]
    results: tuple[TensorType, ...]

    @property
    def host_copy_bytes(self) -> int:
        """Bytes that it copies between the devices and their hosts."""
        if self.primitive != "device_put":
            return 0
        pairs = zip(self.operands, self.results, strict=True)
        return sum(one.copied_bytes for one, other in pairs if one.on_host != other.on_host)


@dataclass(frozen=True, slots=True)
class Loop:
    """One index of a loop nest.

    Attributes:
        size: Number of iterations.
        kind: ``parallel``, ``unsplittable`` or how partial results combine. A reducing loop leaves partial only the
            results that it does not index.
        halo: Elements of the neighbours' shards of the first operand that a split needs, both borders together,
            counted along the dim that the loop leads.

    Examples:
        >>> Loop(4096, "sum")
        Loop(size=4096, kind='sum', halo=0)
    """

    size: int
    kind: str = "parallel"
    halo: int = 0


class Sent(NamedTuple):
    """A collective that an operation does itself, on each device.

    Attributes:
        kind: As in `Mesh.collective_s`.
        axes: Names of the mesh axes that it runs along.
        num_bytes: Bytes of one trip, by the convention of `Mesh.collective_s`.
        trips: How often it runs in one run of the operation.
    """

    kind: str
    axes: tuple[str, ...]
    num_bytes: float
    trips: float


class Mixing(NamedTuple):
    """How an operation that mixes positions is computed where they are split: by hand, not by the plain operation.

    Attributes:
        queries: The loop whose split gives each device some of the positions, which it mixes with all others; -1 for
            none, or where the plain operation does that.
        ring: The loop whose split gives each device some of the positions of all operands, those that are mixed in
            being passed around; -1 for none. It takes the place of another loop of the same dims, in whose size it does
            not count, and no axis splits both.
        balanced: Whether early positions see fewer others, so that each device exchanges half of its positions: of 2n
            parts device i has the parts i and 2n−1−i.
        passed: The operands that are passed around.
        returned: The results that are summed up on their way around, as float32.
    """

    queries: int = -1
    ring: int = -1
    balanced: bool = False
    passed: tuple[int, ...] = ()
    returned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoopNest:
    """A rule's answer for one operation.

    Attributes:
        loops: The loops.
        operands: For each operand, for each dim, the indices of the loops that make it up, major first.
        results: The same for the results.
        flops: Floating-point operations of the whole nest on the matrix unit; 0 where memory traffic decides the time.
        fusible: Whether a compiler merges the operation into its neighbours, so that it causes no memory traffic.
        leads: Whether the operation's split is chosen, rather than taken from its largest operand.
        fetching: Indices of loops each iteration of which fetches a contiguous run of the first operand: a row of
            pixels under a convolution's window. Splitting them spreads the fetches, splitting other loops does not.
        special: Whether each element takes a special function: a division, a root, an exponential or the like.
        sent: Collectives that are part of the operation.
        mixing: How it is computed where positions that it mixes are split.

    Examples:
        >>> loops = (Loop(8), Loop(4, "sum"), Loop(2))
        >>> product = LoopNest(loops, operands=(((0,), (1,)), ((1,), (2,))), results=(((0,), (2,)),), leads=True)
        >>> [loop.kind for loop in product.loops]
        ['parallel', 'sum', 'parallel']
    """

    loops: tuple[Loop, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    flops: float = 0.0
    fusible: bool = field(default=False, kw_only=True)
    leads: bool = field(default=False, kw_only=True)
    fetching: tuple[int, ...] = field(default=(), kw_only=True)
    special: bool = field(default=False, kw_only=True)
    sent: tuple[Sent, ...] = field(default=(), kw_only=True)
    mixing: Mixing = field(default=Mixing(), kw_only=True)

    @property
    def num_fetches(self) -> float:
        """How many runs of the first operand are fetched."""
        return float(prod(self.loops[loop].size for loop in self.fetching)) if self.fetching else 0.0

    @property
    def num_special(self) -> float:
        """How many special functions are evaluated."""
        return float(prod(loop.size for loop in self.loops)) if self.special else 0.0


def settled_as(kind: str, dtype: str) -> str:
    """A reducing loop's kind, or ``unsplittable`` if no collective combines numbers of a dtype in that way.

    Sums of floats of a byte are left to one device: partial sums would be rounded to two or three digits each.

    Examples:
        >>> settled_as("or", "bool"), settled_as("or", "int32"), settled_as("max", "complex64")
        ('or', 'unsplittable', 'unsplittable')
    """
    if kind == "sum" and dtype.startswith(("float8_", "float6_", "float4_")):
        return "unsplittable"
    is_combined = dtype == "bool" if kind in ("and", "or") else kind == "sum" or not dtype.startswith("complex")
    return kind if is_combined else "unsplittable"


def multiplied_dtype(op: Signature) -> str:
    """The dtype of an operation's products: of the wider operand, or, in a kernel, of its first operand of floats.

    The first operands of a Pallas kernel may be integers that its index maps read.

    Examples:
        >>> tables, query = TensorType((8,), "int32"), TensorType((8, 64), "bfloat16")
        >>> multiplied_dtype(Signature("pallas_call", {}, (tables, query), (query,)))
        'bfloat16'
    """
    if op.primitive in ("dot_general", "ragged_dot_general"):
        left, right = op.operands[:2]
        return (right if right.itemsize > left.itemsize else left).dtype
    kinds = [tensor.dtype for tensor in op.operands]
    floats = [dtype for dtype in kinds if "float" in dtype] if op.primitive == "pallas_call" else []
    return next(iter(floats or kinds), "")


# Bytes of the narrowest integers that collectives compare everywhere; XLA widens others on some backends.
NARROWEST = 4


def settled_itemsize(nest: LoopNest, kind: TensorType) -> int:
    """Bytes sent for one element of a partial result: floats are compared as integers of at least four bytes.

    Examples:
        >>> largest = LoopNest((Loop(8, "max"),), (((0,),),), ((),))
        >>> [settled_itemsize(largest, TensorType((), *kind)) for kind in (("bfloat16", 2), ("int8", 1))]
        [4, 1]
    """
    compared = any(loop.kind in ("max", "min") for loop in nest.loops)
    return max(kind.itemsize, NARROWEST) if compared and "float" in kind.dtype else kind.itemsize


Rule = Callable[[Signature], LoopNest | None]

_TENSOR = re.compile(r"\(([^()]*)\)|(\S+)")


def nest(
    spec: str,
    op: Signature,
    *,
    reduce: Mapping[str, str] | None = None,
    unsplittable: str = "",
    halo: Mapping[str, int] | None = None,
    sizes: Mapping[str, int] | None = None,
    flops: float = 0.0,
    fusible: bool = False,
    leads: bool = False,
) -> LoopNest:
    """Builds a loop nest from an einsum-like text.

    Dims are separated by spaces, tensors by commas; ``(a b)`` is one dim made of two loops, major first, and ``.`` is
    a dim that cannot be split. An empty tensor is a scalar.

    Args:
        spec: For example ``"b m k, b k n -> b m n"``.
        op: The operation; its shapes give the loops' sizes.
        reduce: Kind of each reducing loop, e.g. ``{"k": "sum"}``.
        unsplittable: Names of loops that cannot be split, separated by spaces.
        halo: Elements of the neighbour's shard that a split of the loop needs.
        sizes: Sizes of loops that only occur inside merged dims.
        flops: As in `LoopNest`.
        fusible: As in `LoopNest`.
        leads: As in `LoopNest`.

    Returns:
        The loop nest, checked against the shapes.

    Examples:
        >>> op = Signature("mm", {}, (TensorType((4, 8), "f4"), TensorType((8, 2), "f4")), (TensorType((4, 2), "f4"),))
        >>> nest("m k, k n -> m n", op, reduce={"k": "sum"}).loops[1]
        Loop(size=8, kind='sum', halo=0)
    """
    left, arrow, right = spec.partition("->")
    if not arrow:
        raise RuleError(f"rule for {op.primitive!r}: {spec!r} lacks '->'; write operands -> results")
    sides = [_tensors(left, len(op.operands), op, "operand"), _tensors(right, len(op.results), op, "result")]
    size_of: dict[str, int] = dict(sizes or {})
    for tensors, types, word in zip(sides, (op.operands, op.results), ("operand", "result"), strict=True):
        for position, (dims, tensor) in enumerate(zip(tensors, types, strict=True)):
            _measure(dims, tensor, size_of, op, f"{word} {position}")
    kinds = dict(reduce or {}) | dict.fromkeys(unsplittable.split(), "unsplittable")
    unknown = [name for name in {*kinds, *(halo or {})} if name not in size_of]
    if unknown or any(kind not in KINDS for kind in kinds.values()):
        raise RuleError(
            f"rule for {op.primitive!r}: {unknown or kinds} is not a loop of {spec!r} with a kind in {KINDS}"
        )
    index = {name: i for i, name in enumerate(size_of)}
    loops = tuple(
        Loop(size, "unsplittable" if name.startswith(".") else kinds.get(name, "parallel"), (halo or {}).get(name, 0))
        for name, size in size_of.items()
    )
    operands, results = (
        tuple(tuple(tuple(index[name] for name in dim) for dim in dims) for dims in tensors) for tensors in sides
    )
    return LoopNest(loops, operands, results, flops, fusible=fusible, leads=leads)


def _tensors(text: str, count: int, op: Signature, word: str) -> list[list[tuple[str, ...]]]:
    """Splits one side of a spec into tensors of dims of loop names; each ``.`` gets a unique name."""
    parts = text.split(",") if count else []
    if len(parts) != count or (not count and text.strip()):
        raise RuleError(f"rule for {op.primitive!r}: {text!r} names {len(parts)} {word}s but there are {count}")
    tensors = []
    for position, part in enumerate(parts):
        dims = [tuple((merged if merged else single).split()) for merged, single in _TENSOR.findall(part)]
        tensors.append([(f".{word}{position}.{i}",) if dim == (".",) else dim for i, dim in enumerate(dims)])
    return tensors


def _measure(dims: list[tuple[str, ...]], tensor: TensorType, found: dict[str, int], op: Signature, where: str) -> None:
    """Fills in the loops' sizes from one tensor's shape and checks that they agree."""
    if len(dims) != len(tensor.shape):
        raise RuleError(
            f"rule for {op.primitive!r}: {where} has shape {tensor.shape} but the rule gives {len(dims)} dims"
        )
    for dim, size in zip(dims, tensor.shape, strict=True):
        if len(dim) == 1:
            found.setdefault(dim[0], size)
        missing = [name for name in dim if name not in found]
        if missing:
            raise RuleError(f"rule for {op.primitive!r}: give sizes={{...}} for {missing} of {where}")
        if prod(found[name] for name in dim) != size:
            raise RuleError(
                f"rule for {op.primitive!r}: {where} has {size} where loops {' '.join(dim)} make "
                f"{prod(found[name] for name in dim)}"
            )
