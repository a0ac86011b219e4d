"""Loops whose conditions were batched become loops with one condition, and compute the same numbers."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import meshwright as mw
from meshwright.graph.tracing.batched_conditions import with_single_conditions

X = (np.arange(32, dtype="f4").reshape(8, 4) + 1) / 32


def grown(x, limit=10.0):
    """Doubled, with a factor that is a constant of the body, until a limit that is a constant of the condition."""
    return lax.while_loop(lambda c: c[0].sum() < limit, lambda c: (c[0] * (1 + limit / 10), c[1] + 1), (x, 0))


def drawn(key):
    """A random number above a half; the carry has a typed key."""
    return lax.while_loop(
        lambda c: c[1] < 0.5, lambda c: (jax.random.split(c[0])[0], jax.random.uniform(c[0])), (key, 0.0)
    )[1]


LOOPS = {
    "mapped": lambda x: jax.vmap(grown)(x),
    "mapped over limits": lambda x: jax.vmap(lambda limit: grown(x[0], limit))(x[:, 1] + 9),
    "mapped twice": lambda x: jax.vmap(jax.vmap(lambda v: grown(v[None])))(x),
    "mapped along the second dim": lambda x: jax.vmap(grown, in_axes=1, out_axes=(1, 0))(x),
    "in a loop": lambda x: lax.scan(lambda c, _: (jax.vmap(grown)(c)[0] / 20, c.sum()), x, None, length=2),
    "in a branch": lambda x: lax.cond(x[0, 0] > 0, lambda x: jax.vmap(grown)(x)[0], lambda x: x, x),
    "in a call": lambda x: jax.jit(jax.vmap(grown))(x)[0] + jax.jit(jax.vmap(grown))(2 * x)[0],
    "around a loop": lambda x: jax.vmap(lambda v: lax.while_loop(lambda v: v.sum() < 99, lambda v: grown(v)[0] + 1, v))(
        x
    ),
    "differentiated forwards": lambda x: jax.jvp(jax.vmap(grown), (x,), (x,)),
    "of random keys": lambda x: jax.vmap(drawn)(jax.random.split(jax.random.key(0), 8)) + x[:, 0],
}


@pytest.mark.parametrize("name", LOOPS)
def test_loops_go_on_while_any_condition_holds(name):
    closed = jax.make_jaxpr(LOOPS[name])(X)
    changed = with_single_conditions(closed)
    assert changed is not closed and with_single_conditions(changed) is changed
    for found, expected in zip(jaxpr_as_fun(changed)(X), jaxpr_as_fun(closed)(X), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_other_loops_stay_as_they_are():
    closed = jax.make_jaxpr(lambda x: (grown(x), jax.vmap(lambda v: lax.fori_loop(0, 3, lambda _, v: v + 1, v))(x)))(X)
    assert with_single_conditions(closed) is closed


@pytest.mark.devices
def test_a_batched_loop_runs_on_devices_and_is_verified():
    step = mw.parallelize(jax.vmap(grown), mesh=(8,))
    for found, expected in zip(step(X), jax.jit(jax.vmap(grown))(X), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert step.last_plan.verify().collectives is not None
