"""Attention of every kind computes softmax attention, and the fused kernel is what plans for GPUs see."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.graph.tracing.planned_devices import traced_for
from meshwright.graph.tracing.trace import trace
from meshwright.zoo.attention import _plain, _splash, attend

pytestmark = pytest.mark.slow

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
    ],
)
def test_the_fused_kernel_is_taken_where_the_chip_has_it(cluster, width, fused):
    program = traced(cluster, 16, width)
    assert ("dot_product_attention_fwd" in program) == fused
    assert ("written out: cuDNN" in program) != fused


@pytest.mark.parametrize(("seq", "fused"), [(128, True), (96, False)])
def test_tpus_have_splash_attention_for_whole_lanes_of_tokens(seq, fused):
    program = traced("1x4 tpu-v5p", seq, 64)
    assert ("splash_mqa_fwd" in program) == fused
    assert ("takes lengths that are multiples of 128, not 96" in program) != fused


def traced(cluster, seq, width):
    q = jax.ShapeDtypeStruct((2, seq, 4, width), "bfloat16")
    with traced_for(mw.cluster(cluster)):
        return str(jax.make_jaxpr(lambda q: attend(q, q, q, causal=True))(q))


def test_the_plan_remarks_that_scores_are_written_out():
    q = jax.ShapeDtypeStruct((4, 96, 4, 64), "bfloat16")
    plan = mw.plan(lambda q: attend(q, q, q, causal=True), q, cluster="1x4 tpu-v5p")
    (remark,) = plan.remarks
    assert remark.startswith("Attention's scores are written out: splash attention takes lengths that")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("causal", "window", "sinks"), [(False, None, False), (True, None, False), (True, 100, False), (True, None, True)]
)
def test_splash_attention_computes_attention_and_its_gradients(causal, window, sinks):
    q, k, v = draw(2, 256, 4, 64), draw(2, 256, 2, 64), draw(2, 256, 2, 64)
    options = (causal, window, 0.2, draw(4) if sinks else None)

    def gradients(kind, **how):
        def loss(q, k, v):
            return (kind(q, k, v, *options, **how) * jnp.arange(64.0)).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    for found, expected in zip(gradients(_splash, interpret=True), gradients(_plain), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.devices
@pytest.mark.parametrize("where", [(("x",),), ((), (), ("x",))], ids=["batch", "heads"])
def test_splash_attention_runs_split_over_batch_and_heads(where):
    q, k, v = draw(8, 128, 16, 32), draw(8, 128, 8, 32), draw(8, 128, 8, 32)

    def mixed(q, k, v):
        return _splash(q, k, v, True, None, 0.2, None, interpret=True)

    spec = jax.P(*(axes or None for axes in where))
    split = mw.parallelize(mixed, cluster="local", mesh=(8,), method=mw.Auto(fix=dict.fromkeys("qkv", spec)))
    np.testing.assert_allclose(split(q, k, v), jax.jit(mixed)(q, k, v), rtol=1e-6, atol=1e-6)
    (plan,) = split.plans
    assert not plan.unsplittable and not plan.collectives
    assert {op.load.num_parts for op in plan.ops if op.label.endswith("pallas_call")} == {8}


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
def test_selective_checkpoints_keep_splash_attention(checkpoint):
    example = zoo.build("llama-tiny", seq=128, layers=1, checkpoint=checkpoint)
    graph = trace(example.train_step, example.state, example.batch, cluster=mw.cluster("1x4 tpu-v5p")).graph
    kernels = [mw.rules.kernel_name(op.signature) for op in graph.ops if op.primitive == "pallas_call"]
    assert kernels.count("splash_mqa_fwd_residuals") == (1 if checkpoint == "selective" else 2)
    assert kernels[-2:] == ["splash_mqa_dkv_no_residuals", "splash_mqa_dq_no_residuals"]


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


@pytest.mark.parametrize(
    ("cluster", "seq", "sinks", "why"),
    [
        ("1x4 tpu-v5p", 96, None, "splash attention takes lengths that are multiples of 128, not 96"),
        ("1x8 h100", 128, np.zeros(4, np.float32), "cuDNN's fused attention knows no sinks"),
    ],
)
def test_a_kernel_that_is_asked_for_and_refuses_is_an_error_with_the_remedy(cluster, seq, sinks, why):
    q = jax.ShapeDtypeStruct((2, seq, 4, 64), "bfloat16")
    with pytest.raises(mw.TraceError, match=why) as caught:
        mw.plan(lambda q: attend(q, q, q, causal=True, kind="fused", sinks=sinks), q, cluster=cluster)
    assert "or attention='plain'" in str(caught.value)


def test_sinks_are_fused_on_tpus():
    example = zoo.build("gpt-oss-20b", layers=2, batch=4, seq=128)
    graph = trace(example.loss, example.state["params"], example.batch, cluster=mw.cluster("1x4 tpu-v5p")).graph
    assert [op.primitive for op in graph.ops].count("pallas_call") == 2
