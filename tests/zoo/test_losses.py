"""The loss in chunks, fused with the head, is the loss of all logits: value and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.zoo import losses

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_cross_entropy_is_the_negative_log_likelihood():
    logits, labels = 5 * draw(3, 7, 11), RNG.integers(0, 11, (3, 7))
    likelihood = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(np.take_along_axis(likelihood, labels[..., None], axis=-1)[..., 0])
    np.testing.assert_allclose(jax.jit(losses.cross_entropy)(logits, labels), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunks", [2, 8])
def test_chunks_change_neither_loss_nor_gradients(chunks):
    head, x, labels = draw(11, 6), 3 * draw(2, 8, 6), RNG.integers(0, 11, (2, 8))

    def loss(head, x, chunks):
        return 3 * losses.mean_token_loss(head, x, labels, chunks)

    whole, fused = (jax.value_and_grad(loss, argnums=(0, 1))(head, x, n) for n in (1, chunks))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, fused)


def test_half_precision_adds_up_the_heads_gradient_in_single_precision():
    program = str(
        jax.make_jaxpr(jax.grad(losses.mean_token_loss, argnums=0), static_argnums=3)(
            jnp.zeros((16, 4), jnp.bfloat16), jnp.zeros((1, 8, 4), jnp.bfloat16), jnp.zeros((1, 8), jnp.int32), 4
        )
    )
    assert "f32[16,4]" in program
    assert "f32[1,8,16]" not in program  # the logits of the whole sequence


@pytest.mark.parametrize(
    ("seq", "vocab", "expected"), [(2048, 32000, 1), (4096, 128256, 2), (8192, 128256, 4), (7, 2**28, 7)]
)
def test_chunks_are_the_fewest_that_bound_the_logits(seq, vocab, expected):
    assert losses.num_chunks(seq, vocab) == expected
