"""The kernel of decoding on GPUs, run as ordinary operations: what it mixes, and what it keeps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.serving.engine.buckets import Buckets
from meshwright.serving.models import SlotCache, TritonCache
from meshwright.serving.models.attention import Scoring
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


@pytest.mark.parametrize(("slots", "rows"), [(256, (8, 64, 256)), (4, (4,))])
def test_steps_of_the_kernel_have_eight_rows_at_least(slots, rows):
    limits = Limits(slots, 64, slots, 32, 32 + slots, 8, 64)
    assert Buckets(limits, True, 0, (32,), TritonCache.least_rows).rows == rows
    assert Buckets(limits, True, 0, (32,), SlotCache.least_rows).rows == limits.rungs


def test_a_machine_without_a_gpu_has_no_kernel():
    assert not has_kernel("bfloat16", 128)
