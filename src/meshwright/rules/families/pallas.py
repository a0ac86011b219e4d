"""Pallas kernels: a loop for each axis of the grid that only selects blocks, from the index maps of the block specs.

Programs of the grid that differ along such an axis read and write different blocks and do the same work on them. An
axis is a parallel loop if

* every index map that uses it passes it on unchanged, for one dim of the array;
* its blocks cover these dims exactly;
* every result has such a dim: otherwise programs write to the same block, one after the other;
* the kernel's body asks neither for its position along the axis nor for the number of programs.

All other axes, and all dims of blocks, are unsplittable.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from meshwright.rules.base import Dims, LoopNest, Rule, Signature
from meshwright.rules.builder import Loops
from meshwright.rules.families.kernel_work import body_flops

#: The makers whose chips each of Pallas' compilers is for.
_MAKERS = {"mosaic": ("Google",), "triton": ("NVIDIA", "AMD"), "mosaic_gpu": ("NVIDIA",)}

Block = tuple[int | None, int]  # the axis of the grid that selects blocks of a dim, if there is one, and their size


@dataclass(frozen=True)
class Grid:
    """The grid of a kernel.

    Attributes:
        sizes: Number of programs along each axis.
        blocks: For each array that is read or written in blocks, inputs first, the blocks of each dim.
        num_whole: How many operands come before the inputs: sizes of the grid that are not known before the kernel
            runs, and operands of the index maps.
        obstacles: Why an axis is not a parallel loop, by axis.
    """

    sizes: tuple[Any, ...]
    blocks: tuple[tuple[Block, ...], ...]
    num_whole: int
    obstacles: dict[int, str]


def grid_of(op: Signature) -> Grid:
    """The grid of a `pallas_call`."""
    mapping, obstacles = op.params["grid_mapping"], dict[int, str]()
    sizes = tuple(mapping.grid)
    for axis, size in enumerate(sizes):
        if not isinstance(size, int):
            obstacles[axis] = "its size is not known before it runs"
    blocks = tuple(_blocks(array, sizes, obstacles) for array in mapping.block_mappings)
    for dims in blocks[mapping.num_inputs :]:
        for axis in set(range(len(sizes))) - {axis for axis, _ in dims}:
            obstacles.setdefault(axis, "several of its programs write to the same block")
    num_whole = len(op.operands) - mapping.num_inputs
    for operand, result in op.params.get("input_output_aliases") or ():
        pair = ([axis for axis, _ in blocks[n]] for n in (operand - num_whole, mapping.num_inputs + result))
        for axis in {axis for dims in zip(*pair, strict=True) if len(set(dims)) > 1 for axis in dims} - {None}:
            obstacles.setdefault(axis, "an operand and the result that takes its memory are selected differently by it")
    # Axes that `jax.vmap` added are not counted by the kernel's body.
    kernel_axes = [axis for axis in range(len(sizes)) if axis not in mapping.vmapped_dims]
    for axis in _asked_for(op.params["jaxpr"]):
        obstacles[kernel_axes[axis]] = "the kernel asks for its position along it"
    if op.params.get("mesh") is not None:
        obstacles |= dict.fromkeys(range(len(sizes)), "it places its programs on the cores of a chip itself")
    return Grid(sizes, blocks, num_whole, obstacles)


def _blocks(array: Any, sizes: Sequence[Any], obstacles: dict[int, str]) -> tuple[Block, ...]:
    """The blocks of one array; notes the axes that do more than to select them."""
    index_map = array.index_map_jaxpr.jaxpr
    positions = {id(var): axis for axis, var in enumerate(index_map.invars[: len(sizes)])}
    for eqn in index_map.eqns:
        for var in eqn.invars:
            if id(var) in positions:
                obstacles.setdefault(positions[id(var)], "an index map computes with it")
    blocks: list[Block] = []
    for out, block, whole in zip(index_map.outvars, array.block_shape, array.array_aval.shape, strict=False):
        axis, size = positions.get(id(out)), _block_size(block)
        if axis is not None and any(axis == earlier for earlier, _ in blocks):
            obstacles.setdefault(axis, "it selects blocks of two dims of one array")
        elif axis is not None and isinstance(sizes[axis], int) and size * sizes[axis] != whole:
            obstacles.setdefault(axis, f"its blocks of {size} do not cover a dim of {whole} exactly")
        blocks.append((axis, size))
    return tuple(blocks)


def _block_size(block: Any) -> int:
    """Elements of a block along a dim; 0, which covers nothing, if blocks may overlap."""
    if isinstance(block, int):
        return block
    kind = type(block).__name__
    return 1 if kind in ("Squeezed", "NoneType") else block.block_size if kind == "Blocked" else 0


def _asked_for(jaxpr: Any) -> Iterator[int]:
    """The axes whose position or number of programs a kernel's body asks for."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("program_id", "num_programs"):
            yield eqn.params["axis"]
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from _asked_for(inner)


