"""Roles: which arguments are parameters, optimizer state and data."""

import jax
import jax.numpy as jnp
import pytest

from meshwright.graph import trace
from meshwright.planner.grouping.roles import find_roles
from tests.planner.examples import mlp_step, traced_zoo


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def paths_by_role(graph):
    roles, path = find_roles(graph), dict(zip(graph.inputs, graph.input_paths, strict=True))
    return {name: {path[v] for v in getattr(roles, name)} for name in ("parameters", "optimizer", "data")}


def test_a_train_step_has_all_three():
    step, args = mlp_step(16, 8, layers=2)
    found = paths_by_role(trace(step, *args).graph)
    kernels = {f"{i}/{name}" for i in range(2) for name in ("kernel", "bias")}
    assert found["parameters"] == {f"state/params/{name}" for name in kernels}
    moments = {f"state/opt/0/{moment}/{name}" for moment in ("mu", "nu") for name in kernels}
    assert found["optimizer"] == moments | {"state/opt/0/count"}
    assert found["data"] == {"x", "y"}


MODELS = [("gpt-tiny", {}), ("gpt-tiny", {"scan": True}), ("moe-tiny", {"checkpoint": True}), ("unet-tiny", {})]


@pytest.mark.parametrize(("name", "options"), MODELS, ids=str)
def test_models_of_the_zoo_have_their_roles_by_name(name, options):
    graph = traced_zoo(name, **options).graph
    found = paths_by_role(graph)
    starts = {"parameters": ("state/params/",), "optimizer": ("state/mu/", "state/nu/", "state/step"), "data": "batch"}
    for role, prefix in starts.items():
        assert found[role] == {path for path in graph.input_paths if path.startswith(prefix)}


def test_where_nothing_comes_back_the_largest_argument_is_parameters():
    def forward(x, weights):
        return jnp.tanh(x @ weights["up"]) @ weights["down"]

    found = paths_by_role(trace(forward, array(4, 8), {"up": array(8, 32), "down": array(32, 8)}).graph)
    assert found == {"parameters": {"weights/up", "weights/down"}, "optimizer": set(), "data": {"x"}}


def test_examples_are_data_however_many_there_are():
    def forward(x, weights):
        return jnp.tanh(x["a"] @ weights["up"]) @ weights["down"] + x["b"]

    batch = {"a": array(4096, 8), "b": array(4096, 2)}
    found = paths_by_role(trace(forward, batch, {"up": array(8, 32), "down": array(32, 2)}).graph)
    assert found["parameters"] == {"weights/up", "weights/down"} and found["data"] == {"x/a", "x/b"}


def test_a_cache_that_comes_back_is_data():
    def decode(weights, cache, x):
        cache = {"k": cache["k"] + (x @ weights["k"])[:, None], "v": cache["v"] + (x @ weights["v"])[:, None]}
        return jnp.einsum("bd,btd->bt", x, cache["k"]) @ weights["out"], cache

    weights = {"k": array(8, 8), "v": array(8, 8), "out": array(16, 32)}
    found = paths_by_role(trace(decode, weights, {"k": array(4, 16, 8), "v": array(4, 16, 8)}, array(4, 8)).graph)
    assert found["parameters"] == {"weights/k", "weights/v", "weights/out"}
    assert found["data"] == {"cache/k", "cache/v", "x"}


def adapted(state, *batch):
    base, x = batch

    def loss(adapter):
        return jnp.sum(jnp.tanh(x["a"] @ (base["up"] + adapter["in"] @ adapter["out"])) @ base["down"] * x["b"])

    return jax.tree.map(lambda p, g: p - g, state, jax.grad(loss)(state))


def test_frozen_parameters_of_a_train_step_are_parameters():
    state, base = {"in": array(8, 2), "out": array(2, 32)}, {"up": array(8, 32), "down": array(32, 6)}
    graph = trace(adapted, state, base, {"a": array(16, 8), "b": array(16, 6)}).graph
    found = paths_by_role(graph)
    assert found["parameters"] == {"state/in", "state/out", "batch/0/up", "batch/0/down"}
    assert found["data"] == {"batch/1/a", "batch/1/b"}


def test_a_batch_with_several_first_dims_is_data():
    def step(state, batch, labels):
        def loss(w):
            return jnp.sum(((batch["x"] * batch["mask"]) @ w - labels) ** 2)

        return state - jax.grad(loss)(state)

    found = paths_by_role(trace(step, array(8, 4), {"x": array(16, 8), "mask": array(8)}, array(16, 4)).graph)
    assert found["parameters"] == {"state"} and found["data"] == {"batch/x", "batch/mask", "labels"}


def test_a_single_argument_is_data():
    found = paths_by_role(trace(lambda x: x["a"] @ x["b"], {"a": array(4, 8), "b": array(8, 2)}).graph)
    assert found == {"parameters": set(), "optimizer": set(), "data": {"x/a", "x/b"}}


def test_every_argument_has_one_role():
    for traced in (traced_zoo("llama-tiny"), trace(lambda: jnp.ones(3)), trace(lambda x: 2.0, array(3))):
        roles = find_roles(traced.graph)
        assert sorted((*roles.parameters, *roles.optimizer, *roles.data)) == sorted(traced.graph.inputs)
