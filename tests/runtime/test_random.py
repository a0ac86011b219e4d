"""Random programs under random plans, good or bad: whatever is split however, one device's numbers come out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright.graph import trace
from meshwright.hardware import Mesh
from meshwright.planner.methods import Auto
from meshwright.planner.planner import Task
from meshwright.planner.search import View
from meshwright.runtime.spmd import spmd
from meshwright.solver.solution import Solution, Status

from .test_spmd import compiled

MESHES = [(8,), (2, 4), (2, 2, 2), (3,), (6,)]
SIZES = (6, 8, 12, 24)


class Drawn:
    """A program drawn at random: each step makes a value out of those before."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.shapes = [tuple(rng.choice(SIZES, rng.integers(1, 4)).tolist()) for _ in range(3)]
        self.steps = [(STEPS[rng.integers(len(STEPS))], int(rng.integers(1 << 30))) for _ in range(7)]
        self.with_gradient = rng.random() < 0.6

    def arguments(self):
        return tuple(jax.random.normal(jax.random.key(i), s) for i, s in enumerate(self.shapes))

    def __call__(self, *args):
        value = self.values(*args)
        if not self.with_gradient:
            return value
        return value, jax.grad(lambda *xs: sum(jnp.sum(jnp.sin(v)) for v in self.values(*xs)), range(3))(*args)

    def values(self, *args):
        pool = list(args)
        for step, seed in self.steps:
            rng = np.random.default_rng(seed)
            pool.append(step(pool[rng.integers(len(pool))], pool, rng))
        return pool[3:]


def multiply(x, pool, rng):
    w = jnp.sin(jnp.arange(x.shape[-1] * 8.0)).reshape(x.shape[-1], 8)
    return jnp.tanh(x @ w)


def contract(x, pool, rng):
    fitting = [y for y in pool if y.ndim > 1 and y.shape[0] == x.shape[-1]]
    y = fitting[rng.integers(len(fitting))] if fitting else x
    if not fitting:
        return jnp.tensordot(x, x, ([*range(x.ndim - 1)],) * 2) / 8
    return jnp.tensordot(x, y, 1) / 8 if x.ndim + y.ndim < 6 else jnp.tensordot(x.sum(0), y, 1) / 8


def elementwise(x, pool, rng):
    return [jnp.sin, jnp.tanh, jax.nn.relu, lambda v: v * v / 3, jax.nn.sigmoid][rng.integers(5)](x)


def join(x, pool, rng):
    alike = [y for y in pool if y.shape == x.shape]
    return x - 0.5 * alike[rng.integers(len(alike))]


def turn(x, pool, rng):
    return jnp.transpose(x, rng.permutation(x.ndim).tolist())


def merge(x, pool, rng):
    return x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x.reshape(-1)


def divide(x, pool, rng):
    return x.reshape(x.shape[0] // 2, 2, *x.shape[1:]) if x.ndim < 3 and x.shape[0] % 2 == 0 else x


def reduce(x, pool, rng):
    how = [jnp.sum, jnp.max, jnp.mean][rng.integers(3)]
    return how(x, axis=int(rng.integers(x.ndim))) if x.ndim > 1 else how(x, keepdims=True)


def normalise(x, pool, rng):
    return jax.nn.softmax(x, axis=int(rng.integers(x.ndim)))


def look_up(x, pool, rng):
    return x[jnp.arange(12) * 5 % x.shape[0]]


def widen(x, pool, rng):
    return jnp.concatenate([x, x[..., ::-1]], axis=-1)


def repeat(x, pool, rng):
    return jax.lax.scan(lambda c, y: (jnp.tanh(c + y), c), jnp.zeros_like(x[0]), x)[1] if x.ndim > 1 else x


def accumulate(x, pool, rng):
    if x.ndim < 3:
        return jnp.cumsum(x, axis=0)
    zero = jnp.zeros((x.shape[2], x.shape[2]))
    return jax.lax.scan(lambda c, y: (c + y.T @ y / 8, None), zero, x)[0]


STEPS = [
    *(multiply, contract, elementwise, join, turn, merge, divide, reduce, normalise, look_up, widen, repeat, accumulate)
]


def random_plan(function, args, shape, seed):
    """A plan with a strategy drawn for each group."""
    task = Task(trace(function, *args), Auto(), folding=bool(seed % 2))
    view = View(task.formulate(Mesh.abstract(shape, alpha=0.0, beta=1e-9)), None)
    rng = np.random.default_rng(seed)
    choice = np.array([rng.integers(len(cost)) for cost in view.formulation.costs])
    view.solution = Solution(Status.FEASIBLE, choice, 0.0, 0.0, 0.0)
    return task._read_back(view, [])


@pytest.mark.parametrize("seed", range(12))
def test_a_random_plan_of_a_random_program_computes_what_one_device_computes(seed):
    function = Drawn(seed)
    args = function.arguments()
    plan = random_plan(function, args, MESHES[seed % len(MESHES)], seed)
    got = compiled(spmd(plan, function), *args)(*args)
    for expected, found in zip(jax.tree.leaves(jax.jit(function)(*args)), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=2e-4, atol=2e-4)
