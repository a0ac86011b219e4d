"""Look-ups at counted indices become look-ups row by row, and compute the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import meshwright as mw
from meshwright.graph.tracing.counted_indices import pair_counted_indices
from tests.runtime.microbatches.cutting import in_parts

RNG = np.random.default_rng(0)
TABLE, DEEP = RNG.normal(size=(8, 8)).astype("f4"), RNG.normal(size=(8, 3, 5)).astype("f4")
LABELS, MANY = RNG.integers(-9, 12, 8), RNG.integers(-6, 9, (8, 3))
COUNT, POSITION = jnp.arange, lambda: (jnp.arange(8)[:, None], jnp.arange(3)[None])


def at(x, *columns):
    """The elements of a table of three dims at index vectors, which are clipped."""
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1, 2), (0, 1, 2))
    return jax.lax.gather(x, jnp.concatenate(columns, 1), numbers, (1, 1, 1), mode="clip")


PAIRED = {
    "labels": (lambda x, y: x[COUNT(8), y], TABLE, LABELS),
    "a gradient": (jax.grad(lambda x, y: (x[COUNT(8), y] ** 2).sum()), TABLE, LABELS),
    "two dims": (lambda x, y: x[*POSITION(), y], DEEP, MANY),
    "a gradient of two dims": (jax.grad(lambda x, y: (x[*POSITION(), y] ** 2).sum()), DEEP, MANY),
    "rows of a window": (lambda x, y: x[COUNT(8), y % 3], DEEP, LABELS),
    "columns": (lambda x, y: x[y % 8, COUNT(8)], TABLE, LABELS),
    "a diagonal": (lambda x, y: x[COUNT(8), COUNT(8)], TABLE, LABELS),
    "written": (lambda x, y: x.at[COUNT(8), y].set(7.0), TABLE, LABELS),
    "added": (lambda x, y: x.at[COUNT(8), y].add(x[:, 0]), TABLE, LABELS),
    "filled": (lambda x, y: x.at[COUNT(8), y].get(mode="fill", fill_value=3.0), TABLE, LABELS),
    "clipped": (lambda x, y: x.at[COUNT(8), y].get(mode="clip"), TABLE, LABELS),
    "counted by NumPy": (lambda x, y: x[np.arange(8), y], TABLE, LABELS),
    "counted outside of a call": (lambda x, y: jax.jit(lambda x, i, y: x[i, y])(x, COUNT(8), y), TABLE, LABELS),
    "checkpointed": (jax.grad(jax.checkpoint(lambda x, y: (x[COUNT(8), y] ** 2).sum())), TABLE, LABELS),
    "in a loop": (lambda x, y: jax.lax.map(lambda i: x[COUNT(8), y + i], COUNT(3)), TABLE, LABELS),
    "in a branch": (lambda x, y: jax.lax.cond(y[0] > 0, lambda: x[COUNT(8), y], lambda: x[:, 0]), TABLE, LABELS),
    "beside a solver": (lambda x, y: jnp.linalg.inv(x)[COUNT(8), y], TABLE, LABELS),
    "mapped": (jax.vmap(lambda x, y: x[COUNT(3), y]), DEEP, MANY),
    "along the other dim": (lambda x, y: x[COUNT(3)[None], y[:, None], 0], DEEP[:3], LABELS % 3),
}
LONG = RNG.normal(size=(300, 8)).astype("f4")
OTHERS = {
    "one row": (lambda x, y: x[COUNT(1), y], TABLE, LABELS),
    "numbers that overflow": (lambda x, y: x[COUNT(300).astype("int8").astype(int), y], LONG, RNG.integers(0, 8, 300)),
    "numbers that round": (lambda x, y: x[COUNT(300, dtype="bfloat16").astype(int), y], LONG, RNG.integers(0, 8, 300)),
    "two columns at once": (lambda x, y: at(x, jnp.broadcast_to(COUNT(8)[:, None], (8, 2)), y[:, None]), DEEP, LABELS),
    "remainders": (lambda x, y: x[COUNT(8) % 7, y], TABLE, LABELS),
    "backwards": (lambda x, y: x[COUNT(8)[::-1], y], TABLE, LABELS),
    "some rows": (lambda x, y: x[COUNT(5), y[:5]], TABLE, LABELS),
    "from one on": (lambda x, y: x[COUNT(8) + 1, y], TABLE, LABELS),
    "doubled": (lambda x, y: x[2 * COUNT(8), y], TABLE, LABELS),
}


@pytest.mark.sweep(10)
@pytest.mark.parametrize("name", [*PAIRED, *OTHERS])
def test_a_program_computes_the_same_row_by_row(name):
    function, *args = (PAIRED | OTHERS)[name]
    args = [jnp.asarray(x) for x in args]
    before = jax.make_jaxpr(function)(*args)
    after = pair_counted_indices(before)
    assert (after is not before) == (name in PAIRED)
    found, expected = jax.jit(jaxpr_as_fun(after))(*args), jax.tree.leaves(jax.jit(function)(*args))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def cross_entropy(w, x, y):
    return -jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), y].mean()


def test_data_parallelism_splits_the_rows():
    types = [
        jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((64, 32), "f4"), ((512, 64), "f4"), ((512,), "i4"))
    ]
    plan = mw.plan(jax.value_and_grad(cross_entropy), *types, cluster="1x8 h100", method="data")
    assert all((c.kind == "all_reduce" and c.phase != "forward") or c.bytes == 4 for c in plan.collectives)


def test_it_can_be_cut_into_microbatches():
    args = (np.ones((4, 6), "f4"), RNG.normal(size=(8, 4)).astype("f4"), LABELS % 6)
    step = jax.value_and_grad(cross_entropy)
    found, expected = jax.jit(in_parts(step, args, (1, 2), 4))(*args), step(*args)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)
