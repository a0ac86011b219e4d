"""Which single operations may run on a part of the batch, and how: by the loops of their rules.

An operation is cut along one of its loops. Every operand and result that the loop indexes is cut along the dim that the
loop leads, and each part of a result must follow from the operands' parts alone, *wherever they are in the batch*. In
rules a shard knows its own position; a part of the batch does not, so operations that count or address positions along
the loop are not cut. The equation stays that of the whole batch: only the parameters that repeat a shape shrink.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from meshwright import jax_compat
from meshwright.graph.tracing.flatten import signature_of
from meshwright.program.program import Operation
from meshwright.rules import LoopNest, loop_nest
from meshwright.rules.base import REDUCING
from meshwright.rules.families.elementwise import elementwise
from meshwright.rules.registry import builtin_rules
from meshwright.runtime.microbatches.part_bits import can_draw_parts
from meshwright.runtime.program.kernels import PALLAS, pallas_params

Status = int | str  # the dim that is cut, or a word of `batch_parts`, or how contributions combine

#: How two contributions become one, by the word for it.
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lax.add,
    "max": lax.max,
    "min": lax.min,
    "prod": lax.mul,
    "and": lax.bitwise_and,
    "or": lax.bitwise_or,
}

PAIRWISE = ("optimization_barrier", "device_put", "shard_alike")  # result i is operand i

# The results of the parts are combined as the loop combines. A table that a scatter writes to is counted once for each
# part: that changes no maximum or minimum, and no sum if the table is zero.
_COMBINING = frozenset(
    "dot_general conv_general_dilated reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or scatter-add "  # noqa: SIM905
    "scatter-max scatter-min".split()
)
# Their rows or numbers depend on the position, unless the loop indexes this operand: the keys, or the values written.
_WRITTEN = {"dynamic_update_slice": 1, "random_bits": 0, "random_split": 0, "random_gamma": 0} | dict.fromkeys(
    ("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"), 2
)
_BY_OFFSET = frozenset({"ragged_dot", "ragged_dot_general"})  # a part would need to know where its groups begin


class CannotCut(Exception):
    """Why a step cannot be cut into microbatches without changing its numbers."""


@dataclass(frozen=True)
class Cut:
    """How a dim that begins with the examples is cut into parts: as ``(before, count, after)``, by the middle.

    If ``before`` is the number of examples of a part, neighbours go to different parts: a batch that is split over
    devices then needs no communication. If it is 1, neighbours stay together.
    """

    count: int
    before: int

    @property
    def whole(self) -> int:
        """The size that a loop's size must be a multiple of to be cut into the same parts."""
        return self.count * self.before

    def parts(self, x: Any, dim: int) -> jax.Array:
        """The parts of a value, stacked."""
        shape = x.shape
        rows = x.reshape(*shape[:dim], self.before, self.count, shape[dim] // self.whole, *shape[dim + 1 :])
        return lax.collapse(jnp.moveaxis(rows, dim + 1, 0), dim + 1, dim + 3)

    def rows(self, size: int, index: Any) -> jax.Array:
        """The positions of a part's rows along a dim of this size."""
        block = size // self.whole
        along = jnp.arange(size // self.count, dtype=jnp.uint32)
        return (along // block * self.count + jnp.asarray(index, jnp.uint32)) * block + along % block

    def join(self, x: Any, dim: int) -> jax.Array:
        """Puts stacked parts together again."""
        shape = x.shape[1:]
        rows = x.reshape(self.count, *shape[:dim], self.before, shape[dim] // self.before, *shape[dim + 1 :])
        return lax.collapse(jnp.moveaxis(rows, 0, dim + 1), dim, dim + 3)

    def shape(self, shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
        """The shape of one part."""
        return tuple(n // self.count if d == dim else n for d, n in enumerate(shape))


class Form(NamedTuple):
    """An operation on parts: the dim along which each operand is cut, None if whole; and the results' statuses."""

    operands: tuple[int | None, ...]
    results: tuple[Status, ...]


def form_of(unit: Operation, given: Sequence[Status], cut: Cut, adds_to_nothing: bool) -> Form:
    """The form of an operation some of whose operands are cut; ``adds_to_nothing``: its first operand is known to be 0.

    Raises:
        CannotCut: It mixes examples, or it depends on their positions.
    """
    dims = [s if isinstance(s, int) else None for s in given]
    if unit.name in PAIRWISE:
        return Form(tuple(dims), tuple(given))
    nest = _nest(unit)
    loops = {_major(nest, nest.operands[i][d]) for i, d in enumerate(dims) if d is not None}
    loop = loops.pop()
    if loops or loop is None or not _can_split(nest, loop, cut):
        raise CannotCut(f"{unit} mixes examples")
    form = _along(nest, loop)
    if _by_position(unit, form) or any(d is not None and d != at for d, at in zip(dims, form.operands, strict=True)):
        raise CannotCut(f"{unit} depends on the examples' positions in the batch")
    for status, result in zip(form.results, unit.equation.outvars, strict=True):
        if not isinstance(status, int):
            _check_combines(unit, status, result.aval.dtype, adds_to_nothing)
    return form


def form_to(unit: Operation, result: int, dim: int, cut: Cut) -> Form | None:
    """The form of an operation on alike operands that computes one part of a result; None if it cannot.

    Random bits are drawn for the part from whole keys, if the generator can draw some bits without all others.
    """
    if unit.name == "random_bits" and dim >= len(unit.equation.invars[0].aval.shape):
        return Form((None,), (dim,)) if can_draw_parts(unit.equation) else None
    if unit.name not in builtin_rules():
        return None
    nest = _nest(unit)
    loop = _major(nest, nest.results[result][dim])
    if not nest.fusible or loop is None or not _can_split(nest, loop, cut):
        return None
    form = _along(nest, loop)
    makes_parts = all(isinstance(s, int) for s in form.results) and form.results[result] == dim
    return form if makes_parts and not _by_position(unit, form) else None


def shrunk(unit: Operation, form: Form, cut: Cut) -> dict[str, Any]:
    """The parameters for one part, for the parameters that repeat a shape that is cut."""
    eqn, params = unit.equation, dict(unit.equation.params)
    made = form.results[0] if form.results and isinstance(form.results[0], int) else None
    operand = form.operands[0] if form.operands else None
    if unit.name in ("broadcast_in_dim", "reshape"):
        key = "shape" if unit.name == "broadcast_in_dim" else "new_sizes"
        params[key] = cut.shape(params[key], made)
    elif unit.name == "slice":
        params["limit_indices"] = cut.shape(params["limit_indices"], operand)
    elif unit.name == "dynamic_slice" or (unit.name == "gather" and _is_window(eqn, operand)):
        params["slice_sizes"] = cut.shape(params["slice_sizes"], operand)
    elif unit.name == PALLAS:
        variables = zip((*eqn.invars, *eqn.outvars), (*form.operands, *form.results), strict=True)
        params = pallas_params(eqn, [cut.shape(v.aval.shape, d if isinstance(d, int) else None) for v, d in variables])
    return params


def widened(params: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The parameters of a half-precision sum, changed to float32, in which contributions are added up.

    Returns:
        The parameters; and whether its operands must be converted, too.
    """
    if "preferred_element_type" in params:
        return params | {"preferred_element_type": jnp.dtype(jnp.float32)}, False
    if params.get("update_jaxpr") is not None:  # how a scatter adds two numbers, for numbers of one dtype
        adds = jax_compat.trace(lax.add, [jax.ShapeDtypeStruct((), jnp.float32)] * 2)
        params = params | {"update_jaxpr": adds.jaxpr, "update_consts": ()}
    return params, True


def is_half(dtype: Any) -> bool:
    """Whether sums of a dtype lose many small numbers, or may overflow for a part where they do not for the whole."""
    return dtype in (jnp.bfloat16, jnp.float16)


def is_expensive(unit: Operation) -> bool:
    """Whether an operation runs on the matrix unit, or has a program as a parameter."""
    rule = builtin_rules().get(unit.name)
    return rule is None or (rule is not elementwise and _nest(unit).flops > 0)  # the nests of thousands take a while


def _nest(unit: Operation) -> LoopNest:
    if unit.name not in builtin_rules():  # a kernel's parameters may be made for the whole batch in any way
        raise CannotCut(f"{unit} is not known to work on a part of the batch")
    return loop_nest(signature_of(unit.equation))


def _major(nest: LoopNest, dim: tuple[int, ...]) -> int | None:
    return next((loop for loop in dim if nest.loops[loop].size > 1), None)


def _can_split(nest: LoopNest, loop: int, cut: Cut) -> bool:
    if nest.loops[loop].kind == "unsplittable" or nest.loops[loop].halo or nest.loops[loop].size % cut.whole:
        return False
    if loop in (nest.mixing.queries, nest.mixing.ring):
        return False
    for dims in (*nest.operands, *nest.results):
        held = [dim for dim in dims if loop in dim]
        if len(held) > 1 or any(_major(nest, dim) != loop for dim in held):
            return False
    return True


def _along(nest: LoopNest, loop: int) -> Form:
    operands, results = (
        [next((d for d, dim in enumerate(dims) if loop in dim), None) for dims in side]
        for side in (nest.operands, nest.results)
    )
    kind = nest.loops[loop].kind
    return Form(tuple(operands), tuple(kind if d is None else d for d in results))


def _by_position(unit: Operation, form: Form) -> bool:
    if unit.name in _BY_OFFSET:
        return True
    if all(d is None for d in form.operands):
        return unit.name != "broadcast_in_dim"  # made by counting, as an iota is
    written = _WRITTEN.get(unit.name.replace("scatter_", "scatter-"))
    return written is not None and isinstance(form.results[0], int) and form.operands[written] is None


def _check_combines(unit: Operation, kind: str, dtype: Any, adds_to_nothing: bool) -> None:
    """Refuses a loop whose parts, combined, do not give the whole batch's result."""
    if kind not in REDUCING or unit.name.replace("scatter_", "scatter-") not in _COMBINING:
        raise CannotCut(f"{unit} mixes examples")
    if unit.name.startswith("scatter") and kind == "sum" and not adds_to_nothing:
        raise CannotCut(f"{unit} adds examples to something else")
    floating = jnp.issubdtype(dtype, jnp.inexact)
    if kind in ("max", "min") and jnp.issubdtype(dtype, jnp.complexfloating):
        raise CannotCut(f"{unit} compares complex numbers, whose order has no place for NaN")
    if kind == "prod" and floating:
        raise CannotCut(f"{unit} multiplies examples, and products of some of them may overflow")
    if kind == "sum" and (dtype == jnp.bool_ or (floating and dtype.itemsize < 2)):
        raise CannotCut(f"{unit} adds up numbers of {dtype}, of which sums of sums differ")


def _is_window(eqn: Any, dim: int | None) -> bool:
    """Whether a gather takes all of a dim of its table."""
    return (
        dim is not None
        and eqn.params["slice_sizes"][dim] == eqn.invars[0].aval.shape[dim]
        and (dim not in eqn.params["dimension_numbers"].operand_batching_dims)
    )
