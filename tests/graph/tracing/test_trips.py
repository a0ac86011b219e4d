"""How often `while` loops run is read off what they count, and off integers that were given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import meshwright as mw
from meshwright.graph import trace

X = jax.ShapeDtypeStruct((4, 4), "float32")


def told(function, *args):
    """The trips of each loop, how they are known, and the trips of what runs most often."""
    graph = trace(function, *args).graph
    return [(loop.trips, loop.known) for loop in graph.whiles], max(op.trips for op in graph.ops)


def counting(first, last, step=1, compare=jnp.less):
    return lambda x: lax.while_loop(
        lambda c: compare(c[0], last), lambda c: (c[0] + step, jnp.sin(c[1])), (jnp.asarray(first), x)
    )[1]


def repeated(x, count):
    return lax.fori_loop(0, count, lambda _, x: jnp.sin(x), x)


def newton(x):
    """Newton and Schulz's iteration, as the public writes it: until it settles, and thirty times at most."""

    def goes_on(state):
        return jnp.logical_and(state[0] < 30, state[1] > 1e-6)

    def advance(state):
        y = 1.5 * state[2] - 0.5 * state[2] @ state[2] @ state[2]
        return state[0] + 1, jnp.abs(y - state[2]).max(), y

    return lax.while_loop(goes_on, advance, (0, jnp.inf, x))[2]


@pytest.mark.parametrize(
    ("first", "last", "step", "compare", "trips"),
    [
        (0, 5, 1, jnp.less, 5),
        (0, 5, 2, jnp.less, 3),
        (1, 5, 1, jnp.less_equal, 5),
        (10, 0, -3, jnp.greater, 4),
        (10, 1, -3, jnp.greater_equal, 4),
        (7, 5, 1, jnp.less, 1),
    ],
)
def test_loops_that_count_between_numbers_of_the_program(first, last, step, compare, trips):
    assert told(counting(first, last, step, compare), X) == ([(trips, "exact")], trips)


def test_the_limit_may_stand_on_the_left():
    def loop(x):
        return lax.while_loop(lambda c: jnp.greater(5, c[0]), lambda c: (1 + c[0], c[1] * 2), (0, x))[1]

    assert told(loop, X) == ([(5, "exact")], 5)


def test_loops_that_count_to_what_was_given():
    assert told(repeated, X, np.int32(7)) == ([(7, "given")], 7)
    assert told(lambda x, n: repeated(x, n.max() + 1), X, np.array([3, 11])) == ([(12, "given")], 12)
    assert told(repeated, X, jax.ShapeDtypeStruct((), "int32")) == ([(1, "unknown")], 1)


def test_of_a_batch_the_longest_counts():
    assert told(jax.vmap(repeated), X, np.array([2, 9, 4, 1])) == ([(9, "given")], 9)
    assert told(jax.vmap(newton), jax.ShapeDtypeStruct((3, 4, 4), "float32")) == ([(30, "at most")], 30)


def test_what_also_ends_when_something_holds_runs_at_most_so_often():
    def within(x):
        return lax.scan(lambda x, _: (newton(x), None), x, None, length=5)[0]

    assert told(newton, X) == ([(30, "at most")], 30)
    assert told(within, X) == ([(30, "at most")], 150)


@pytest.mark.parametrize(
    "loop",
    [
        lambda x: lax.while_loop(lambda x: jnp.any(x > 0), lambda x: x - 1, x),
        lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] * 2, c[1] + 1), (1, x))[1],
        lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] - 1, c[1] + 1), (1, x))[1],
        lambda x: lax.while_loop(lambda c: c[0] < c[2], lambda c: (c[0] + 1, c[1] + 1, c[2] + 1), (0, x, 5))[1],
        lambda x: lax.while_loop(lambda c: (c[0] < 5) | (c[1].max() < 1), lambda c: (c[0] + 1, c[1] + 1), (0, x))[1],
    ],
)
def test_of_other_loops_nothing_is_known(loop):
    assert told(loop, X) == ([(1, "unknown")], 1)


@pytest.mark.parametrize("method", [mw.DataParallel(microbatches=2), mw.DataParallel(recompute="full")])
def test_programs_that_a_plan_changes_run_loops_as_often(method):
    def step(w, batch, rounds):
        scale = repeated(jnp.ones((8, 8)), rounds.max())

        def loss(w):
            return jnp.mean((jnp.tanh(jnp.tanh(batch @ w) @ w) @ scale) ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    args = np.ones((8, 8), np.float32), np.ones((16, 8), np.float32), np.arange(16)
    plan = mw.plan(step, *args, cluster="1x8 cpu", method=method, batch_argnums=1)
    assert plan.microbatches == 2 or plan.recompute == "full"
    assert [(loop["trips"], loop["known"]) for loop in plan.provenance["loops"]] == [(15, "given")]


def test_compiled_programs_are_compared_by_the_trips_that_xla_states():
    def step(x, count):
        x = counting(0, 5)(x @ x)
        return lax.while_loop(lambda c: (c[0] < 7) & (c[1].max() > 0), lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]

    plan = mw.plan(step, X, np.int32(3), mesh=mw.Mesh.abstract((1,), alpha=(1,), beta=(1,)))
    assert plan.flops == 8 * 2 * 4**3 and plan.verify().flops.compiled == 2 * 2 * 4**3
