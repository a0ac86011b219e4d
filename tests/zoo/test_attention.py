"""Attention of every kind computes softmax attention, and the fused kernel is what plans for GPUs see."""

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.graph.tracing.planned_devices import traced_for
from meshwright.zoo.attention import attend

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 3)])
def test_attend_equals_jax_nn(causal, window):
    q, k, v = draw(2, 8, 6, 4), draw(2, 8, 2, 4), draw(2, 8, 2, 4)
    looks_at = None if window is None else (window - 1, 0)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=causal, local_window_size=looks_at)
    mixed = attend(q, k, v, causal=causal, window=window)
    np.testing.assert_allclose(mixed, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("cluster", "width", "fused"),
    [
        ("1x8 h100", 256, True),
        ("1x8 a100", 128, True),
        ("1x8 a100", 256, False),
        ("1x8 v100", 128, False),
        ("1x8 mi300x", 128, False),
        ("1x4 tpu-v5p", 128, False),
    ],
)
def test_the_fused_kernel_is_taken_where_the_chip_has_it(cluster, width, fused):
    q = jax.ShapeDtypeStruct((2, 16, 4, width), "bfloat16")
    with traced_for(mw.cluster(cluster)):
        program = str(jax.make_jaxpr(lambda q: attend(q, q, q, causal=True))(q))
    assert ("dot_product_attention_fwd" in program) == fused


def test_values_may_be_narrower_and_scores_scaled():
    q, k, v = draw(1, 5, 2, 4), draw(1, 5, 2, 4), draw(1, 5, 2, 3)
    wide = np.concatenate([v, np.zeros((1, 5, 2, 1), np.float32)], axis=-1)
    expected = jax.nn.dot_product_attention(q, k, wide, is_causal=True, scale=0.7)[..., :3]
    np.testing.assert_allclose(attend(q, k, v, causal=True, scale=0.7), expected, rtol=1e-5, atol=1e-6)


def test_a_sink_is_one_more_score_without_a_value():
    q, k, v, sinks = draw(1, 5, 4, 8), draw(1, 5, 2, 8), draw(1, 5, 2, 8), draw(4)
    mixed = attend(q, k, v, causal=True, sinks=sinks)
    for head in range(4):
        scores = q[0, :, head] @ k[0, :, head // 2].T / np.sqrt(8)
        scores = np.where(np.tri(5, dtype=bool), scores, -np.inf)
        scores = np.concatenate([scores, np.full((5, 1), sinks[head])], axis=1)
        weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        np.testing.assert_allclose(mixed[0, :, head], weights[:, :5] @ v[0, :, head // 2], rtol=1e-4, atol=1e-5)
