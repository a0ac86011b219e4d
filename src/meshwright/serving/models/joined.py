"""Products that read the same activations, as one: queries with keys and values, and the gate with what it gates.

A product with few tokens takes about as long as its weights take to read, and one with few columns leaves most of a GPU
idle. So a model that is whole on one device keeps the weights of such products side by side; the layers of the zoo
find parts of them where they look for their own weights.
"""

from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp
from jax.lax import slice_in_dim

from meshwright.zoo.layers import Array, PyTree, Weight, project

#: What is joined, and how many dims these weights have: those of experts have one more, and stay as they are.
_GROUPS = {"qkv": (("q", "k", "v"), 3), "gate_up": (("gate", "up"), 2)}


def join_products(params: PyTree) -> PyTree:
    """Parameters whose weights lie side by side; the given ones are used up, since both would not fit together."""
    for layer in params["layers"]:
        for joined, (names, dims) in _GROUPS.items():
            if all(name in layer and layer[name].ndim == dims for name in names):
                layer[joined] = jnp.concatenate([layer.pop(name) for name in names], axis=1)
    return params


def parts_of_products(params: PyTree, kv_heads: int) -> PyTree:
    """The parameters as the zoo knows them, with parts in place of what is joined."""
    return params | {"layers": [_parts_of_layer(layer, kv_heads) for layer in params["layers"]]}


def _parts_of_layer(layer: PyTree, kv_heads: int) -> PyTree:
    parts = {name: weight for name, weight in layer.items() if name not in _GROUPS}
    for joined in _GROUPS.keys() & layer.keys():
        product, columns = _Product(layer[joined]), layer[joined].shape[1]
        ends = [columns - 2 * kv_heads, columns - kv_heads] if joined == "qkv" else [columns // 2]
        for name, (first, end) in zip(_GROUPS[joined][0], pairwise([0, *ends, columns]), strict=True):
            parts[name] = _Part(product, first, end)
    return parts


class _Product:
    """The product with weights that lie side by side, computed once for all of its parts."""

    def __init__(self, weight: Array):
        self._weight = weight
        self._made: tuple[Array, Array] | None = None

    def of(self, spec: str, x: Array) -> Array:
        if self._made is None or self._made[0] is not x:
            self._made = x, project(spec, x, self._weight)
        return self._made[1]


@dataclass(frozen=True)
class _Part(Weight):
    """Columns of a weight, which is (rows, columns, …)."""

    product: _Product
    first: int
    end: int

    def project(self, spec: str, x: Array) -> Array:
        weights, out = spec.split(",")[1].split("->")
        return slice_in_dim(self.product.of(spec, x), self.first, self.end, axis=out.index(weights[1]))
