"""Cases of random bits and keys."""

from functools import partial

import jax
import jax.extend
import numpy as np
from jax import lax

from ..contract import Case, Shard, bound
from . import Builder, Sizes


def _keys(*shape: int) -> jax.Array:
    return jax.random.split(jax.random.key(7), shape)


def _positions(shard: Shard, shape: tuple[int, ...], keys: int = 0) -> np.ndarray:
    """Each of the shard's elements as counted in the whole array asked of one key."""
    rows = [shard.result_rows(keys + d) for d in range(len(shape))]
    return np.ravel_multi_index(np.meshgrid(*rows, indexing="ij"), shape).astype(np.uint32)


def _threefry(words: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words that a key gives at the positions ``low``."""
    counts = np.stack([np.zeros_like(low), low])
    return tuple(np.asarray(jax.extend.random.threefry_2x32(words, counts.ravel())).reshape(counts.shape))


def bits(size: Sizes) -> Case:
    """A shard makes only its own bits, from the positions of its elements."""
    shape = (2, 4)
    key = jax.random.key(3)

    def local(shard: Shard, key: jax.Array) -> np.ndarray:
        high, low = _threefry(jax.random.key_data(key), _positions(shard, shape))
        return high ^ low

    return Case(partial(jax.random.bits, shape=shape), [key], local)


def bits_of_many_keys(size: Sizes) -> Case:
    keys = _keys(2)
    run = jax.vmap(partial(jax.random.bits, shape=(2,)))

    def local(shard: Shard, keys: jax.Array) -> np.ndarray:
        words = np.asarray(jax.random.key_data(keys))
        made = [np.bitwise_xor(*_threefry(word, _positions(shard, (2,), keys=1))) for word in words]
        return np.stack(made)

    return Case(run, [keys], local)


def bits_of_stateful_key(size: Sizes) -> Case:
    """Every device makes all bits, so there is nothing to split."""
    return Case(partial(jax.random.bits, shape=size.shape(2)), [jax.random.key(3, impl="rbg")])


def split_key(size: Sizes) -> Case:
    def local(shard: Shard, key: jax.Array) -> jax.Array:
        words = _threefry(jax.random.key_data(key), _positions(shard, (4,)))
        return jax.random.wrap_key_data(np.stack(words, -1))

    return Case(partial(jax.random.split, num=4), [jax.random.key(1)], local)


def seed(size: Sizes) -> Case:
    seeds = size.ints(4)
    return Case(bound(jax.vmap(jax.random.key), "random_seed", seeds), [seeds])


def fold_in(size: Sizes) -> Case:
    operands = [_keys(4), size.words(4)]
    return Case(bound(jax.vmap(jax.random.fold_in), "random_fold_in", *operands), operands)


def fold_into_one_key(size: Sizes) -> Case:
    operands = [jax.random.key(0), size.words(4)]
    return Case(bound(jax.vmap(jax.random.fold_in, (None, 0)), "random_fold_in", *operands), operands)


def clone(size: Sizes) -> Case:
    return Case(jax.random.clone, [_keys(4)])


def wrap(size: Sizes) -> Case:
    return Case(jax.random.wrap_key_data, [size.words(4, 2)])


def unwrap(size: Sizes) -> Case:
    return Case(jax.random.key_data, [_keys(4)])


def gamma(size: Sizes) -> Case:
    """A shard needs only its own parameters: whatever stands in for the others, its samples are the same."""
    operands = [jax.random.key(5), size.unit(2) + 1]
    run = bound(jax.random.gamma, "random_gamma", *operands)

    def local(shard: Shard, key: jax.Array, a: np.ndarray) -> np.ndarray:
        others = np.ones(2, np.float32)
        others[shard.result_rows(0)] = a
        return np.asarray(run(key, others))[shard.result_rows(0)]

    return Case(run, operands, local)


def bit_generator(size: Sizes) -> Case:
    return Case(partial(lax.rng_bit_generator, shape=size.shape(2)), [size.words(4)])


def uniform(size: Sizes) -> Case:
    """A stand-in: the real one has hidden state and never gives the same numbers twice."""
    shape = size.shape(2)
    return Case(lambda low, high: np.full(shape, high - low), [np.float32(0), np.float32(1)], params={"shape": shape})


def extended_dtype(size: Sizes) -> Case:
    """As wrapping and unwrapping keys, made by hand: JAX has no public way to these."""
    return Case(jax.random.wrap_key_data, [size.words(4, 2)], params={})


CASES: list[tuple[str, Builder]] = [
    ("random_bits", bits),
    ("random_bits", bits_of_many_keys),
    ("random_bits", bits_of_stateful_key),
    ("random_split", split_key),
    ("random_gamma", gamma),
]

ALIKE: list[tuple[str, Builder]] = [
    ("random_seed", seed),
    ("random_fold_in", fold_in),
    ("random_fold_in", fold_into_one_key),
    ("random_clone", clone),
    ("random_wrap", wrap),
    ("random_unwrap", unwrap),
    ("rng_bit_generator", bit_generator),
    ("rng_uniform", uniform),
    ("to_edtype", extended_dtype),
    ("from_edtype", extended_dtype),
]
