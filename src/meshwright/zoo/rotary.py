"""Rotary positions (https://arxiv.org/abs/2104.09864), and the scalings that let a model read longer sequences."""

import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from meshwright.zoo.layers import Array, PyTree


@dataclass(frozen=True)
class Linear:
    """All frequencies divided by one factor (https://arxiv.org/abs/2306.15595)."""

    factor: float

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        """The frequencies of all pairs of a head, of which `theta` is the base."""
        return frequencies / self.factor

    @property
    def magnitude(self) -> float:
        """What rotated queries and keys are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class Llama3:
    """As Llama 3.1: frequencies that turn less than `low` times in the original length are divided by the factor.

    Those that turn more than `high` times are kept, and those between are interpolated.
    """

    factor: float
    low: float
    high: float
    original: int  # positions that the model was first trained on

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies

    @property
    def magnitude(self) -> float:
        return 1.0


@dataclass(frozen=True)
class Yarn:
    """YaRN (https://arxiv.org/abs/2309.00071): pairs are interpolated by their place between two numbers of turns.

    Attributes:
        fast: Pairs that turn as often or more in the original length keep their frequency.
        slow: Pairs that turn as often or less are divided by the factor.
        truncate: Whether the places of both are rounded outwards to whole pairs.
    """

    factor: float
    fast: float
    slow: float
    original: int
    truncate: bool = True

    def scaled(self, frequencies: np.ndarray, theta: float) -> np.ndarray:
        half = len(frequencies)
        first, last = (self._place(turns, half, theta) for turns in (self.fast, self.slow))
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        divided = np.clip((np.arange(half) - first) / max(last - first, 1e-3), 0, 1)
        return divided * frequencies / self.factor + (1 - divided) * frequencies

    def _place(self, turns: float, half: int, theta: float) -> float:
        """The number of the pair, with fractions, that turns so often in the original length."""
        return half * math.log(self.original / (turns * 2 * math.pi)) / math.log(theta)

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1 if self.factor > 1 else 1.0


Scaling = Linear | Llama3 | Yarn


def make_rotation(
    positions: int | Array, head_dim: int, theta: float, scaling: Scaling | None = None
) -> tuple[Array, Array]:
    """Returns cosine and sine of the angle of each position and pair, both (seq, 1, head_dim / 2).

    Args:
        positions: The position of each token, (seq,), or how many there are from 0 on.
        head_dim: The width of a head.
        theta: The base of the wavelengths.
        scaling: What makes these longer.
    """
    half = head_dim // 2
    places = jnp.arange(positions) if isinstance(positions, int) else positions
    if scaling is None:
        angles = places[:, None, None] * theta ** (-jnp.arange(half) / half)
        return jnp.cos(angles), jnp.sin(angles)
    frequencies = scaling.scaled(theta ** (-np.arange(half) / half), theta)
    angles = places[:, None, None] * jnp.asarray(frequencies, jnp.float32)
    return scaling.magnitude * jnp.cos(angles), scaling.magnitude * jnp.sin(angles)


def rotate(x: Array, rotation: PyTree) -> Array:
    """Rotates each pair (i, i + H/2) of every head by its angle."""
    cos, sin = rotation
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
