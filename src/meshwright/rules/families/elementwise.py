"""Elementwise operations: every result element depends on the same element of each operand, or on a scalar."""

from dataclasses import replace

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops, same_shape

UNARY = """
    abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj convert_element_type copy cos cosh
    digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow is_finite lgamma log log1p log2 logistic neg not
    one_minus_square population_count real reduce_precision round rsqrt sign sin sinh sqrt square tan tanh
"""
BINARY = """
    add add_any and atan2 complex div eq eq_to ge gt igamma igamma_grad_a igammac le le_to lt lt_to max min mul mulhi ne
    nextafter or polygamma pow rem shift_left shift_right_arithmetic shift_right_logical sub xor zeta
"""
# More than two operands, several results, or a mere annotation of one array.
OTHER = """
    clamp layout_constraint mesh_cast name pvary regularized_incomplete_beta reshard select_n sharding_constraint
    stop_gradient philox2x32 philox4x32 threefry2x32 threefry4x32 with_memory_space_constraint zeros_like
"""
# Operations that take far longer than a sum or a product on processors without a special-function unit.
SPECIAL = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh div erf erf_inv erfc exp exp2 expm1 log log1p log2 logistic pow
    rsqrt sin sinh sqrt tan tanh
"""

# Operations with one result, computed from arrays of its shape and from scalars.
EVEN = frozenset(f"{BINARY} {UNARY} clamp select_n".split())


def elementwise(op: Signature) -> LoopNest | None:
    """One parallel loop for each dim; scalars (predicates, bounds, literals) are needed everywhere."""
    loops = same_shape(op, fusible=True)
    return replace(loops, special=op.primitive in SPECIAL.split()) if loops is not None else None


def pairwise(op: Signature) -> LoopNest | None:
    """Result ``i`` is operand ``i``; each pair has its own loops, as in an optimization barrier."""
    if [tensor.shape for tensor in op.operands] != [tensor.shape for tensor in op.results]:
        return None
    loops = Loops()
    dims = [loops.spread(tensor.shape) for tensor in op.operands]
    return loops.nest(dims, dims, fusible=not op.host_copy_bytes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(f"{UNARY} {BINARY} {OTHER}".split(), elementwise),
    **dict.fromkeys(("optimization_barrier", "device_put", "shard_alike"), pairwise),
}
