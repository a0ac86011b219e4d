"""Small models to cut: plain JAX, with Optax where it matters."""

import jax
import jax.numpy as jnp

from meshwright.graph import trace
from meshwright.pipeline.layers.forward_pass import Flow
from meshwright.pipeline.layers.layers import Wishes, find_layers
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.roles import find_roles


def mlp(hidden=64, layers=6, rows=16, body=None, optimizer=None, dtype=jnp.float32):
    """A train step of a stack of products, and the types of its arguments."""

    def loss(params, x):
        for i, w in enumerate(params):
            x = body(i, w, x) if body else jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(state, x):
        params, opt = state
        value, grads = jax.value_and_grad(loss)(params, x)
        if optimizer is None:
            return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), opt), value
        updates, opt = optimizer.update(grads, opt, params)
        return (jax.tree.map(lambda p, u: p + u, params, updates), opt), value

    params = [jax.ShapeDtypeStruct((hidden, hidden), dtype)] * layers
    opt = () if optimizer is None else jax.eval_shape(optimizer.init, params)
    return step, ((params, opt), jax.ShapeDtypeStruct((rows, hidden), dtype))


def flow_of(function, *args):
    graph = trace(function, *args).graph
    return Flow(graph, Grouping(graph).nests, find_roles(graph))


def layers_of(function, *args, **wishes):
    flow = flow_of(function, *args)
    return flow, find_layers(flow, Wishes(**wishes))


def flops_by_layer(flow, layers, phase):
    ops = flow.graph.columns.phase == phase
    return layers.gather(layers.places.unit[ops], flow.flops[ops])
