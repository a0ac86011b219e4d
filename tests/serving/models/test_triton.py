"""The kernel of decoding on GPUs, run as ordinary operations: what it mixes, and what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.serving.engine.buckets import Buckets
from meshwright.serving.models import SlotCache, TritonCache
from meshwright.serving.models.attention import Scoring
from meshwright.serving.models.eight_bits import EIGHT_BITS, kept, kept_types, recovered
from meshwright.serving.models.triton import Tiling, attend_and_keep, has_kernel
from meshwright.serving.scheduling import Limits
from meshwright.zoo.attention import attend_cached
from tests.draws import normal

#: Heads, heads of keys, width, window, cap, and whether there are sinks; a few have widths and groups that are padded.
LAYERS = [
    (8, 2, 64, None, None, False),
    (8, 2, 128, 40, None, True),
    (4, 4, 80, None, 20.0, False),
    (6, 2, 64, 7, 5.0, True),
]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("layer", LAYERS)
def test_rows_are_mixed_and_kept_as_by_scores_written_out(layer, parts):
    heads, kv_heads, width, window, cap, sinks = layer
    rows, slots, length = 5, 7, 200
    q, k, v = (normal(rows, h, width, seed=n) for n, h in enumerate((heads, kv_heads, kv_heads)))
    cache = tuple(normal(slots, length, kv_heads, width, seed=n) for n in (3, 4))
    at = np.array([length - 1, -1, 0, 63, 64], np.int32)
    options = Scoring(None, window, width**-0.5, normal(heads, seed=5) if sinks else None, cap)
    tiling = Tiling(programs=parts * rows * kv_heads, numbers=32 * 128)
    mixed, kept = jax.jit(lambda *given: attend_and_keep(*given, options, tiling, interpret=True))(q, (k, v), cache, at)
    alive = at >= 0
    expected = [np.array(one) for one in cache]
    for one, new in zip(expected, (k, v), strict=True):
        one[np.arange(rows)[alive], at[alive]] = np.asarray(new)[alive]
    for one, other in zip(kept, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    written_out = attend_cached(
        q[:, None],
        *(one[:rows] for one in expected),
        np.maximum(at, 0)[:, None],
        **{name: value for name, value in vars(options).items() if name != "kind"},
    )[:, 0]
    assert jnp.isfinite(mixed).all()
    np.testing.assert_allclose(mixed[alive], written_out[alive], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_cache_of_eight_bits_is_read_and_kept_as_it_is(dtype, parts):
    rows, slots, length, heads, kv_heads, width = 4, 5, 100, 4, 2, 64
    q, k, v = (normal(rows, h, width, seed=n) for n, h in enumerate((heads, kv_heads, kv_heads)))
    new, cache = kept(dtype, (k, v)), kept(dtype, [normal(slots, length, kv_heads, width, seed=n) for n in (3, 4)])
    at, options = np.array([length - 1, -1, 0, 40], np.int32), Scoring(None, 30, width**-0.5, normal(heads), None)
    tiling = Tiling(programs=parts * rows * kv_heads, numbers=16 * 128)
    mixed, after = jax.jit(lambda *given: attend_and_keep(*given, options, tiling, interpret=True))(q, new, cache, at)
    alive = at >= 0
    for one, before, own in zip(after, cache, new, strict=True):
        expected = np.array(before)
        expected[np.arange(rows)[alive], at[alive]] = np.asarray(own)[alive]
        np.testing.assert_array_equal(one, expected)
    k, v = (one[:rows] for one in recovered(after, "float32"))
    asked = {name: value for name, value in vars(options).items() if name != "kind"}
    written_out = attend_cached(q[:, None], k, v, np.maximum(at, 0)[:, None], **asked)[:, 0]
    np.testing.assert_allclose(mixed[alive], written_out[alive], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", *EIGHT_BITS])
def test_the_kernel_is_lowered_for_gpus(dtype):
    types = jax.ShapeDtypeStruct((4, 8, 128), "bfloat16"), jax.ShapeDtypeStruct((4,), "int32")
    new, cache = kept_types(dtype, (4, 2, 128)), kept_types(dtype, (4, 256, 2, 128))
    function = jax.jit(lambda *given: attend_and_keep(*given, Scoring(None, None, 0.1, None, None)))
    lowered = function.trace(types[0], new, cache, types[1]).lower(lowering_platforms=("cuda",))
    assert "attend_and_keep" in lowered.as_text()


@pytest.mark.parametrize(("slots", "rows"), [(256, (8, 64, 128, 256)), (4, (4,))])
def test_steps_of_the_kernel_have_eight_rows_at_least(slots, rows):
    limits = Limits(slots, 64, slots, 32, 32 + slots, 8, 64)
    assert Buckets(limits, True, 0, (32,), TritonCache.least_rows).rows == rows
    assert Buckets(limits, True, 0, (32,), SlotCache.least_rows).rows == limits.rungs


def test_a_machine_without_a_gpu_has_no_kernel():
    assert not has_kernel("bfloat16", "bfloat16", 128)
