"""Sums that are settled together: numbers as on one device, and not a byte more is sent than was planned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import meshwright as mw
from meshwright.graph import trace
from meshwright.hardware import Mesh
from meshwright.planner.budget import Budget
from meshwright.planner.planner import Task
from meshwright.planner.solving.fit_memory import View, ViewState
from meshwright.runtime.spmd import spmd
from meshwright.solver.problem.solution import Solution, Status
from tests.compiling import QUICK
from tests.draws import normal
from tests.runtime.checking.test_cpu_memory import is_close
from tests.runtime.test_spmd import compiled

pytestmark = pytest.mark.devices

MESHES = [(8,), (2, 4), (2, 2, 2), (3,)]
ROWS, WIDTH = 24, 48


class Sums:
    """A sum of terms drawn at random: products, sums over a dim, scattered rows, and what is no sum at all."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.terms = rng.integers(len(TERMS), size=rng.integers(3, 6)).tolist()
        self.nested, self.at_once = (rng.random(2) < 0.5).tolist()

    def __call__(self, x, w):
        *front, last = [TERMS[term](x * (i + 1), w) for i, term in enumerate(self.terms)]
        total = sum(front[1:], front[0]) + (last + front[0] if self.nested else last)
        return jnp.sum(total, axis=0) / ROWS if self.at_once else jnp.sin(total)


TERMS = [
    lambda x, w: x @ w,
    lambda x, w: (w.T @ x.T).T,
    lambda x, w: (x @ w).reshape(ROWS, 4, -1).reshape(ROWS, WIDTH),
    lambda x, w: jnp.sum(x[:, :, None] * w[None], axis=1),
    lambda x, w: jnp.zeros_like(x).at[jnp.arange(ROWS) * 5 % ROWS].add(x),
    lambda x, w: jnp.tanh(x),
    lambda x, w: ((x / 4).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32),
]


def joined_plan(function, args, shape, seed):
    """A plan drawn at random but for this: what can join another sum is held like it, where it can be."""
    task = Task(trace(function, *args), mw.Auto(), folding=False)
    view = View(task.formulate(Mesh.abstract(shape, alpha=0.0, beta=1e-9)), None)
    rng, formulation = np.random.default_rng(seed), view.formulation
    choice = np.array([rng.integers(len(cost)) for cost in formulation.costs])
    for key in sorted(formulation.edges, key=lambda key: -key[2]):  # readers' own sums join others, later on
        saved = formulation.joined_s(*key)
        if saved is not None:
            pairs = np.argwhere(saved > 0)
            if len(pairs) and not (saved[:, choice[key[2]]] > 0).any():
                choice[key[2]] = pairs[rng.integers(len(pairs)), 1]
            fitting = np.flatnonzero(saved[:, choice[key[2]]] > 0)
            if len(fitting) and rng.random() < 0.8:
                choice[key[0]] = fitting[rng.integers(len(fitting))]
    drawn = Solution(Status.FEASIBLE, choice, 0.0, 0.0, 0.0)
    return task._read_back(ViewState(view, latest=drawn, free=drawn), [], Budget(0.0))


@pytest.mark.parametrize("seed", range(12))
def test_sums_that_join_others_are_those_of_one_device(seed):
    function = Sums(seed)
    args = normal(ROWS, WIDTH), normal(WIDTH, WIDTH, seed=1, scale=1 / 8)
    plan = joined_plan(function, args, MESHES[seed % len(MESHES)], seed)
    got = compiled(spmd(plan, function), *args)(*args)
    tolerance = 0.05 if 6 in function.terms else 2e-4  # parts of a product in bfloat16 are rounded
    np.testing.assert_allclose(np.asarray(got), np.asarray(jax.jit(function)(*args)), rtol=tolerance, atol=tolerance)


def test_the_programs_drawn_do_join():
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((ROWS, WIDTH), (WIDTH, WIDTH))]
    plans = [joined_plan(Sums(seed), args, MESHES[seed % len(MESHES)], seed) for seed in range(12)]
    assert sum(bool(plan.details.back.joined) for plan in plans) >= 8
    assert all(op.waits for plan in plans for op in plan.ops if op.serial in waiting(plan))


def waiting(plan):
    """The serial numbers of what joins, and of where it does."""
    ops = plan.details.back.graph.ops
    return {ops[index].serial for pair in plan.details.back.joined.items() for index in pair}


@pytest.mark.sweep(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [("llama-tiny", {"layers": 1}), ("gpt-tiny", {"scan": True}), ("llama-tiny", {"checkpoint": True})],
    ids=str,
)
def test_xla_sends_and_holds_what_was_planned(name, options):
    example = mw.zoo.build(name, **{"batch": 16, "layers": 2, "dtype": "float32"} | options)
    mesh = mw.cluster("1x8 cpu").mesh((2, 4))
    plan = mw.plan(example.train_step, example.state, example.batch, mesh=mesh, method=mw.TensorParallel())
    assert plan.details.back.joined
    found = plan.verify(compiler_options=QUICK)
    planned, made = (
        sum(getattr(pair, side) for pair in found.collectives.values()) for side in ("planned", "compiled")
    )
    assert made == pytest.approx(planned, rel=0.01)
    assert is_close(found.memory)


