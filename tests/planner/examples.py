"""Functions to plan, and plans on several meshes from one trace."""

import jax
import jax.numpy as jnp
import optax

import meshwright as mw
from meshwright import zoo
from meshwright.graph import trace
from meshwright.planner.planner import Task


def mlp_step(batch, hidden, layers=6):
    """An MLP's train step with bias and Adam that returns its state alone, and the shapes of its arguments."""
    optimizer = optax.adam(1e-3)

    def init():
        params = [{"kernel": jnp.zeros((hidden, hidden)), "bias": jnp.zeros(hidden)} for _ in range(layers)]
        return {"params": params, "opt": optimizer.init(params)}

    def loss(params, x, y):
        for i, layer in enumerate(params):
            x = x @ layer["kernel"] + layer["bias"]
            x = jax.nn.relu(x) if i < layers - 1 else x
        return jnp.mean((x - y) ** 2)

    def step(state, x, y):
        grads = jax.grad(loss)(state["params"], x, y)
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

    data = jax.ShapeDtypeStruct((batch, hidden), jnp.float32)
    return step, (jax.eval_shape(init), data, data)


def all_reduce(num_bytes, devices, alpha=1.0, beta=1.0):
    return alpha + 2 * beta * (devices - 1) / devices * num_bytes


def zoo_args(name, **options):
    example = zoo.build(name, **options)
    return example.train_step, (example.state, example.batch)


def solve_on(traced, method, meshes, folding=True):
    return Task(traced, method, folding).plan(meshes, lambda _: None)


def traced_zoo(name, **options):
    function, args = zoo_args(name, **options)
    return trace(function, *args)


def mesh(shape, alpha=1.0, beta=1.0, memory_bytes=None):
    return mw.Mesh.abstract(shape, alpha, beta, memory_bytes)
