"""Kernels of XLA's GPU backend that take longer than their products and their bytes explain.

All figures are of one H200, jax 0.11.2: of the grid of single operations that `benchmarks/grid.py` times (2026-11-19,
252 of them), and of kernels in the train steps of `benchmarks/strangers` that are told. What has no figure yet is in
`UNMEASURED`, and a plan says how much of it rests on those. Work is counted in special functions (`Chip.special_s`), so
that it scales with the chip and with the split.

- A **look-up** reads rows in no order, mostly from the cache: 0.4 (sorted) to 0.8 ps (drawn) an element of 4 bytes more
  than the bytes take. Indices are assumed to be drawn over the whole table.
- A **scatter** that adds does so by atomic operations: 1 ps for each number of 4 bytes more than the bytes take, and 10
  ps for each row; 8 ps for numbers of 2 bytes, which are exchanged with their neighbour. Maxima, minima and products
  take 4 ps for each number. Indices that repeat few rows take far longer, most of all where numbers are exchanged, one
  after the other, or where they are sorted: 2 to 800 times as long in the grid. Nothing in a program tells, and only a
  rehearsal with the user's batch does.
- A **sort** exchanges pairs in log n · (log n + 1) / 2 rounds, 0.75 ps for each element and round; `top_k` sorts whole.
- The gradient of a **maximum over windows** selects and adds, 6.3 ps for each element of the image.
- **Sums over all dims but the last**, of batch norms and biases, reach two thirds of the rate of streams in programs,
  where they are fused with what is summed; alone they reach all of it.
- **Running sums** are log n passes over halves, 5 ps for each element; a logarithm of a running sum of exponentials
  takes four times as long.
- A **Fourier transform** takes 1.6 ps for each real number and dim on the way there, and 10 ps for each complex number
  and dim on the way back, which copies.
- **Decompositions** go column by column: a fixed time for each, whether of one matrix of 2,048 columns or of 256 of 32.
- **Drawn numbers** take 1.4 ps for each of 4 bytes.
"""

from math import ceil, log2, prod
from typing import TYPE_CHECKING

from meshwright.hardware import Chip
from meshwright.rules.base import Signature
from meshwright.rules.families.gathering import SCATTERS

if TYPE_CHECKING:
    from meshwright.graph import Graph

#: In special functions of 0.26 ps.
_LOOKED_UP = 0.55  # for each byte
_ADDED, _ADDED_HALF, _ROW = 4.0, 30.0, 40.0  # for each number of 4 bytes or more, of 2 bytes, and for each row
_EXCHANGED = 16.0  # for each number of 4 bytes of which a maximum, a minimum or a product is left
_ROUND = 3.0  # of a sort, for each element
_RADIX = 480.0  # for each element of a long row, which is sorted digit by digit
_SELECTED = 24.0
_SUMMED = 1.5
_CUMULATED, _CUMULATED_EXPONENTIALS = 20.0, 90.0  # for each element: JAX writes them as log n passes over halves
_THERE, _BACK = 6.0, 40.0  # of a Fourier transform, for each number and dim
_TO_REAL = 3  # JAX's kind of the way back to real numbers
_DRAWN = 5.0
#: Of decompositions, for each column: 0.35 µs of a Cholesky factor to 30 µs of singular values.
_COLUMN = {
    "cholesky": 1.3e6,
    "triangular_solve": 1.0e6,
    "lu": 7e6,
    "geqrf": 12e6,
    "qr": 16e6,
    "householder_product": 4e6,
    "eigh": 3e7,
    "svd": 1.1e8,
}
_AT_ONCE = 2**22  # numbers of matrices that take no longer than a part of them

#: Operations whose figures are estimates.
UNMEASURED = frozenset(("cumprod", "cummax", "cummin", "eig", "schur", "hessenberg", "tridiagonal")).union(
    *({f"scatter-{how}", f"scatter_{how}"} for how in ("min", "mul"))
)
#: Operations that were measured alone, and in no program.
MEASURED_ALONE = frozenset(("cumsum", "cumlogsumexp", "fft", *_COLUMN))

