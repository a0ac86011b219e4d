"""The kernels of one layer and of the head on one device, by phase, with their time; and the tensors they keep.

Letters: T tokens of a microbatch on the device, Tn the same outside of products (fewer with sequence parallelism),
h hidden, q and kv widths of queries and keys, f inner width, t tensor-parallel degree. Elementwise kernels are
described by the bytes that they move per element of 16-bit tensors, fused and as separate kernels.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.cost.attention import MATERIALISED, backward_flops
from meshwright.cost.rates import Rates
from meshwright.simulator.transformer.recipe import Recipe

#: Bytes per element: forward fused, forward in separate kernels, backward fused, backward in separate kernels.
_NORM = (4, 4, 8, 10)
_RMS_NORM = (4, 20, 8, 32)  # separate kernels widen to single precision
_ROTARY = (4, 16, 4, 16)
_RESIDUAL = (6, 6, 4, 6)
_DROPOUT = (1, 6, 5, 6)  # the mask, and the tensor that a separate kernel reads and writes again
_GELU = (4, 4, 6, 6)
_GATE = (6, 10, 10, 16)
_SOFTMAX = (4, 12, 6, 16)
_LAYOUT = (4, 4, 4, 4)  # heads before tokens
_MERGE = (30, 30, 10, 10)  # results of one more block of keys, in single precision and never fused
_LOSS = (8, 14, 6, 18)  # per logit
_METRIC = 14  # per logit: loss and perplexity, computed once more for the log
_CAST = 2  # the rest is fused with the kernel that computed the value
_CAST_BY_ROW = 5  # read once for the largest value, and once more to be written

_NARROW = ("float8_e4m3fn", "int8")


class Kernel(NamedTuple):
    """One kernel (or a few that belong together) of a layer.

    Attributes:
        name: What it does; recomputation names it so.
        forward_s: Its time forward.
        backward_s: Its time backward.
        weights_s: The part of ``backward_s`` that computes gradients of weights.
    """

    name: str
    forward_s: float
    backward_s: float
    weights_s: float = 0.0


@dataclass(frozen=True)
class Layer:
    """Prices one layer of a recipe on its chip."""

    recipe: Recipe
    kernels: Rates

    def attention_block(self) -> Iterator[Kernel]:
        """The kernels from the residual stream through attention back to it."""
        r, s = self.recipe, self.recipe.shape
        t, tokens = r.tensor, r.tokens
        yield self._stream("norm", _RMS_NORM if s.gated else _NORM, r.spread_tokens * s.hidden)
        for name, width in (("query", s.query_width), ("key", s.kv_width), ("value", s.kv_width)):
            yield self.product(name, tokens, s.hidden, width / t)
        if s.gated:
            yield self._stream("rotary", _ROTARY, tokens * (s.query_width + s.kv_width) / t)
        yield from self._attention()
        yield self.product("out", tokens, s.query_width / t, s.hidden)
        yield self._residual()

    def feed_forward_block(self) -> Iterator[Kernel]:
        """The feed-forward part; each token passes `active` of the experts."""
        r, s = self.recipe, self.recipe.shape
        tokens, inner = r.tokens * s.active, s.ffn / r.tensor
        yield self._stream("norm", _RMS_NORM if s.gated else _NORM, r.spread_tokens * s.hidden)
        if s.gated:
            yield self.product("gate", tokens, s.hidden, inner)
        yield self.product("up", tokens, s.hidden, inner)
        yield self._stream("activation", _GATE if s.gated else _GELU, tokens * inner)
        yield self.product("down", tokens, inner, s.hidden)
        yield self._residual()

    def head(self) -> Iterator[Kernel]:
        """Last norm, logits and loss."""
        r, s = self.recipe, self.recipe.shape
        yield self._stream("norm", _RMS_NORM if s.gated else _NORM, r.spread_tokens * s.hidden)
        yield self.product("logits", r.tokens, s.hidden, s.vocab / r.tensor, dtype="bfloat16")
        logits = r.tokens * s.vocab / r.tensor
        yield self._stream("loss", _LOSS, logits, fused=r.stack.loss == "fused")
        if r.stack.metrics:
            yield Kernel("metrics", self.kernels.stream_s(_METRIC * r.stack.metrics * logits), 0.0)

    def embedding(self) -> Kernel:
        """Looking tokens up; backward adds to the rows."""
        return self._stream("embedding", (4, 4, 8, 8), self.recipe.spread_tokens * self.recipe.shape.hidden)

    def product(self, name: str, tokens: float, wide: float, narrow: float, dtype: str = "") -> Kernel:
        """A product of activations with a weight; backward it is two of them."""
        dtype = dtype or self.recipe.dtype
        flops = 2.0 * tokens * wide * narrow
        num_bytes = 2.0 * (tokens * (wide + narrow) + wide * narrow)
        by_row = self.recipe.by_row and dtype in _NARROW
        half = by_row or dtype == "bfloat16"  # whichever half precision the chip has
        one = self.kernels.product_s(flops, num_bytes, "" if half else dtype)
        if dtype not in _NARROW:
            return Kernel(name, one, 2 * one, one)
        # Operands are scaled and written in 8 bits before: activations forward, their gradients backward.
        cast = _CAST_BY_ROW if by_row else _CAST
        before, after = (self.kernels.stream_s(cast * tokens * width) for width in (wide, narrow))
        return Kernel(name, one + before, 2 * one + after, one)

    def _attention(self) -> Iterator[Kernel]:
        r, s = self.recipe, self.recipe.shape
        scores = r.microbatch * s.heads / r.tensor * float(s.seq) ** 2 / r.context
        flops = 4.0 * scores * s.head_dim
        if r.stack.attention != MATERIALISED:
            flops /= 2  # masked scores are left out
            forward = self.kernels.attention_s(r.stack.attention, flops, s.seq, s.head_dim, backward=False)
            backward = self.kernels.attention_s(
                r.stack.attention, backward_flops(r.stack.attention) * flops, s.seq, s.head_dim, backward=True
            )
            merged = self._stream("attention", _MERGE, (r.context - 1) * r.tokens * s.query_width / r.tensor)
            yield Kernel("attention", forward + merged.forward_s, backward + merged.backward_s)
            return
        width = (s.query_width + 2 * s.kv_width) / r.tensor
        layout = self._stream("attention", _LAYOUT, r.tokens * width)
        one = self.kernels.product_s(flops / 2, 2.0 * scores)
        softmax = self._stream("attention", _SOFTMAX, scores, fused=r.stack.fused_softmax)
        dropout = self._stream("attention", _DROPOUT, scores if r.stack.dropout else 0.0, fused=False)
        parts = (layout, softmax, dropout)
        yield Kernel("attention", sum(p.forward_s for p in parts) + 2 * one, sum(p.backward_s for p in parts) + 4 * one)

    def _residual(self) -> Kernel:
        elements = self.recipe.spread_tokens * self.recipe.shape.hidden
        added = self._stream("residual", _RESIDUAL, elements)
        dropped = self._stream("residual", _DROPOUT, elements if self.recipe.stack.dropout else 0.0)
        return Kernel("residual", added.forward_s + dropped.forward_s, added.backward_s + dropped.backward_s)

    def _stream(
        self, name: str, moved: tuple[int, int, int, int], elements: float, fused: bool | None = None
    ) -> Kernel:
        separate = not (self.recipe.stack.fused if fused is None else fused)
        forward, backward = moved[separate], moved[2 + separate]
        return Kernel(name, self.kernels.stream_s(forward * elements), self.kernels.stream_s(backward * elements))
