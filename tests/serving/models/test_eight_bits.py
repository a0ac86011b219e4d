"""A cache of 8 bits: how near its numbers are, what it takes, and that both kinds of cache keep the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.serving.models import PagedCache, SlotCache
from meshwright.serving.models.attention import Scoring
from meshwright.serving.models.eight_bits import EIGHT_BITS, kept, kept_types, recovered
from meshwright.serving.models.work import Prompts
from meshwright.serving.planning.decoder_work import decoder_work
from meshwright.serving.planning.split import Degrees, Storage, cache_bytes_per_token


def drawn(*shape, seed=0):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values * 10.0 ** np.arange(-3, shape[0] - 3).reshape(-1, *[1] * (len(shape) - 1)))


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_numbers_are_as_near_as_eight_bits_allow_in_vectors_of_any_size(dtype):
    pair = drawn(6, 4, 2, 64), drawn(6, 4, 2, 64, seed=1).at[0, 0, 0].set(0)
    stored = kept(dtype, pair)
    assert [(one.shape, one.dtype) for one in stored] == [
        (one.shape, one.dtype) for one in kept_types(dtype, (6, 4, 2, 64))
    ]
    for before, after in zip(pair, recovered(stored, "float32"), strict=True):
        largest = jnp.max(jnp.abs(before), axis=-1, keepdims=True)
        step = largest / 127 if dtype == "int8" else jnp.maximum(jnp.abs(before) / 8, largest / 448 / 512)
        assert bool(jnp.all(jnp.abs(after - before) <= step * 0.501))
        assert bool(jnp.all(jnp.isfinite(after)))


@pytest.mark.parametrize("cache", [PagedCache(12, 4, "int8"), SlotCache((1, 2), 12, "int8")])
def test_what_is_written_by_chunks_is_taken_out_and_put_in_elsewhere(cache):
    kinds = cache.arrays(1, 2, 16)[0]
    empty = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), kinds)
    new, tables = (drawn(1, 8, 2, 16), drawn(1, 8, 2, 16, seed=1)), jnp.array([[7, 2, 5]])
    layer = empty
    for start in (0, 4):
        ones = jnp.array([start]), jnp.array([4]), jnp.array([2]), tables
        prompts = Prompts(jnp.zeros((1, 4), jnp.int32), *ones, False)
        layer = cache.write_prompts(layer, tuple(one[:, start : start + 4] for one in new), prompts)
    place = jnp.array([8, 2, 7, 2, 5])
    pair = cache.take(layer, place, 8, "float32")
    for one, before in zip(pair, new, strict=True):
        np.testing.assert_allclose(one, before[0], atol=float(jnp.max(jnp.abs(before))) / 250)
    again = cache.take(cache.put(empty, pair, place), place, 8, "float32")
    for one, other in zip(pair, again, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_a_chunk_that_begins_a_prompt_looks_at_what_is_kept_as_one_in_the_middle_does(dtype):
    cache, options = SlotCache((1, 2), 12, dtype), Scoring("plain", None, 0.25, None, None)
    layer = jax.tree.map(lambda kind: jnp.zeros(kind.shape, kind.dtype), cache.arrays(1, 2, 16)[0])
    new, q = tuple(jax.random.normal(jax.random.key(n), (1, 8, 2, 16)) for n in (0, 1)), jnp.ones((1, 8, 2, 16))
    mixed = []
    for fresh in (False, True):
        prompts = Prompts(jnp.zeros((1, 8), jnp.int32), *(jnp.array([n]) for n in (0, 8, 2)), jnp.zeros((1, 0)), fresh)
        mixed.append(cache.attend_prompts(cache.write_prompts(layer, new, prompts), q, new, prompts, options))
    np.testing.assert_allclose(*mixed, rtol=1e-5)


def test_the_cost_model_counts_the_scales_that_are_kept():
    work = decoder_work("llama3-8b")
    bytes_of = {
        name: sum(
            kind.size * kind.dtype.itemsize for kind in jax.tree.leaves(PagedCache(1, 1, name).arrays(32, 8, 128))
        )
        for name in ("bfloat16", "int8")
    }
    for name, size in bytes_of.items():
        assert cache_bytes_per_token(work, Degrees(), Storage(cache=name, scaled=True)) == size
    assert bytes_of["int8"] == bytes_of["bfloat16"] * (0.5 + 2 / 128)
