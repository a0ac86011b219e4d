"""A square multi-layer perceptron in float32 with mean squared error and plain Adam: the smallest model worth planning.

Its best plans are known in closed form, so the planner is tested on it: hence no weight decay and no clipping.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from meshwright.zoo.draw import normal, split
from meshwright.zoo.layers import Array, PyTree, init_stack, project, run_stack
from meshwright.zoo.train import AdamW

OPTIMIZER = AdamW(weight_decay=0.0, clip_norm=None)


@dataclass(frozen=True)
class Config:
    """The shape of one MLP: `layers` square layers with a ReLU between every two."""

    hidden: int
    layers: int
    dtype: str = "float32"
    scan: bool = False
    checkpoint: str = "none"


def init(config: Config, key: Array) -> PyTree:
    """Returns fresh parameters."""
    return {"layers": init_stack(partial(_init_layer, config), key, config.layers, scan=config.scan)}


def _init_layer(config: Config, key: Array) -> PyTree:
    kernel = normal(key, config.hidden, config.hidden, scale=config.hidden**-0.5)
    return {"kernel": kernel, "bias": jnp.zeros(config.hidden)}


def loss(config: Config, params: PyTree, batch: PyTree) -> Array:
    """Mean squared error."""
    layers = params["layers"]
    if isinstance(layers, list):
        *body, last = layers
    else:
        body, last = jax.tree.map(lambda w: w[:-1], layers), jax.tree.map(lambda w: w[-1], layers)
    x = run_stack(_hidden_layer, body, batch["x"].astype(config.dtype), checkpoint=config.checkpoint)
    return jnp.mean(jnp.square(_linear(last, x) - batch["y"]))


def _hidden_layer(weights: PyTree, x: Array) -> Array:
    return jax.nn.relu(_linear(weights, x))


def _linear(weights: PyTree, x: Array) -> Array:
    return project("bi,io->bo", x, weights["kernel"], weights["bias"])


def sample(config: Config, key: Array, batch: int, seq: int | None) -> PyTree:
    """Returns random inputs and targets."""
    x_key, y_key = split(key)
    shape = (batch, config.hidden)
    return {"x": normal(x_key, *shape, scale=1.0), "y": normal(y_key, *shape, scale=1.0)}