# Part of the rate of half precision, relative to peak, that products of float32 reach in programs: 0.5 to 1.0. Alone
# they reach 0.88 of it, but in programs their kernels compute what is fused into them as well.
_TF32 = 0.72
_TILE, _CORES = 128, 132  # of a kernel that cannot divide its sum, each multiprocessor has one tile of the result
_LONE_TILE = 0.28  # part of its share of the rate that such a multiprocessor reaches for sequences, in one program
_OF_TILE = {"images": 1.6, "volumes": 0.8}  # the same of half a tile: images in the grid, volumes in one program
_WIDE_WINDOW, _WIDE_RATE = 32, 0.24  # wider windows have no quick kernel
_HOLES = 0.37  # windows with holes, where they are kept
_FEW_FEATURES = 0.12  # convolutions of fewer than 8 features: as many are computed, at this part of the rate
_GROUPED, _GROUPED_GRADIENT = 0.33, 0.1  # depthwise windows, and their gradient: estimates

#: The rates that are estimates.
ESTIMATED_RATES = frozenset((_GROUPED, _GROUPED_GRADIENT))

_SCATTERS = {*SCATTERS, *(name.replace("-", "_") for name in SCATTERS)}


def counted(op: Signature) -> float:
    """What an operation does beside products and bytes, in special functions."""
    name = op.primitive
    if name == "gather":
        return _LOOKED_UP * op.results[0].num_bytes
    if name in _SCATTERS:
        rows, updates = prod(op.operands[1].shape[:-1]), op.operands[2]
        exchanged = _EXCHANGED if name.endswith(("max", "min", "mul")) else _ADDED
        return _ROW * rows + prod(updates.shape) * (_ADDED_HALF if updates.itemsize <= 2 else exchanged)
    if name == "sort":
        return _sorting(op.operands[0].shape, op.params["dimension"])
    if name == "top_k":
        return _sorting(op.operands[0].shape, len(op.operands[0].shape) - 1)
    if name.startswith("select_and_scatter"):
        return _SELECTED * prod(op.results[0].shape)
    if name == "reduce_sum" and len(op.operands[0].shape) - 1 not in op.params["axes"]:
        return _SUMMED * prod(op.operands[0].shape)
    if name.startswith("cum"):
        each = _CUMULATED_EXPONENTIALS if name == "cumlogsumexp" else _CUMULATED
        return each * prod(op.operands[0].shape)
    if name == "fft":
        each = _BACK if int(op.params["fft_type"]) == _TO_REAL else _THERE
        return each * prod(op.operands[0].shape) * len(op.params["fft_lengths"])
    if name in _COLUMN:
        shape = op.operands[0].shape
        return _COLUMN[name] * min(shape[-2:]) * max(prod(shape) / _AT_ONCE, 1.0)
    if name in ("random_bits", "threefry2x32"):
        return _DRAWN * prod(op.results[0].shape)
    return 0.0


def _sorting(shape: tuple[int, ...], dim: int) -> float:
    rounds = ceil(log2(max(shape[dim], 2)))
    return prod(shape) * min(_ROUND * rounds * (rounds + 1) / 2, _RADIX)


def rate_left(op: Signature) -> float:
    """Part of a product's rate, and of that of its bytes, that is left to a product or convolution."""
    if op.primitive.startswith("ragged_dot"):
        return 1 / num_experts(op)
    if op.primitive == "conv_general_dilated" and op.params["batch_group_count"] > 1:
        return _GROUPED_GRADIENT
    if op.primitive == "conv_general_dilated" and op.params["feature_group_count"] > 1:
        return _GROUPED_GRADIENT if _is_gradient(op) else _GROUPED
    return 1.0


def num_experts(op: Signature) -> int:
    """How many matrices a ragged product has: XLA multiplies every row with every one of them, and masks the rest."""
    return max(op.operands[2].shape[0], 1) if len(op.operands) > 2 and op.operands[2].shape else 1


def workspace_bytes(op: Signature) -> float:
    """Bytes that an operation takes while it runs, beside its operands and results.

    A ragged product masks its rows for every matrix, and brings them in another order of dims. So does a convolution of
    volumes of float32 with both sides. The gradient of a transposed convolution's window fills the image with zeros.
    """
    if op.primitive.startswith("ragged_dot"):
        return 2.0 * num_experts(op) * op.operands[0].num_bytes
    if op.primitive == "conv_general_dilated" and prod(op.params["lhs_dilation"]) > 1 and _is_gradient(op):
        return _filled_bytes(op)
    if op.primitive == "conv_general_dilated" and len(op.operands[0].shape) == 5 and op.operands[0].dtype == "float32":
        return float(op.operands[0].num_bytes + op.results[0].num_bytes)
    return 0.0


def _filled_bytes(op: Signature) -> float:
    """Bytes of a convolution's image with zeros between its pixels and around them."""
    image, params = op.operands[0], op.params
    sizes, spaces = list(image.shape), params["dimension_numbers"].lhs_spec[2:]
    for dim, zeros, (low, high) in zip(spaces, params["lhs_dilation"], params["padding"], strict=True):
        sizes[dim] = max((sizes[dim] - 1) * zeros + 1 + low + high, 1)
    return float(prod(sizes) * image.itemsize)


