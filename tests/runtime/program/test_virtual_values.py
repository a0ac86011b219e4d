"""Virtual values: made anew for each sharding, as rules allow, in time that grows with how many there are."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright import jax_compat
from meshwright.runtime.program.virtual_values import Virtual
from meshwright.runtime.spmd import spmd
from meshwright.strategy.sharding import Axes
from tests.runtime.test_spmd import run_once

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
    virtual, env = Virtual(Axes((4,)), mesh, mesh.axis_names), {}
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


def _holds(function: Callable[..., Any], args: Sequence[Any], method: mw.Manual, shape: tuple[int, ...]) -> None:
    """Results are those of one device, and collectives have the bytes that were planned."""
    plan = mw.plan(function, *args, mesh=mw.Mesh.abstract(shape, alpha=0.0, beta=1e-9), method=method)
    found, sent = run_once(plan, function, *args)
    for one, many in zip(jax.tree.leaves(jax.jit(function)(*args)), jax.tree.leaves(found), strict=True):
        np.testing.assert_array_equal(many, one)
    assert sum(pair.compiled for pair in sent) == sum(pair.planned for pair in sent), sent


def _counts(x: Any, y: Any, start: Any) -> Any:
    at = (jnp.arange(4) * 5 + start) % 8
    return y + at[:, None], x * jnp.zeros((8, 6)).at[at].add(1.0)[at]


def _counts_in_a_branch(x: Any, y: Any, start: Any) -> Any:
    at = (jnp.arange(4) * 5 + start) % 8
    found = jnp.zeros((8, 6)).at[at].add(1.0)[at]
    return y + at[:, None], lax.cond(start > 2, lambda x: x * found, lambda x: x - found, x)


def _sorts(x: Any, y: Any, start: Any) -> Any:
    at = (jnp.arange(4) * 5 + start) % 8
    made = jnp.sort(at[:, None] * jnp.arange(6), axis=0).cumsum(axis=1)
    return y + at[:, None], x * made


def _looks_up_a_value(x: Any, y: Any, start: Any) -> Any:
    at = (jnp.arange(4) * 5 + start) % 8
    return y + at[:, None], x * y[0][jnp.stack([at % 2] * 6, 1)]


@pytest.mark.parametrize("function", [_counts, _counts_in_a_branch, _sorts, _looks_up_a_value])
@pytest.mark.parametrize("spec", [P(("x", "y"), "z"), P(("x", "z"))], ids=str)
def test_virtual_values_are_made_in_splits_that_their_rules_allow(function, spec):
    args = np.ones((4, 6), np.float32), np.ones((4, 2), np.float32), np.int32(3)
    _holds(function, args, mw.Manual({"x": spec, "y": P("z")}), (2, 2, 2))


@pytest.mark.parametrize("spec", [P(None, None, None, "x"), P("y", None, None, "x")], ids=str)
def test_convolutions_of_broadcast_values_in_groups_are_done_by_each_device(spec):
    def function(x: Any, scale: Any) -> Any:
        image, kernel = jnp.arange(64.0).reshape(4, 4, 2, 2), jnp.broadcast_to(scale, (1, 1, 1, 4))
        names = ("NHWC", "HWIO", "NHWC")
        made = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=names, feature_group_count=2)
        return x * made

    _holds(function, (np.ones((4, 4, 2, 4), np.float32), np.float32(2)), mw.Manual({"x": spec}), (2, 2))
