"""Random arrays for tests, drawn by NumPy: JAX would compile its generator for every shape."""

from typing import Any

import jax
import numpy as np


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = np.float32) -> jax.Array:
    """Numbers of a normal distribution; the same for the same shape and seed."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put((np.float32(scale) * drawn).astype(dtype))
