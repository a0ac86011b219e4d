"""Pages for TPUs: the kernel is told what it needs, the step is lowered for TPUs with it, and elsewhere it is plain."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from jax.sharding import AbstractDevice, AbstractMesh

import meshwright as mw
from meshwright import zoo
from meshwright.graph.tracing.planned_devices import traced_for
from meshwright.serving.models import Decoder, PagedCache, RaggedCache, StepShape
from meshwright.serving.models.attention import Scoring
from meshwright.serving.models.ragged import attend_ragged, why_not_ragged
from meshwright.serving.models.work import Prompts

pytestmark = [pytest.mark.slow]
HEADS, KV_HEADS, WIDTH = 4, 2, 128


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("window, cap", [(None, None), (3, 5.0)])
def test_the_kernel_gets_queries_in_one_line_and_gives_what_written_out_scores_give(window, cap):
    cache = RaggedCache(blocks=12, block_size=4, dtype="float32")
    pages = drawn(12, 4, 2 * KV_HEADS, WIDTH)
    starts, counts = jnp.array([5, 0, 2, 0]), jnp.array([3, 6, 1, 0])
    tables = jnp.arange(12).reshape(4, 3)
    prompts = Prompts(jnp.zeros((4, 6), jnp.int32), starts, counts, jnp.arange(4), tables, False)
    q, options = drawn(4, 6, HEADS, WIDTH), Scoring(None, window, 0.1, None, cap)
    mixed = attend_ragged(ref_ragged_paged_attention, q, pages, tables, starts, counts, options)
    expected = cache.attend_prompts((pages,), q, (q, q), prompts, options)
    inside = np.asarray(prompts.active)
    np.testing.assert_allclose(mixed[inside], expected[inside], rtol=1e-5, atol=1e-5)
    assert not np.asarray(mixed)[~inside].any()


def test_what_is_written_is_read_as_from_pages_of_keys_and_of_values():
    shape = StepShape(2, 1, 6, False, 3)
    config = zoo.build("llama-tiny", seq=12, layers=2, dtype="float32").config
    scores = []
    for kind in (PagedCache, RaggedCache):
        decoder = Decoder.of(config, kind(9, 4, "float32"))
        arrays = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), decoder.arrays())
        params = zoo.build("llama-tiny", seq=12, layers=2, dtype="float32").init(0)["params"]
        packed = shape.packed(0)
        rows, prompts = shape.unpack(packed)
        rows.given[:], rows.at[:], rows.tables[:] = [3, 4], [0, -1], [[0, 1, 2], [3, 4, 5]]
        prompts.tokens[:], prompts.counts[:], prompts.tables[:] = range(6), 6, [[6, 7, 8]]
        step = jax.jit(lambda *given, decoder=decoder: decoder.step(shape, *given))
        arrays, _, first = step(params, arrays, jnp.zeros(4, jnp.int32), packed.copy())  # the next step changes it
        prompts.starts[:] = 6
        arrays, of_rows, second = step(params, arrays, jnp.zeros(4, jnp.int32), packed)
        taken = decoder.take(5, arrays, jnp.array([5, 0, 6, 7]))
        back = decoder.take(5, decoder.put(arrays, taken, jnp.array([5, 0, 0, 1])), jnp.array([5, 0, 0, 1]))
        jax.tree.map(np.testing.assert_array_equal, taken, back)
        scores.append([first, second, of_rows[:1], taken])
    # The operands of products lie otherwise in the other cache, and CPUs differ in the order in which they then add.
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), *scores)


def test_a_step_for_tpus_has_the_kernel_for_rows_and_prompts_of_each_layer():
    options = {"layers": 2, "hidden": 512, "heads": 4, "kv_heads": 2, "ffn": 512, "vocab": 64}
    decoder = Decoder.of(zoo.build("llama-tiny", seq=64, **options).config, RaggedCache(8, 16, "bfloat16"))
    shape = StepShape(4, 1, 16, False, 4)
    given = decoder.params(), decoder.arrays(), *(jax.ShapeDtypeStruct((n,), jnp.int32) for n in (4, shape.size))
    chip = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("TPU v5e", 1, "tpu"))
    with traced_for(mw.cluster("1x1 tpu-v5e")), jax.sharding.use_abstract_mesh(chip):
        lowered = jax.export.export(jax.jit(lambda *args: decoder.step(shape, *args)), platforms=["tpu"])(*given)
    module = lowered.mlir_module()
    assert (module.count("@tpu_custom_call"), module.count("call @ragged_paged_attention")) == (2, 4)


def test_what_the_kernel_does_not_take_is_written_out():
    def why(heads=4, width=128, dtype=jnp.bfloat16, sinks=None, cluster="1x1 tpu-v5e"):
        answers = []

        def asked(q, pages):
            answers.append(why_not_ragged(q, pages, Scoring(None, None, 1.0, sinks, None)))

        with traced_for(mw.cluster(cluster)):
            jax.eval_shape(asked, *(jnp.zeros((1, n, heads, width), dtype) for n in (1, 4)))
        return answers[0]

    assert why() == ""
    assert "TPUs" in why(cluster="1x1 h100")
    assert "sinks" in why(sinks=jnp.zeros(4))
    assert "multiples of 128" in why(width=64)
    assert "3 heads of keys" in why(heads=6)
