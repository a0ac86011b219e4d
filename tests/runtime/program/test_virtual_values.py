"""Virtual values: made anew for each sharding, in time that grows with how many there are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import meshwright as mw
from meshwright import jax_compat
from meshwright.runtime.program.virtual_values import Virtual
from meshwright.runtime.spmd import spmd
from meshwright.strategy.sharding import Axes

pytestmark = pytest.mark.devices

SIZE = 8


def chebyshev(t, steps=40):
    """Each step reads the two before it: there are more ways through all of them than could ever be followed."""
    a, b = t, t * t
    for _ in range(steps):
        a, b = b, 2 * t * b - a
    return b


def chain(t, steps=1500):
    for _ in range(steps):
        t = t * 0.999
    return t


@pytest.mark.parametrize("function", [chebyshev, chain])
@pytest.mark.parametrize("spec", [None, ((),), (("x",),)], ids=["from a constant", "moved", "in place"])
def test_every_value_is_made_once_for_a_sharding(function, spec, monkeypatch):
    root, made = jnp.arange(float(SIZE)) / SIZE, []
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    virtual, env = Virtual(Axes((4,)), mesh), {}
    closed = jax.make_jaxpr(function)(root)
    env = {closed.jaxpr.invars[0]: (root, spec, "forward")}
    for eqn in closed.jaxpr.eqns:
        ins = [(v.val, None, "forward") if isinstance(v, jax_compat.Literal) else env[v] for v in eqn.invars]
        outs = jax_compat.bind(eqn, [x for x, _, _ in ins])
        virtual.add(eqn, ins, outs)
        env |= {v: (x, None, "forward") for v, x in zip(eqn.outvars, outs, strict=True)}
    last, bind = env[closed.jaxpr.outvars[0]][0], jax_compat.bind
    monkeypatch.setattr(jax_compat, "bind", lambda eqn, xs: made.append(eqn) or bind(eqn, xs))
    brought = []
    target = (("x",),)
    assert virtual.moves(last, target) == (spec == ((),))
    for _ in range(2):  # what another reader needs is there already
        again = virtual.made_as(last, target, lambda known, need: brought.append(need) or known[0])
        np.testing.assert_array_equal(again, last)
    assert len(made) == len(closed.jaxpr.eqns)
    assert set(brought) == ({target} if spec == ((),) else set())
    with virtual.inside():
        virtual.made_as(last, target, lambda known, need: known[0])
    assert len(made) == 2 * len(closed.jaxpr.eqns)


@pytest.mark.parametrize(
    "start", [lambda x: jnp.arange(float(SIZE)) / SIZE, lambda x: jnp.broadcast_to(x[0], (SIZE, SIZE))]
)
def test_a_recurrence_is_that_of_one_device(start):
    def function(x, w):
        t = chebyshev(start(x))
        return x @ w * t + (w @ x).T * t

    x, w = (jax.random.uniform(jax.random.key(i), (SIZE, SIZE)) for i in range(2))
    plan = mw.plan(function, x, w, mesh=mw.Mesh.abstract((2, 2), 0.0, 1e-9))
    np.testing.assert_allclose(spmd(plan, function)(x, w), jax.jit(function)(x, w), rtol=1e-4, atol=1e-4)