def dense_remarks(graph: "Graph", chip: Chip | None) -> list[str]:
    """Says where ragged products are dense over all of their matrices, and what is faster."""
    if chip is None or chip.vendor != "NVIDIA":
        return []
    ops = [graph.columns.signatures[number] for number in graph.columns.examples]
    most = max((num_experts(op) for op in ops if op.primitive.startswith("ragged_dot")), default=1)
    if most == 1:
        return []
    return [
        f"lax.ragged_dot multiplies every row with all {most} matrices on {chip.name}, and masks the rest: XLA has no "
        f"kernel for it on GPUs. It takes {most} times the arithmetic and memory, forward and backward. Faster: give "
        "every expert room for the same number of rows and multiply once, by jnp.einsum over (experts, rows, "
        "features); or a Pallas kernel that multiplies group by group, which @mw.rule tells how to split."
    ]


def _is_gradient(op: Signature) -> bool:
    """Whether a convolution is the gradient of a window: it has as many offsets as the image has pixels."""
    numbers = op.params["dimension_numbers"]
    offsets, positions = (op.operands[1].shape[d] for d in numbers.rhs_spec[2:]), numbers.out_spec[2:]
    return prod(offsets) > prod(op.results[0].shape[d] for d in positions)


def _turns_window(op: Signature) -> bool:
    """Whether a convolution has its window's features the other way round, as the gradient of another one has."""
    outputs, inputs, *spaces = op.params["dimension_numbers"].rhs_spec
    return bool(outputs < inputs) == (min(spaces, default=0) < min(outputs, inputs))


def arithmetic_left(op: Signature) -> float:
    """Part of a product's rate that is left to products of float32, and to kernels that compute more than is asked."""
    return _asked_part(op) * (_TF32 if op.operands and op.operands[0].dtype == "float32" else 1.0)


def _asked_part(op: Signature) -> float:
    """Part of a convolution's arithmetic that is asked for; the rest its kernel spends on zeros and idle cores."""
    if op.primitive != "conv_general_dilated" or op.params["feature_group_count"] * op.params["batch_group_count"] > 1:
        return 1.0
    params, numbers = op.params, op.params["dimension_numbers"]
    image, window, made = op.operands[0].shape, op.operands[1].shape, op.results[0].shape
    sizes = [window[d] for d in numbers.rhs_spec[2:]]
    positions = [made[d] for d in numbers.out_spec[2:]]
    is_gradient = _is_gradient(op)
    zeros = prod(params["lhs_dilation"])
    if is_gradient and (zeros > 1 or any(stride > 1 for stride in params["window_strides"])):
        # The gradient of a window with holes, or of a transposed convolution: cuDNN has no kernel for it, and XLA
        # convolves with a huge window, whose features are the examples of the batch.
        rows, columns = made[numbers.out_spec[0]] * prod(positions), made[numbers.out_spec[1]]
        tiles, examples = ceil(rows / _TILE) * ceil(columns / _TILE), image[numbers.lhs_spec[1]]
        if zeros == 1 and len(sizes) == 1:
            return min(1.0, _LONE_TILE * tiles / _CORES) * min(1.0, examples / 8)
        # It multiplies zeros like other numbers, a tile on each multiprocessor at a time.
        halves = ceil(rows / _TILE) * ceil(columns / (_TILE // 2))
        dense = max(examples, 8) * _CORES * ceil(halves / _CORES) * _TILE * _TILE // 2
        return min(1.0, _OF_TILE["images" if len(sizes) < 3 else "volumes"] * prod(made) * examples / dense / zeros)
    rate = 1.0 if is_gradient or _turns_window(op) else 1 / zeros  # of a transposed convolution; cuDNN has its gradient
    if not is_gradient:
        for size, holes, (low, high) in zip(sizes, params["rhs_dilation"], params["padding"], strict=True):
            if holes > 1 and size > 1:
                whole = (size - 1) * holes + 1  # without padding, the holes are filled with zeros
                rate *= size / whole * (_WIDE_RATE if whole > _WIDE_WINDOW else 1.0) if low == high == 0 else _HOLES
    features = [made[numbers.out_spec[1]], image[numbers.lhs_spec[0 if is_gradient else 1]]]
    few = min(features)
    return rate * (_FEW_FEATURES * few / 8 if few < 8 else 1.0)
