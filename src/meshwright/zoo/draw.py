"""Random numbers for weights and batches, from a JAX key or from a NumPy generator.

A JAX key can be traced, so shapes are found without drawing and big models are drawn where they live. But JAX compiles
its generator anew for every shape, half a second each on a small machine: NumPy draws where arrays are wanted now, and
`jax.device_put` takes them, since `jnp.asarray` compiles a program for every shape as well.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Source = Any  # a JAX key or a numpy.random.Generator


def source(seed: Any) -> Source:
    """Returns what to draw from: a NumPy generator for a whole number, anything else as it is."""
    return np.random.default_rng(seed) if isinstance(seed, int) else seed


def split(key: Source, count: int = 2) -> Any:
    """Returns independent sources."""
    return key.spawn(count) if isinstance(key, np.random.Generator) else jax.random.split(key, count)


def normal(key: Source, *shape: int, scale: float = 0.02) -> Array:
    """Draws float32 from a normal distribution; the default scale is that of GPT-2's weights."""
    if isinstance(key, np.random.Generator):
        return jax.device_put(np.float32(scale) * key.standard_normal(shape, np.float32))
    return scale * jax.random.normal(key, shape, jnp.float32)


def integers(key: Source, *shape: int, below: int) -> Array:
    """Draws int32 from 0 up to, but not including, `below`."""
    if isinstance(key, np.random.Generator):
        return jax.device_put(key.integers(0, below, shape, np.int32))
    return jax.random.randint(key, shape, 0, below)


def coins(key: Source, *shape: int, chance: float) -> Array:
    """Draws booleans that are true with the given chance."""
    if isinstance(key, np.random.Generator):
        return jax.device_put(key.random(shape) < chance)
    return jax.random.bernoulli(key, chance, shape)
