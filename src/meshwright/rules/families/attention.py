"""cuDNN's fused attention, as `jax.nn.dot_product_attention(implementation="cudnn")` calls it.

Batch and heads are parallel. Heads of queries are groups that share one head of keys and values. A device may also have
a part of the queries, with all keys and values; or a part of both, the keys and values being passed around in a ring.
The kernel counts positions from the first query that it is given, so where a mask depends on positions devices call it
by blocks (`Mixing`); under a causal mask they first exchange half of their tokens, since late ones see more. Dropout
draws by position, too, and packed sequences have no dims of their own, so calls with either are not split.
"""

from math import prod

from meshwright.rules.base import Dims, LoopNest, Mixing, Rule, Signature
from meshwright.rules.builder import Loops

Dim = tuple[int, ...]

FORWARD = "dot_product_attention_fwd_wrapper"
HEADS_BEFORE_TOKENS = 1  # the value of the "layout" parameter when heads come before tokens
_BIAS, _LENGTHS, _PACKING = 3, slice(4, 6), slice(6, 10)  # where these operands are; those that are not used are empty


class _Attention:
    """The loops of one call.

    In the backward pass gradients of keys and values add up over the queries, and over the heads that share them; the
    gradient of a bias adds up over the batch, or over heads, where they share it.
    """

    def __init__(self, op: Signature, backward: bool) -> None:
        self.op = op
        self.heads_first = op.params["layout"] == HEADS_BEFORE_TOKENS
        query, key, value = (tensor.shape for tensor in op.operands[:3])
        token_at, head_at = (2, 1) if self.heads_first else (1, 2)
        self.sizes = (query[0], query[head_at], query[token_at], key[token_at])
        self.widths = (query[3], value[3])
        summed = "sum" if backward else "parallel"
        self.loops = Loops()
        self.batch = self.loops.add(query[0], self._kind(0, summed))
        self.kv_heads = self.loops.add(key[head_at], self._kind(1, summed))
        self.heads = self.kv_heads
        if query[head_at] != key[head_at]:
            self.heads += self.loops.add(query[head_at] // key[head_at], summed)
        self.tokens, self.width, self.value_width = self.loops.fixed((key[token_at], *self.widths))
        self._split_tokens(query[token_at], key[token_at], summed)
        self.mixing = self._mixing(backward)

    def _split_tokens(self, queries: int, keys: int, summed: str) -> None:
        """Loops over the tokens of queries and over the ring, as far as masks and biases allow."""
        mask, window = str(self.op.params["mask_type"]).rpartition(".")[2], self.window
        is_biased, is_square = len(self.op.operands[_BIAS].shape) == 4, queries == keys
        causal = "CAUSAL" in mask
        if causal or window:  # a window that reaches over half of the tokens would be repeated by every device
            can = (
                is_square
                and not is_biased
                and causal
                and ((2 * window <= keys and "PADDING" not in mask) or not window)
            )
        else:
            can = True
        self.balanced = can and causal and not window
        halves = 2 if self.balanced and queries % 2 == 0 else 1
        can = can and halves == 1 + self.balanced
        tokens = self.loops.add(queries // halves, summed if can else "unsplittable")
        self.by_hand = tokens[0] if can and (mask != "NO_MASK" or window) else -1
        self.query_tokens = tokens + (self.loops.add(2, "unsplittable") if halves == 2 else ())
        self.ring = -1
        if can and is_square and not is_biased and not window:
            (self.ring,) = ring = self.loops.add(queries // halves)
            self.query_tokens, self.tokens = self.query_tokens + ring, self.tokens + ring

    @property
    def window(self) -> int:
        """How many keys each query sees, under a sliding window; else 0."""
        return int(self.op.params.get("sliding_window_length") or 0)

    def _mixing(self, backward: bool) -> Mixing:
        if self.by_hand < 0 and self.ring < 0:
            return Mixing()
        return Mixing(self.by_hand, self.ring, self.balanced, (1, 2), (1, 2) if backward else ())

    def _kind(self, bias_dim: int, summed: str) -> str:
        """The kind of the loop over the batch or over heads: parallel, unless a bias is shared along it."""
        bias = self.op.operands[_BIAS].shape
        return summed if len(bias) == 4 and bias[bias_dim] == 1 else "parallel"

    def array(self, tokens: Dim, heads: Dim, width: Dim) -> Dims:
        return (self.batch, heads, tokens, width) if self.heads_first else (self.batch, tokens, heads, width)

    def bias(self) -> Dims:
        shape = self.op.operands[_BIAS].shape
        if len(shape) != 4:
            return self.loops.fixed(shape)
        whole = (self.batch, self.heads, self.query_tokens, self.tokens)
        return tuple(dim if n > 1 else self.loops.add(n, "unsplittable") for dim, n in zip(whole, shape, strict=True))

    def inputs(self) -> list[Dims]:
        """Dims of query, key, value, bias, the two lengths, and the offsets and page tables, which must be empty."""
        lengths, packing = self.op.operands[_LENGTHS], self.op.operands[_PACKING]
        return [
            self.array(self.query_tokens, self.heads, self.width),
            self.array(self.tokens, self.kv_heads, self.width),
            self.array(self.tokens, self.kv_heads, self.value_width),
            self.bias(),
            *((self.batch,) if prod(length.shape) else self.loops.fixed(length.shape) for length in lengths),
            *(self.loops.fixed(tensor.shape) for tensor in packing),
        ]

    def output(self) -> Dims:
        return self.array(self.query_tokens, self.heads, self.value_width)

    def statistics(self) -> Dims:
        """The softmax's normaliser, kept for the backward pass."""
        return (self.batch, self.heads, self.query_tokens)

    def flops(self, over_width: int, over_value_width: int) -> float:
        """FLOPs of so many products over the heads' width and over the values' width, of unmasked scores alone."""
        batch, heads, query_tokens, tokens = self.sizes
        scores = unmasked_scores(query_tokens, tokens, "CAUSAL" in str(self.op.params["mask_type"]), self.window)
        width, value_width = self.widths
        return 2.0 * batch * heads * scores * (over_width * width + over_value_width * value_width)


def unmasked_scores(query_tokens: int, tokens: int, causal: bool, window: int) -> float:
    """How many scores of one head a fused kernel computes; without a sliding window, `window` is 0."""
    scores = query_tokens * tokens / (2 if causal else 1)
    if 0 < window < query_tokens:  # each query reads so many keys before it; the first queries have fewer
        scores = min(scores, query_tokens * window - window**2 / 2)
    return scores


def most_parts(op: Signature) -> int | None:
    """Over how many devices a call can be split at most, if a mask keeps its queries together; None for other calls."""
    nest = RULES[op.primitive](op) if op.primitive in RULES else None
    tokens = op.operands[0].shape[2 if op.params.get("layout") == HEADS_BEFORE_TOKENS else 1] if nest else 0
    if nest is None or any(loop.kind != "unsplittable" and loop.size in (tokens, tokens // 2) for loop in nest.loops):
        return None
    return prod(loop.size for loop in nest.loops if loop.kind != "unsplittable")


def _is_split(op: Signature) -> bool:
    """Whether loops describe a call: packed sequences and page tables have no dims, dropout differs by shard."""
    return not any(prod(tensor.shape) for tensor in op.operands[_PACKING]) and not op.params["dropout_rate"]


def _whole(op: Signature, flops: float) -> LoopNest:
    """A nest that cannot be split."""
    loops = Loops()
    operands, results = ([loops.fixed(t.shape) for t in side] for side in (op.operands, op.results))
    return loops.nest(operands, results, flops, leads=True)


def forward(op: Signature) -> LoopNest:
    """``softmax(query · keys) · values``, with the normaliser in training."""
    call = _Attention(op, backward=False)
    if not _is_split(op):
        return _whole(op, call.flops(1, 1))
    results = [call.output(), call.statistics()][: len(op.results)]
    return call.loops.nest(call.inputs(), results, call.flops(1, 1), leads=True, mixing=call.mixing)


def backward(op: Signature) -> LoopNest:
    """Gradients of query, key and value, and of the bias if there is one."""
    call = _Attention(op, backward=True)
    if not _is_split(op):
        return _whole(op, call.flops(3, 2))
    inputs = call.inputs()
    operands = [*inputs, call.statistics(), call.output(), call.output()]
    return call.loops.nest(operands, inputs[: len(op.results)], call.flops(3, 2), leads=True, mixing=call.mixing)


RULES: dict[str, Rule] = {
    FORWARD: forward,
    "dot_product_attention_bwd_wrapper": backward,
}