def test_what_sums_over_two_axes_reads_a_sum_that_waited():
    def function(x, w, v):
        return jnp.sum(x @ w + x @ v, axis=0)

    args = [normal(*shape, seed=i) for i, shape in enumerate([(ROWS, WIDTH), *[(WIDTH, WIDTH)] * 2])]
    fix = {"x": P(("x", "y"), "z"), "w": P("z"), "v": P("z"), "out": P()}
    mesh = Mesh.abstract((2, 2, 2), alpha=1.0, beta=(1.0, 1.0, 0.01))
    plan = mw.plan(function, *args, mesh=mesh, method=mw.Manual(fix))
    assert [(op.sums, op.waits) for op in plan.ops][-2:] == [((), ("z",)), (("x", "y"), ())]
    np.testing.assert_allclose(compiled(spmd(plan, function), *args)(*args), jax.jit(function)(*args), rtol=2e-4)


def test_loops_read_sums_that_are_settled():
    def function(x, w, v):
        total = x @ w + x @ v
        _, rows = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + total), (0, jnp.zeros_like(total)))
        return jax.lax.scan(lambda c, _: (c * 0.5 + total, None), rows, None, length=2)[0]

    args = [normal(*shape, seed=i) for i, shape in enumerate([(ROWS, WIDTH), *[(WIDTH, WIDTH)] * 2])]
    fix = {"x": P(None, "x"), "w": P("x"), "v": P("x"), "out": P()}
    plan = mw.plan(function, *args, mesh=Mesh.abstract((4,), alpha=1.0, beta=1.0), method=mw.Manual(fix))
    assert plan.details.back.joined
    assert sum(c.bytes * c.trips for c in plan.collectives if c.purpose == "activation") == ROWS * WIDTH * 4
    found = plan.verify(compiler_options=QUICK)
    assert found.bytes.compiled == pytest.approx(found.bytes.planned, rel=0.01)
    np.testing.assert_allclose(
        compiled(spmd(plan, function), *args)(*args), jax.jit(function)(*args), rtol=2e-4, atol=1e-4
    )


def wrapping(x, w):
    """Products of bytes wrap around before they are widened."""
    x, w = (jnp.abs(v * 100).astype(jnp.uint8) for v in (x, w))
    return (x @ w).astype(jnp.int32) + (x @ (w + 1)).astype(jnp.int32)


def in_a_loop(x, w):
    def body(carry, scale):
        return carry + (x * scale @ w).astype(jnp.int32), None

    return jax.lax.scan(body, jnp.zeros((ROWS, WIDTH), jnp.int32), jnp.arange(1.0, 5.0))[0]


NOT_LINEAR = {
    "truncated": lambda x, w: (x @ w).astype(jnp.int32) + (x @ (2 * w)).astype(jnp.int32),
    "to whole numbers and back": lambda x, w: (x @ w).astype(jnp.int8).astype(jnp.float32) + x @ w,
    "to truth": lambda x, w: (x @ w > 0).astype(jnp.float32) + (x @ w).astype(jnp.bool_).astype(jnp.float32) + x @ w,
    "wrapping": wrapping,
    "in a loop": in_a_loop,
    "overflowing": lambda x, w: (1e5 * x @ w).astype(jnp.float16).astype(jnp.float32) + x @ w,
}


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_sums_are_not_joined_across_what_is_not_linear(name):
    function = NOT_LINEAR[name]
    # Multiples of 1/4 are summed exactly in any order.
    x, w = (np.round(4 * np.asarray(normal(*s, seed=i))) / 4 for i, s in enumerate(((ROWS, WIDTH), (WIDTH, WIDTH))))
    expected = np.asarray(jax.jit(function)(x, w))
    split = mw.Auto(fix={"x": P(None, "x"), "w": P("x")})
    for plan in (
        joined_plan(function, (x, w), (4,), 0),
        mw.plan(function, x, w, mesh=Mesh.abstract((4,), 0.0, 1e-9), method=split),
    ):
        np.testing.assert_array_equal(np.asarray(compiled(spmd(plan, function), x, w)(x, w)), expected)


def test_a_sum_over_two_axes_may_have_no_elements():
    x = np.zeros((8, 0), np.float32)
    mesh, method = Mesh.abstract((2, 2), alpha=0.0, beta=1e-9), mw.Manual({"x": P(("x", "y"))})
    plan = mw.plan(lambda x: x.sum(0), x, mesh=mesh, method=method)
    assert any(len(op.sums) == 2 for op in plan.ops)  # or this tests nothing
    assert spmd(plan, lambda x: x.sum(0))(x).shape == (0,)
