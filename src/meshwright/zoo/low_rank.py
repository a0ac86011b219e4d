"""Low-rank adapters (https://arxiv.org/abs/2106.09685): a weight that stays, with a small product beside it.

A weight W that a model multiplies by becomes W + scale · A · B, with A from its inputs to `rank` numbers and B from
these to its outputs. The sum is never made: y = x W + scale · (x A) B costs two small products, and the gradients are
A's and B's alone. Which dims of W are inputs is said by the einsum in which it is used, so the model is traced once to
collect these.

Letters in comments: W = stack · shared · inputs · outputs; `stack` are dims of layers that are scanned over, `shared`
those that the activations have as well, such as experts.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import keystr, register_dataclass, tree_leaves_with_path, tree_map_with_path

from meshwright.zoo.layers import Array, PyTree, Weight, project

_RANK = "z"  # the letter of the inner dim; the models use none beyond v


@partial(register_dataclass, data_fields=["weight", "down", "up"], meta_fields=["scale"])
@dataclass(frozen=True)
class LowRank(Weight):
    """A weight with an adapter; `project` multiplies by it."""

    weight: Array
    down: Array  # shared · inputs · rank
    up: Array  # shared · rank · outputs
    scale: float

    def project(self, spec: str, x: Array) -> Array:
        """The product with the weight and, added, that with the adapter."""
        into, down, inner, up, out = _letters(spec)
        small = jnp.einsum(f"{into},{down}->{inner}", x, self.down.astype(x.dtype))
        return project(spec, x, self.weight) + self.scale * jnp.einsum(
            f"{inner},{up}->{out}", small, self.up.astype(x.dtype)
        )


def _letters(spec: str) -> tuple[str, str, str, str, str]:
    """Letters of the activations, of A, of what is between, of B, and of the result."""
    (into, weight), out = spec.split("->")[0].split(","), spec.split("->")[1]
    inputs = "".join(c for c in weight if c not in out)
    shared = "".join(c for c in weight if c in out and c in into)
    outputs = "".join(c for c in weight if c in out and c not in into)
    inner = "".join(c for c in into if c not in inputs) + _RANK
    return into, shared + inputs + _RANK, inner, shared + _RANK + outputs, out


class _Uses:
    """The einsums in which weights are used, by path."""

    def __init__(self) -> None:
        self.specs: dict[str, str] = {}


@partial(register_dataclass, data_fields=["weight"], meta_fields=["path", "uses"])
@dataclass(frozen=True)
class _Observed(Weight):
    """A weight that notes how it is used."""

    weight: Array
    path: str
    uses: _Uses = field(hash=False, compare=False)

    def project(self, spec: str, x: Array) -> Array:
        self.uses.specs[self.path] = spec
        return project(spec, x, self.weight)

    def __getattr__(self, name: str) -> Any:  # weights that are not multiplied by are used as arrays
        return getattr(self.weight, name)

    def __jax_array__(self) -> Array:
        return self.weight


def adapter_shapes(loss: Any, params: PyTree, batch: PyTree, rank: int, targets: Collection[str]) -> PyTree:
    """Shapes of the adapters of a model's weights, by path; empty where no weight is a target.

    Args:
        loss: ``loss(params, batch)``.
        params, batch: Their shapes.
        rank: The inner size.
        targets: The last names of the weights that get an adapter; all that are multiplied by if there are none.
    """
    specs = _observed(loss, params, batch)
    found = {}
    for path, leaf in tree_leaves_with_path(params):
        name, last = _path(path), _path(path[-1:])
        if name in specs and (not targets or last in targets):
            found[name] = _shapes(leaf.shape, specs[name], rank)
    return found


def weight_names(loss: Any, params: PyTree, batch: PyTree) -> list[str]:
    """The last names of all weights that a model multiplies by."""
    return sorted({name.rsplit("/", 1)[-1] for name in _observed(loss, params, batch)})


def _observed(loss: Any, params: PyTree, batch: PyTree) -> dict[str, str]:
    uses = _Uses()

    def observe(params: PyTree, batch: PyTree) -> Array:
        return loss(tree_map_with_path(lambda path, leaf: _wrapped(leaf, _path(path), uses), params), batch)

    jax.eval_shape(observe, params, batch)
    return uses.specs


def _wrapped(leaf: Any, path: str, uses: _Uses) -> Array | _Observed:
    """Weights of layers are observed: the embedding and the head stay as they are, as is usual."""
    return _Observed(leaf, path, uses) if path.startswith("layers") and leaf.ndim > 1 else leaf


def _path(path: Any) -> str:
    return str(keystr(path, simple=True, separator="/"))


def _shapes(shape: tuple[int, ...], spec: str, rank: int) -> dict[str, Any]:
    """The shapes of A and B; leading dims of the weight that the einsum has not are stacked layers."""
    _, down, _, up, _ = _letters(spec)
    letters = spec.split("->")[0].split(",")[1]
    stack = shape[: len(shape) - len(letters)]
    size = dict(zip(letters, shape[len(stack) :], strict=True)) | {_RANK: rank}
    return {
        name: jax.ShapeDtypeStruct((*stack, *(size[c] for c in kind)), jnp.float32)
        for name, kind in (("down", down), ("up", up))
    }


def init_adapters(shapes: PyTree, key: Array) -> PyTree:
    """Fresh adapters: A is drawn, B is zero, so that the model begins as it is without them."""
    keys = jax.random.split(key, len(shapes))
    return {
        name: {
            "down": jax.random.normal(k, pair["down"].shape, jnp.float32) * 0.02,
            "up": jnp.zeros(pair["up"].shape, jnp.float32),
        }
        for k, (name, pair) in zip(keys, shapes.items(), strict=True)
    }


def adapted(params: PyTree, adapters: PyTree, scale: float) -> PyTree:
    """The parameters with an adapter beside each weight that has one."""

    def beside(path: Any, leaf: Array) -> Array | LowRank:
        pair = adapters.get(_path(path))
        return leaf if pair is None else LowRank(leaf, pair["down"], pair["up"], scale)

    return tree_map_with_path(beside, params)


def merged(params: PyTree, adapters: PyTree, scale: float) -> PyTree:
    """The parameters with the adapters' products added: the same model without adapters, in the weights' dtypes."""

    def add(path: Any, leaf: Array) -> Array:
        pair = adapters.get(_path(path))
        if pair is None:
            return leaf
        down, up = pair["down"], pair["up"]
        lead = leaf.shape[: down.ndim + up.ndim - 2 - leaf.ndim]  # of stacked layers and of experts
        rank = down.shape[-1]
        product = down.reshape(*lead, -1, rank) @ up.reshape(*lead, rank, -1)
        return (leaf + scale * product.reshape(leaf.shape)).astype(leaf.dtype)

    return tree_map_with_path(add, params)
