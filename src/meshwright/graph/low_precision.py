"""Products of narrow numbers: their operands are narrow themselves, or narrow numbers that were multiplied by a scale.

Libraries write an fp8 product in two ways: directly, as a `dot_general` of float8 arrays, or as a product of wide
arrays that are float8 arrays converted and scaled. XLA's compiler for GPUs turns the second into the first.
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np

from meshwright.graph.graph import Graph
from meshwright.hardware import Chip, chips
from meshwright.rules.base import multiplied_dtype

NARROW_FLOATS = ("float8_", "float6_", "float4_")
_PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
_MOVED = ("transpose", "reshape", "copy", "optimization_barrier", "squeeze", "broadcast_in_dim")
_SCALED = ("mul", "div")


def dequantized(graph: Graph) -> Mapping[int, str]:
    """Products whose operands are both scaled numbers of a narrow float, by operation, with the dtype of the first."""
    columns = graph.columns
    if not any(kind.dtype.startswith(NARROW_FLOATS) for kind in graph.kinds):
        return {}
    dtype_of = {}
    products = [number for number, op in enumerate(columns.signatures) if op.primitive == "dot_general"]
    for index in np.flatnonzero(np.isin(columns.signature, products)).tolist():
        if not graph.types[int(columns.reads_of(index)[0])].dtype.startswith(NARROW_FLOATS):
            dtypes = [_narrow(graph, int(value)) for value in columns.reads_of(index)]
            if all(dtypes):
                dtype_of[index] = dtypes[0]
    return dtype_of


def _narrow(graph: Graph, value: int) -> str:
    """The narrow float that a wide value is made of by conversion, scaling and moves; empty if it is not."""
    columns, was_converted = graph.columns, False
    while (index := int(columns.producer[value])) >= 0:
        op, reads = columns.signatures[columns.signature[index]], columns.reads_of(index).tolist()
        if op.primitive == "convert_element_type":
            was_converted = True
        elif op.primitive in _SCALED:
            reads = [v for v in reads if not _is_scale(graph, v)]
            if len(reads) != 1:
                return ""
        elif op.primitive not in _MOVED:
            return ""
        value = reads[0]
        if was_converted and graph.types[value].dtype.startswith(NARROW_FLOATS):
            return graph.types[value].dtype
    return ""


def _is_scale(graph: Graph, value: int) -> bool:
    """Whether a value is one number, or one number that is broadcast."""
    while True:
        if graph.sizes[value] == 1:
            return True
        index = int(graph.columns.producer[value])
        if index < 0 or graph.columns.primitive(index) not in _MOVED:
            return False
        value = int(graph.columns.reads_of(index)[0])


def slow_remarks(graph: Graph, chip: Chip | None) -> list[str]:
    """Says which products of narrow numbers run no faster than wide ones, for want of a matrix unit."""
    columns, fast = graph.columns, _fast_units(chip) if chip is not None else set()
    dtypes = [multiplied_dtype(op) if op.primitive in _PRODUCTS else "" for op in columns.signatures]
    slow = [dtype != "" and _unit(dtype) not in ("", *fast) for dtype in dtypes]
    counts = np.bincount(columns.signature, minlength=len(dtypes)).tolist()
    found = Counter[str]()
    for dtype, is_slow, count in zip(dtypes, slow, counts, strict=True):
        found[dtype] += count if is_slow else 0
    found.update(dtype for dtype in dequantized(graph).values() if _unit(dtype) not in fast)
    return [
        f"{count} product{'s' * (count > 1)} of {dtype} {'run' if count > 1 else 'runs'} at the rate of a wider type: "
        f"{chip.name} has no matrix unit for {dtype}. "
        f"Compute in bfloat16, or plan for a chip that has one: {', '.join(_chips_with(_unit(dtype)))}."
        for dtype, count in sorted(found.items())
        if chip is not None and count
    ]


def _unit(dtype: str) -> str:
    """The matrix unit, as chips name their rates, that products of a narrow dtype need; empty for wide ones."""
    if dtype.startswith(NARROW_FLOATS):
        return "float4" if dtype.startswith("float4_") else "float8"
    return "int8" if dtype in ("int8", "uint8", "int4", "uint4") else ""


def _chips_with(unit: str) -> list[str]:
    return [chip.name for chip in chips() if unit in _fast_units(chip)]


def _fast_units(chip: Chip) -> set[str]:
    """The narrow types whose products a chip does faster than those of half precision."""
    rates = dict(chip.flops)
    wide = max(rates.get("bfloat16", 0.0), rates.get("float16", 0.0))
    return {unit for unit in ("float8", "float4", "int8") if rates.get(unit, 0.0) > wide}
