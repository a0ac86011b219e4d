"""Fused attention kernels of `jax.nn.dot_product_attention`: batch and heads are parallel, a sequence stays whole."""

from math import prod

from meshwright.rules.base import LoopNest, Rule, Signature
from meshwright.rules.builder import Loops

Dim = tuple[int, ...]

HEADS_BEFORE_TOKENS = 1  # the value of the "layout" parameter when heads come before tokens


class _Attention:
    """The loops of one call; query heads are groups of ``shared`` heads that use one head of keys and values."""

    def __init__(self, op: Signature, shared_kind: str) -> None:
        self.op = op
        self.heads_first = op.params["layout"] == HEADS_BEFORE_TOKENS
        query, key, value = (tensor.shape for tensor in op.operands[:3])
        token_at, head_at = (2, 1) if self.heads_first else (1, 2)
        self.num_heads = query[head_at]
        self.loops = Loops()
        self.batch = self.loops.add(query[0])
        self.kv_heads = self.loops.add(key[head_at])
        self.heads = self.kv_heads
        if query[head_at] != key[head_at]:
            self.heads += self.loops.add(query[head_at] // key[head_at], shared_kind)
        self.query_tokens, self.tokens = self.loops.fixed((query[token_at], key[token_at]))
        self.width, self.value_width = self.loops.fixed((query[3], value[3]))

    def array(self, tokens: Dim, heads: Dim, width: Dim) -> tuple[Dim, ...]:
        return (self.batch, heads, tokens, width) if self.heads_first else (self.batch, tokens, heads, width)

    def inputs(self) -> list[tuple[Dim, ...]]:
        """Dims of query, key, value, bias, the two lengths, and the offsets and page tables, which must be empty."""
        bias, lengths = self.op.operands[3].shape, self.op.operands[4:6]
        whole = (self.batch, self.heads, self.query_tokens, self.tokens)
        return [
            self.array(self.query_tokens, self.heads, self.width),
            self.array(self.tokens, self.kv_heads, self.width),
            self.array(self.tokens, self.kv_heads, self.value_width),
            tuple(
                dim if size > 1 else self.loops.add(size, "unsplittable") for dim, size in zip(whole, bias, strict=True)
            )
            if len(bias) == 4
            else self.loops.fixed(bias),
            *((self.batch,) if prod(length.shape) else self.loops.fixed(length.shape) for length in lengths),
            *(self.loops.fixed(tensor.shape) for tensor in self.op.operands[6:10]),
        ]

    def output(self) -> tuple[Dim, ...]:
        return self.array(self.query_tokens, self.heads, self.value_width)

    def statistics(self) -> tuple[Dim, ...]:
        """The softmax's normaliser, kept for the backward pass."""
        return (self.batch, self.heads, self.query_tokens)

    def flops(self, over_width: int, over_value_width: int) -> float:
        """Flops of so many products over the heads' width and over the values' width; half if the mask is causal."""
        sizes = [self.loops.loops[dim[0]].size for dim in (self.batch, self.query_tokens, self.tokens)]
        width, value_width = (self.loops.loops[dim[0]].size for dim in (self.width, self.value_width))
        full = 2.0 * prod(sizes) * self.num_heads * (over_width * width + over_value_width * value_width)
        return full / 2 if "CAUSAL" in str(self.op.params["mask_type"]) else full


def _describable(op: Signature) -> bool:
    """Whether loops can describe a call: packed sequences and page tables have no dims, dropout differs by shard."""
    return not any(prod(tensor.shape) for tensor in op.operands[6:10]) and not op.params["dropout_rate"]


def forward(op: Signature) -> LoopNest | None:
    """``softmax(query · keys) · values``, with the normaliser in training."""
    if not _describable(op):
        return None
    call = _Attention(op, "parallel")
    results = [call.output(), call.statistics()][: len(op.results)]
    return call.loops.nest(call.inputs(), results, call.flops(1, 1), leads=True)


def backward(op: Signature) -> LoopNest | None:
    """Gradients of query, key and value; gradients of keys and values add up over the heads that share them."""
    if not _describable(op) or len(op.results) != 3:
        return None
    call = _Attention(op, "sum")
    inputs = call.inputs()
    operands = [*inputs, call.statistics(), call.output(), call.output()]
    return call.loops.nest(operands, inputs[:3], call.flops(3, 2), leads=True)


RULES: dict[str, Rule] = {
    "dot_product_attention_fwd_wrapper": forward,
    "dot_product_attention_bwd_wrapper": backward,
}
