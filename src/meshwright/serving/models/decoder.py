"""One step of a decoder of the zoo: the next token's scores of running sequences and of prompts, in one batch.

All tokens of a step, whichever sequence they are of, are one line of tokens for the layers' products with weights; only
attention takes them apart again. So a chunk of a prompt costs a step that reads all weights anyway little.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.errors import ServingError
from meshwright.serving.models.attention import Scoring, has_kernel
from meshwright.serving.models.caches import Cache, SlotCache
from meshwright.serving.models.joined import parts_of_products
from meshwright.serving.models.work import Prompts, Running, StepShape
from meshwright.zoo.layers import Array, PyTree

#: Fields of a zoo `Config` whose values differ in serving: no token is dropped (each has buffers of its own), layers
#: are unrolled (a scan copies weights and cache), and nothing is recomputed or left out.
_SERVING = {"group_size": 1, "scan": False, "checkpoint": "none", "dropout": 0.0}


@dataclass(frozen=True)
class Decoder:
    """A model of the zoo to be served, with its cache.

    Attributes:
        config: The zoo's `Config`.
        cache: What keeps keys and values.
    """

    config: Any
    cache: Cache

    @classmethod
    def of(cls, config: Any, cache: Cache) -> "Decoder":
        """The decoder of a config that may be one of training."""
        own = {field.name for field in fields(config)}
        if not hasattr(import_module(type(config).__module__), "logits"):
            family = type(config).__module__.rpartition(".")[2]
            raise ServingError(f"the zoo's {family} generates no text; give a decoder, such as one of llama or gpt")
        return cls(replace(config, **{name: value for name, value in _SERVING.items() if name in own}), cache)

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values in a layer."""
        return getattr(self.config, "kv_heads", None) or self.config.heads

    @property
    def head_dim(self) -> int:
        return getattr(self.config, "head_dim", None) or self.config.hidden // self.config.heads

    def has_kernel(self) -> bool:
        """Whether this machine has a kernel for the attention of all layers, so that no scores are written out."""
        q = jax.ShapeDtypeStruct((1, 1, self.config.heads, self.head_dim), self.config.dtype)
        sinks = self.params()["layers"][0].get("sinks")
        return has_kernel(q, Scoring(self.config.attention, None, 1.0, sinks, getattr(self.config, "score_cap", None)))

    def arrays(self) -> PyTree:
        """The types of the cache's arrays."""
        return self.cache.arrays(self.config.layers, self.kv_heads, self.head_dim)

    def params(self) -> PyTree:
        """The types of the parameters, in the dtype they are used in."""
        init = import_module(type(self.config).__module__).init
        shapes = jax.eval_shape(partial(init, self.config), jax.random.key(0))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, self.config.dtype), shapes)

    def step(
        self, shape: StepShape, params: PyTree, arrays: PyTree, last: Array, packed: Array
    ) -> tuple[PyTree, Array, Array]:
        """Computes a step.

        Args:
            shape: Its sizes.
            params: The parameters, or what `join_products` makes of them.
            arrays: The cache.
            last: The token that was drawn last for each slot.
            packed: What to compute, as `StepShape.packed` and `StepShape.unpack` say.

        Returns:
            The cache, the scores of the next token of each row, (rows, vocab), and of each chunk's last token,
            (prompts, vocab).
        """
        rows, prompts = shape.unpack(packed)
        given = jnp.where(rows.given >= 0, rows.given, last.at[rows.slots].get(mode="clip"))
        tokens = jnp.concatenate([given, prompts.tokens.reshape(-1)])[None]
        positions = jnp.concatenate([rows.positions, prompts.positions.reshape(-1)])
        mix = _Mix(self.cache, list(arrays), rows, prompts)
        ends = jnp.arange(shape.prompts) * shape.tokens + jnp.maximum(prompts.counts - 1, 0)
        wanted = jnp.concatenate([jnp.arange(shape.rows), shape.rows + ends])
        family = import_module(type(self.config).__module__)
        # Padding may lie past the end of a table of positions; its scores are not looked at, but must be finite.
        positions = jnp.minimum(positions, self._most_positions() - 1)
        parts = parts_of_products(params, self.kv_heads)
        scores = family.logits(self.config, parts, tokens, positions, mix, wanted)[0]
        return mix.arrays, scores[: shape.rows], scores[shape.rows :]

    def copied(self, arrays: PyTree, pair: Array) -> PyTree:
        """The cache with the whole of one slot, the first of a pair, copied to another."""
        assert isinstance(self.cache, SlotCache), "pages are shared and never copied"
        return [self.cache.copied(layer, pair[0], pair[1]) for layer in arrays]

    def take(self, length: int, arrays: PyTree, place: Array) -> PyTree:
        """Keys and values of the first `length` positions of one sequence: a pair for each of some layers.

        Args:
            length: How many, those that are not computed yet included.
            arrays: The cache of these layers.
            place: How many positions are computed, the slot, and the blocks, as numbers in a line.
        """
        return [self.cache.take(layer, place, length, self.config.dtype) for layer in arrays]

    def put(self, arrays: PyTree, parcel: PyTree, place: Array) -> PyTree:
        """The cache of some layers with one sequence written to it, the reverse of `take`."""
        return [self.cache.put(layer, pair, place) for layer, pair in zip(arrays, parcel, strict=True)]

    def _most_positions(self) -> int:
        return getattr(self.config, "positions", None) or 2**30


class _Mix:
    """What a model of the zoo calls once for each layer, in order; see `zoo.attention.Mix`."""

    def __init__(self, cache: Cache, arrays: list[PyTree], rows: Running, prompts: Prompts):
        self.cache, self.arrays, self.rows, self.prompts = cache, arrays, rows, prompts
        self._layer = 0

    def __call__(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        causal: bool,
        kind: str | None = None,
        window: int | None = None,
        scale: float | None = None,
        sinks: Array | None = None,
        cap: float | None = None,
    ) -> Array:
        options = Scoring(kind, window, q.shape[-1] ** -0.5 if scale is None else scale, sinks, cap)
        rows, prompts, layer = self.rows, self.prompts, self.arrays[self._layer]
        count, shape, mixed = len(rows.slots), prompts.tokens.shape, []
        of_rows = [one[0, :count] for one in (q, k, v)]
        of_prompts = [one[0, count:].reshape(*shape, *one.shape[2:]) for one in (q, k, v)]
        if shape[0]:
            layer = self.cache.write_prompts(layer, (of_prompts[1], of_prompts[2]), prompts)
        if count:
            of_last, layer = self.cache.mix_rows(layer, of_rows[0], (of_rows[1], of_rows[2]), rows, options)
            mixed.append(of_last)
        if shape[0]:
            new = of_prompts[1], of_prompts[2]
            part = self.cache.attend_prompts(layer, of_prompts[0], new, prompts, options)
            mixed.append(part.reshape(-1, *part.shape[2:]))
        self.arrays[self._layer] = layer
        self._layer += 1
        return (jnp.concatenate(mixed) if len(mixed) > 1 else mixed[0])[None]
