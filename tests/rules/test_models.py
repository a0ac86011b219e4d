"""Every primitive of real train steps has a rule, and no shape breaks one."""

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshwright import zoo
from meshwright.rules import Signature, has_rule, loop_nest

from .contract import equations, signature_of

pytestmark = pytest.mark.slow

# What the tracer inlines or plans by its own primitives.
CALLS = {
    "jit",
    "pjit",
    "closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "remat2",
    "checkpoint",
    "scan",
    "while",
    "cond",
}

TINY = ("gpt-tiny", "llama-tiny", "moe-tiny", "mixtral-tiny", "bert-tiny", "vit-tiny", "unet-tiny", "wide-resnet-tiny")


def signatures(function: Callable, *args: Any) -> list[Signature]:
    traced = jax.make_jaxpr(function)(*args)
    return [signature_of(eqn) for eqn in equations(traced.jaxpr) if eqn.primitive.name not in CALLS]


def without_rule(ops: list[Signature]) -> set[str]:
    return {op.primitive for op in ops if not has_rule(op)}


@pytest.mark.parametrize("name", TINY)
def test_train_steps_of_the_zoo(name: str) -> None:
    example = zoo.build(name)
    assert without_rule(signatures(example.train_step, example.state, example.batch)) == set()


def test_scanned_and_checkpointed_layers() -> None:
    example = zoo.build("llama-tiny", scan=True, checkpoint=True)
    assert without_rule(signatures(example.train_step, example.state, example.batch)) == set()


def test_samplers() -> None:
    def sample(key: jax.Array) -> list[jax.Array]:
        return [
            jax.random.normal(key, (3,)),
            jax.random.bernoulli(key, 0.5, (3,)),
            jax.random.permutation(key, 10),
            jax.random.categorical(key, jnp.ones((3, 4))),
            jax.random.dirichlet(key, jnp.ones(3)),
        ]

    assert without_rule(signatures(sample, jax.random.key(0))) == set()
    assert without_rule(signatures(lambda key: jax.random.normal(key, (3,)), jax.random.PRNGKey(0))) == set()


def test_ragged_experts_with_their_gradients() -> None:
    def loss(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, w, sizes).sum()

    args = jnp.ones((8, 4)), jnp.ones((3, 4, 5)), jnp.array([2, 3, 3])
    assert without_rule(signatures(jax.grad(loss, (0, 1)), *args)) == set()


def test_arrays_without_elements() -> None:
    def shapes(z: jax.Array, x: jax.Array) -> list[jax.Array]:
        return [
            z + 1,
            z.sum(0),
            z.reshape(3, 0),
            z.T @ z,
            jnp.concatenate([z, z]),
            jnp.take(x, jnp.zeros((0,), int), 0),
            x[:, :0].max(1, initial=0),
            jnp.cumsum(z, 0),
            jnp.sort(z, 1),
            lax.conv_general_dilated(jnp.zeros((0, 2, 4)), jnp.zeros((3, 2, 3)), (1,), "SAME"),
        ]

    for op in signatures(shapes, jnp.ones((0, 3)), jnp.ones((4, 8))):
        assert has_rule(op), op
        loop_nest(op)


def test_scalars() -> None:
    def shapes(s: jax.Array) -> list[jax.Array]:
        return [
            s + 1,
            s.reshape(1, 1),
            jnp.broadcast_to(s, (2, 2)),
            s[None],
            lax.squeeze(s[None], (0,)),
            -s,
            jnp.sum(s),
        ]

    assert without_rule(signatures(shapes, jnp.float32(1))) == set()


def test_rules_are_quick() -> None:
    """By the calls that they make, which take a third of a microsecond each, and are as many on every machine."""
    example = zoo.build("wide-resnet-tiny")
    calls = []
    for op in signatures(example.train_step, example.state, example.batch):
        made: list[str] = []
        sys.setprofile(lambda frame, event, arg, made=made: made.append(event))
        try:
            loop_nest(op)
        finally:
            sys.setprofile(None)
        calls.append(made.count("call") + made.count("c_call"))
    assert 0 < median(calls) < 300
