"""The shape of a transformer: sizes, and the parameters that follow from them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder-only transformer.

    Attributes:
        hidden: Width of the residual stream.
        layers: Number of layers.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Size of a head.
        ffn: Inner width of the feed-forward part.
        vocab: Size of the vocabulary.
        seq: Length of a sequence.
        gated: Whether the feed-forward part has a gate (Llama's SwiGLU), and with it rotary positions.
        tied: Whether the head is the embedding's matrix.
        experts: Number of feed-forward parts; 1 for a dense model.
        active: How many of them each token passes.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    seq: int
    gated: bool = False
    tied: bool = False
    experts: int = 1
    active: int = 1

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def attention_params(self) -> int:
        """Parameters of one layer's attention."""
        return self.hidden * (2 * self.query_width + 2 * self.kv_width)

    @property
    def expert_params(self) -> int:
        """Parameters of one feed-forward part."""
        return self.hidden * self.ffn * (3 if self.gated else 2)

    @property
    def layer_params(self) -> int:
        return self.attention_params + self.experts * self.expert_params + 2 * self.hidden

    @property
    def embedding_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def params(self) -> int:
        return self.layers * self.layer_params + self.embedding_params * (1 if self.tied else 2)

    @property
    def flops_per_token(self) -> float:
        """FLOPs that one token's training asks for: products forward and backward, causal attention, the head."""
        used = self.layers * (self.attention_params + self.active * self.expert_params) + self.embedding_params
        return 6.0 * used + 6.0 * self.layers * self.query_width * self.seq
