"""How many kernels a layer of our own engine's step starts beside its products, by the step itself.

With few sequences a step waits as long for small kernels (norms, rotations, sums with the residual, the cache) as for a
good part of the weights; where a model is split, each bank of slots that the step reaches starts some of its own. The
engine's step is traced for a GPU with two layers and with four, and its operations are fused as XLA does there
(`cost/xla_gpu`); the difference is what two layers start.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from meshwright.profiler import cluster as find_cluster

_FEW, _MORE = 2, 4  # layers that are traced; kinds of layers that take turns are in both
_LENGTH = 256  # of the slots; it changes the sizes of kernels and not which there are
_PRODUCTS = ("dot_general", "ragged_dot", "ragged_dot_general")


class SmallKernels(NamedTuple):
    """Kernels of a layer, in the mean, that are no products with weights.

    Attributes:
        layer: With all sequences in one bank of slots.
        bank: More of them for each other bank.
    """

    layer: float
    bank: float


#: What a layer of Llama has, for models that the engine does not run yet.
_USUAL = SmallKernels(12.0, 6.0)


@lru_cache(maxsize=64)
def small_kernels(config: Any, whole: bool = True) -> SmallKernels:
    """Those of a model, by the zoo's `Config`: whole on each device with the engine's own kernel, or in banks of slots.

    >>> from meshwright.zoo import build
    >>> 8 <= small_kernels(build("llama-tiny").config).layer <= 14
    True
    """
    if not hasattr(import_module(type(config).__module__), "logits"):
        return _USUAL
    if whole:
        return SmallKernels((_kernels(config, _MORE, ()) - _kernels(config, _FEW, ())) / 2, 0.0)
    one, two = ((_kernels(config, _MORE, banks) - _kernels(config, _FEW, banks)) / 2 for banks in ((8,), (1, 7)))
    return SmallKernels(one, two - one)


def _kernels(config: Any, layers: int, banks: Sequence[int]) -> int:
    import jax
    import jax.numpy as jnp

    from meshwright.cost.xla_gpu.liveness import liveness
    from meshwright.graph.tracing.trace import trace
    from meshwright.rules.registry import loop_nest
    from meshwright.serving.models import Decoder, SlotCache, StepShape, TritonCache

    own, rows = {field.name for field in fields(config)}, sum(banks) or TritonCache.least_rows
    sizes = {"layers": layers, "dtype": "bfloat16"} | ({"positions": _LENGTH} if "positions" in own else {})
    cache = SlotCache(tuple(banks), _LENGTH, "bfloat16") if banks else TritonCache((rows,), _LENGTH, "bfloat16")
    decoder = Decoder.of(replace(config, **sizes), cache)
    shape = StepShape(rows, 0, 0, False, 0)
    last, packed = (jax.ShapeDtypeStruct((size,), jnp.int32) for size in (rows, shape.size))
    given = decoder.params(), decoder.arrays(), last, packed
    graph = trace(partial(decoder.step, shape), *given, cluster=find_cluster("1x1 h200")).graph
    starts = liveness(graph, [loop_nest(op.signature) for op in graph.ops], 1).traffic.starts
    return sum(bool(one) and op.signature.primitive not in _PRODUCTS for op, one in zip(graph.ops, starts, strict=True))
