"""Cross entropy of the next token: of all logits at once, or fused with the head, a chunk of the sequence at a time."""

from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo.layers import Array, capped, project

#: Logits of one sequence that are computed at a time; a longer or wider one is done in chunks. Sixteen chunks
#: instead of one cost Llama-3-8B of 2 layers 31% of its step on one H200, in an earlier form of the loop.
_LOGITS = 2**28


@jax.named_scope("cross_entropy")
def cross_entropy(logits: Array, labels: Array) -> Array:
    """Negative log likelihood of each label, in float32; has the shape of `labels`."""
    logits = logits.astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def mean_token_loss(head: Array, x: Array, labels: Array, chunks: int | None, cap: float | None = None) -> Array:
    """Mean cross entropy of the labels, B S, given the activations after the last norm, B S D.

    Args:
        head: The weight that makes logits, V D: the embedding, or one of its own. It is stored as it is used: with a
            head stored D V, XLA updates it and the embedding in one kernel that transposes, which took 18 of the 104 ms
            of Llama-3-8B's step (2 layers) on one H200.
        x: The activations.
        labels: The token that follows each.
        chunks: In how many pieces of the sequence logits are made; None for as few as keep `_LOGITS` at most for each
            sequence. With more than one, logits are never stored whole, and the mean is the same.
        cap: What logits are bent to stay below; None for no cap.
    """
    chunks = num_chunks(x.shape[1], len(head)) if chunks is None else chunks
    if chunks == 1:
        logits = project("bsd,vd->bsv", x, head)
        return jnp.mean(cross_entropy(logits if cap is None else capped(logits, cap), labels))
    return _fused(chunks, cap, head.astype(x.dtype), x, labels)


def num_chunks(seq: int, vocab: int) -> int:
    """The fewest equal pieces of a sequence that have at most `_LOGITS` logits each."""
    return next(n for n in range(1, seq + 1) if seq % n == 0 and (seq // n * vocab <= _LOGITS or n == seq))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(chunks: int, cap: float | None, head: Array, x: Array, labels: Array) -> Array:
    return _fused_forward(chunks, cap, head, x, labels)[0]


@jax.named_scope("cross_entropy")
def _fused_forward(
    chunks: int, cap: float | None, head: Array, x: Array, labels: Array
) -> tuple[Array, tuple[Array, Array]]:
    """The loss and, while the logits of a chunk are there, its gradients: they are never made a second time.

    The gradient of the logits is the softmax less the one-hot label, times the slope of the cap if there is one. The
    head is a carry of the loop, which a plan may gather once before it; a value that the body merely reads, a plan
    gathers in every trip.
    """
    num_tokens = labels.size

    def pieces(y: Array) -> Array:
        return jnp.moveaxis(y.reshape(y.shape[0], chunks, -1, *y.shape[2:]), 1, 0)

    def piece(
        carry: tuple[Array, Array, Array], inputs: tuple[Array, Array]
    ) -> tuple[tuple[Array, Array, Array], Array]:
        (total, head, gradient), (x, labels) = carry, inputs
        logits = jnp.einsum("bsd,vd->bsv", x, head).astype(jnp.float32)
        if cap is not None:
            logits = capped(logits, cap)
        peak = jnp.max(logits, axis=-1, keepdims=True)
        raised = jnp.exp(logits - peak)
        summed = jnp.sum(raised, axis=-1, keepdims=True)
        label = labels[..., None] == jnp.arange(len(head))
        picked = jnp.sum(jnp.where(label, logits, 0), axis=-1, keepdims=True)
        wrong = (raised / summed - label) / num_tokens
        if cap is not None:
            wrong *= 1 - jnp.square(logits / cap)
        wrong = wrong.astype(x.dtype)
        total += jnp.sum(jnp.log(summed) + peak - picked)
        gradient += jnp.einsum("bsv,bsd->vd", wrong, x, preferred_element_type=jnp.float32)
        passed_on = jax.lax.optimization_barrier(head)  # or JAX would not keep it as a carry
        return (total, passed_on, gradient), jnp.einsum("bsv,vd->bsd", wrong, head)

    start = (jnp.float32(0), head, jnp.zeros(head.shape, jnp.float32))
    (total, _, head_gradient), x_gradient = jax.lax.scan(piece, start, (pieces(x), pieces(labels)))
    return total / num_tokens, (head_gradient, jnp.moveaxis(x_gradient, 0, 1).reshape(x.shape))


def _fused_backward(
    chunks: int, cap: float | None, gradients: tuple[Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    head, x = (gradient * cotangent.astype(gradient.dtype) for gradient in gradients)
    return head.astype(x.dtype), x, None


_fused.defvjp(_fused_forward, _fused_backward)
