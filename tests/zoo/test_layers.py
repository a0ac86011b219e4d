"""The shared parts compute what their names promise."""

import jax
import jax.numpy as jnp
import numpy as np

from meshwright.zoo import layers, rotary, vision

RNG = np.random.default_rng(0)


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def test_norms_centre_and_scale():
    x, unit = 3 + 2 * draw(4, 6, 6, 8), {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}
    normed = jax.jit(layers.layer_norm)(x, unit)
    np.testing.assert_allclose(np.mean(normed, axis=-1), 0, atol=1e-5)
    np.testing.assert_allclose(np.std(normed, axis=-1), 1, rtol=1e-4)
    np.testing.assert_allclose(np.std(jax.jit(vision.batch_norm)(x, unit), axis=(0, 1, 2)), 1, rtol=1e-4)
    grouped = jax.jit(vision.group_norm, static_argnums=2)(x, unit, 2).reshape(4, 6, 6, 2, 4)
    np.testing.assert_allclose(np.std(grouped, axis=(1, 2, 4)), 1, rtol=1e-4)
    np.testing.assert_allclose(np.mean(jax.jit(layers.rms_norm)(x, unit["scale"]) ** 2, axis=-1), 1, rtol=1e-4)


def test_rotation_makes_scores_depend_on_distance_only():
    def scores(q, k):
        rotation = rotary.make_rotation(16, 8, 10_000.0)
        return jnp.einsum("bqnh,bknh->qk", rotary.rotate(q, rotation), rotary.rotate(k, rotation))

    q, k = (np.broadcast_to(draw(8), (1, 16, 1, 8)) for _ in range(2))
    table = np.asarray(jax.jit(scores)(q, k))
    for distance in (0, 3, 7):
        diagonal = np.diagonal(table, distance)
        np.testing.assert_allclose(diagonal, np.full_like(diagonal, diagonal[0]), rtol=1e-4, atol=1e-5)
