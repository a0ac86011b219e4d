"""A plan as plain JAX: see the end of the file for how a training code base uses it."""

# This file needs JAX and nothing else. Everything above the line is the plan, and may be edited; below it are the few
# functions that apply it.

import math
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: The mesh: its axes with their sizes, the outermost first; the last axis joins neighbouring devices.
AXES: dict[str, int] = {"x": 1}

#: The names of the planned function's arguments, and the positions of those whose memory its results take over.
ARGUMENTS: tuple[str, ...] = ("state", "batch")
DONATED: tuple[int, ...] = (0,)

#: How the parameters are split, by their paths; ``*`` stands for a number.
param_specs: dict[str, P] = {}

#: How their gradients are split once they are reduced: as the optimizer state is.
grad_specs: dict[str, P] = {}

#: How the other arguments and the results are split.
other_specs: dict[str, P] = {}

#: How activations are split, by the name scopes and the primitive that makes them, and by their shape behind the first
#: dim: what products and look-ups make. What is computed elementwise follows them.
activation_specs: dict[tuple[str, tuple[int, ...]], P] = {}

#: Where the parameters stand among the arguments.
PARAMETERS = "state/params"

#: Into how many parts the batch is cut; their gradients are added up.
MICROBATCHES = 1

#: What is kept for the backward pass, as a name of `jax.checkpoint_policies`, and which scopes are computed again.
POLICY = "everything_saveable"
RECOMPUTED: tuple[str, ...] = ()

#: Options of XLA that the plan counts on, by platform.
COMPILER_OPTIONS: dict[str, dict[str, str | int | bool]] = {}

# ----------------------------------------------------------------------------------------------------------------------

PyTree = Any


def make_mesh(devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The plan's mesh, of the first of all devices or of some that are given."""
    found = list(jax.devices() if devices is None else devices)
    count = math.prod(AXES.values())
    if len(found) < count:
        raise ValueError(f"the plan is for {count} devices, and there are {len(found)}")
    kinds = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=kinds, devices=found[:count])


def spec(path: str, specs: dict[str, P] | None = None) -> P:
    """The split of the tensor at a path, such as ``state/params/layers/3/up``; a ``*`` of a table is any number."""
    table = {**param_specs, **other_specs} if specs is None else specs
    pattern = re.sub(r"\d+", "*", path)
    if path not in table and pattern not in table:
        near = ", ".join(get_close_matches(path, table, n=3, cutoff=0.3) or list(table)[:3])
        raise KeyError(f"the plan has no tensor {path!r}; its paths look like {near}")
    return table[path if path in table else pattern]


def specs_of(tree: PyTree, name: str, specs: dict[str, P] | None = None) -> PyTree:
    """The splits of a pytree's leaves, in its structure.

    Args:
        tree: Arrays or their types.
        name: Where the tree stands in the plan: an argument's name, or a path such as ``state/params``.
        specs: The table to look them up in; that of arguments and results by default.
    """
    return jax.tree_util.tree_map_with_path(lambda keys, _: spec("/".join([name, *map(_part, keys)]), specs), tree)


def shardings(
    tree: PyTree, name: str = ARGUMENTS[0], mesh: Mesh | None = None, specs: dict[str, P] | None = None
) -> PyTree:
    """The same as JAX's shardings, for `jax.jit`, `jax.device_put` or a checkpoint that is restored."""
    place = partial(NamedSharding, make_mesh() if mesh is None else mesh)
    return jax.tree_util.tree_map(place, specs_of(tree, name, specs), is_leaf=lambda leaf: isinstance(leaf, P))


def jit(step: Callable[..., PyTree], *args: PyTree, mesh: Mesh | None = None) -> jax.stages.Wrapped:
    """The train step as `jax.jit` of it with the plan's shardings, donations and compiler options.

    Args:
        step: The function that was planned, or one of the same arguments and results.
        *args: Its arguments or their types.
        mesh: The mesh; `make_mesh()` by default.
    """
    mesh = make_mesh() if mesh is None else mesh
    return jax.jit(
        step,
        in_shardings=tuple(shardings(arg, name, mesh) for arg, name in zip(args, ARGUMENTS, strict=True)),
        out_shardings=shardings(jax.eval_shape(step, *args), "out", mesh),
        donate_argnums=DONATED,
        compiler_options=COMPILER_OPTIONS.get(mesh.devices.flat[0].platform),
    )