def pallas_call(op: Signature) -> LoopNest:
    """A nest with a parallel loop for each axis of the grid that allows it; all else is unsplittable."""
    grid, loops = grid_of(op), Loops()
    along = {axis: loops.add(size) for axis, size in enumerate(grid.sizes) if axis not in grid.obstacles and size > 1}

    def dims(blocks: Sequence[Block], shape: Sequence[int]) -> Dims:
        dims_of_array = []
        for (axis, block), size in zip(blocks, shape, strict=True):
            outer = along.get(-1 if axis is None else axis)
            inner = loops.add(size if outer is None else block, "unsplittable")
            dims_of_array.append(inner if outer is None else outer + inner if block > 1 else outer)
        return tuple(dims_of_array)

    num_inputs = len(op.operands) - grid.num_whole
    tensors = (*op.operands[grid.num_whole :], *op.results)
    described = [dims(blocks, tensor.shape) for blocks, tensor in zip(grid.blocks, tensors, strict=True)]
    whole = [loops.fixed(tensor.shape) for tensor in op.operands[: grid.num_whole]]
    return loops.nest([*whole, *described[:num_inputs]], described[num_inputs:], _flops(op, grid), leads=True)


def _flops(op: Signature, grid: Grid) -> float:
    """FLOPs of products: as the author of the kernel estimated them, or else as the body has them."""
    estimate = op.params.get("cost_estimate")
    if estimate is not None:
        return float(estimate.flops)
    sizes = [size for axis, size in enumerate(grid.sizes) if axis not in op.params["grid_mapping"].vmapped_dims]
    if not all(isinstance(size, int) for size in grid.sizes):
        return 0.0
    body = op.params["jaxpr"]
    return prod(grid.sizes) * body_flops(body, sizes, sorted(set(_asked_for(body))), op.params.get("tables", ()))


def tables_of(op: Signature) -> range:
    """The operands of a `pallas_call` that index maps and the body look up by position."""
    mapping = op.params["grid_mapping"]
    first = mapping.num_dynamic_grid_bounds
    return range(first, first + mapping.num_index_operands)


def made_for(op: Signature) -> tuple[str, ...]:
    """The makers of the chips that a kernel is written for, by the compiler that it has parameters of; or none."""
    compiler = type(op.params.get("compiler_params")).__module__.rpartition(".")[0].rpartition(".")[2]
    return () if op.params.get("interpret") else _MAKERS.get(compiler, ())


def why_whole(op: Signature) -> str:
    """Why no axis of a kernel's grid is a parallel loop, in words."""
    grid = grid_of(op)
    reasons = [f"along axis {axis} of its grid {reason}" for axis, reason in sorted(grid.obstacles.items())]
    return "; ".join(reasons) or "its grid has one program"


RULES: dict[str, Rule] = {"pallas_call": pallas_call}