def constrain(x: jax.Array, scope: str, mesh: Mesh | None = None) -> jax.Array:
    """An activation, split as the plan splits what a scope's operation makes: a scope of `activation_specs`."""
    key = (re.sub(r"\d+", "*", scope), x.shape[1:])
    if key not in activation_specs:
        raise KeyError(f"the plan has no activation {key}; it has {', '.join(map(str, activation_specs))}")
    wanted = NamedSharding(make_mesh() if mesh is None else mesh, activation_specs[key])
    return jax.lax.with_sharding_constraint(x, wanted)


def checkpoint(layer: Callable[..., Any]) -> Callable[..., Any]:
    """A layer that keeps for the backward pass what the plan keeps, and computes the rest again."""
    if POLICY == "everything_saveable":
        return layer
    return jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, POLICY))


def value_and_grad(
    loss: Callable[..., jax.Array], name: str = PARAMETERS, mesh: Mesh | None = None
) -> Callable[..., tuple[jax.Array, PyTree]]:
    """As `jax.value_and_grad` of a mean over examples, in the plan's microbatches, with gradients split as planned.

    Args:
        loss: A function of the parameters and of batches, whose leaves are stacks of examples.
        name: Where the parameters stand in the plan.
        mesh: The mesh; `make_mesh()` by default.
    """

    def split(grads: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(grads, shardings(grads, name, mesh, grad_specs))

    def whole(params: PyTree, *batch: PyTree) -> tuple[jax.Array, PyTree]:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return value, split(grads)

    def in_parts(params: PyTree, *batch: PyTree) -> tuple[jax.Array, PyTree]:
        def add(sums: PyTree, part: PyTree) -> tuple[PyTree, None]:
            value, grads = jax.tree_util.tree_map(jnp.add, sums, whole(params, *part))
            return (value, split(grads)), None

        parts = jax.tree_util.tree_map(_parts, batch)
        types = jax.eval_shape(whole, params, *jax.tree_util.tree_map(lambda x: x[0], parts))
        value, grads = jax.tree_util.tree_map(lambda t: jnp.zeros(t.shape, t.dtype), types)
        (value, grads), _ = jax.lax.scan(add, (value, split(grads)), parts)
        return value / MICROBATCHES, jax.tree_util.tree_map(lambda x: x / MICROBATCHES, grads)

    return whole if MICROBATCHES == 1 else in_parts


def _parts(x: jax.Array) -> jax.Array:
    """A stack of microbatches: each takes rows of every device, so that cutting moves nothing."""
    if x.shape[0] % MICROBATCHES:
        raise ValueError(f"a batch of {x.shape[0]} examples cannot be cut into {MICROBATCHES} microbatches")
    return x.reshape(-1, MICROBATCHES, *x.shape[1:]).swapaxes(0, 1)


def _part(key: Any) -> str:
    return str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key))))


# How to use it in a code base of your own:
#
#     import sharding_plan as plan  # this file
#
#     mesh = plan.make_mesh()
#     state = jax.device_put(state, plan.shardings(state, plan.ARGUMENTS[0], mesh))
#     step = plan.jit(train_step, state, batch)  # or jax.jit(train_step, in_shardings=…) with plan.shardings(…)
#     state, loss = step(state, batch)
#
# In the model, `plan.constrain(x, scope)` pins the activations of `plan.activation_specs`, and `plan.checkpoint(layer)`
# recomputes what the plan recomputes. In the train step, `plan.value_and_grad(loss)` in the place of
# `jax.value_and_grad(loss)` cuts the batch into `plan.MICROBATCHES` and keeps gradients split. A tree whose paths are
# others than those of the planned function is renamed, or the tables above are.
