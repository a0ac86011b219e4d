"""Recipes: layers are distributed by their work in a whole step."""

from dataclasses import replace
from itertools import combinations, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.pipeline.search.equal_stages import Split

ROWS, WIDTH = 4096, 1024  # so large that products take most of the time


@jax.custom_vjp
def head_loss(x, head, labels):
    return head_forward(x, head, labels)[0]


def head_forward(x, head, labels):
    """The loss and, as losses of large vocabularies do, its gradients along with it."""

    def loss(x, head):
        logits = x @ head
        return (jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]).mean()

    return jax.value_and_grad(loss, (0, 1))(x, head)


def head_backward(gradients, scale):
    return *(scale * g for g in gradients), None


head_loss.defvjp(head_forward, head_backward)


def planned(width_of_head, recipe, scan=False, layers=8):
    """A plan of a network of equal layers with a head whose loss computes gradients in the forward pass."""

    def layer(x, w):
        return x + jax.nn.relu(x @ w), None

    def loss(params, batch):
        x = batch["x"]
        x = jax.lax.scan(layer, x, params["w"])[0] if scan else [x := layer(x, w)[0] for w in params["w"]][-1]
        return head_loss(x, params["head"], batch["y"])

    def train_step(params, batch):
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    matrix = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16)
    stack = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.bfloat16)
    params = {
        "w": stack if scan else [matrix] * layers,
        "head": jax.ShapeDtypeStruct((WIDTH, width_of_head), jnp.bfloat16),
    }
    batch = {
        "x": jax.ShapeDtypeStruct((16 * ROWS, WIDTH), jnp.bfloat16),
        "y": jax.ShapeDtypeStruct((16 * ROWS,), jnp.int32),
    }
    cluster = f"1x{recipe.data * recipe.pipeline} h100"
    return mw.plan(train_step, params, batch, cluster=cluster, method=recipe)


@pytest.mark.parametrize("scan", [False, True])
def test_stages_are_balanced_by_the_work_of_a_whole_step(scan):
    plan = planned(2 * WIDTH, mw.ThreeD(pipeline=2, microbatch=ROWS), scan)
    sizes = [stage.layers[1] - stage.layers[0] for stage in plan.stages]
    assert sizes == [5, 4]  # the head takes as long as two layers
    layer = 6 * 16 * ROWS * WIDTH**2
    first, last = (stage.flops for stage in plan.stages)
    assert abs(first - last) < layer / 2  # the first layer needs no gradient of its input


def test_chunks_have_equally_many_trips_of_a_loop_where_that_costs_nothing():
    plan = planned(WIDTH // 2, mw.ThreeD(pipeline=2, microbatch=ROWS), scan=True)
    assert plan.stages[0].layers == (0, 4)
    work = np.array([1.0, 1, 1, 1, 0.9])
    assert Split(work, (0, 4)).chunks(2, 1)[1].ravel().tolist() == [2, 5]
    assert Split(work + np.eye(5)[4], (0, 4)).chunks(2, 1)[1].ravel().tolist() == [3, 5]


def test_the_busiest_chunk_has_the_least_work():
    draw = np.random.default_rng(0)
    for _ in range(50):
        work = draw.integers(1, 9, draw.integers(3, 9)).astype(float)
        count = int(draw.integers(2, len(work) + 1))
        first, last = Split(work).chunks(count, 1)
        assert first[0, 0] == 0 and last[-1, 0] == len(work) and (first[1:] == last[:-1]).all()
        found = [work[a:b].sum() for a, b in zip(first[:, 0], last[:, 0], strict=True)]
        cuts = combinations(range(1, len(work)), count - 1)
        every = [np.add.reduceat(work, [0, *inside]) for inside in cuts]
        least = min(sums.max() for sums in every)
        assert max(found) == least
        assert np.square(found).sum() == min(np.square(sums).sum() for sums in every if sums.max() == least)


@pytest.mark.parametrize(("data", "share", "sizes"), [(1, 0.99, [6, 3]), (2, 0.98, [6, 3]), (2, 0.8, [5, 4])])
def test_where_memory_is_short_the_quickest_stages_that_fit_are_taken(data, share, sizes):
    """The first stage holds two microbatches, so that balance makes it the tightest one."""
    recipe = mw.ThreeD(pipeline=2, data=data, microbatch=ROWS)
    ample = planned(8 * WIDTH, recipe)
    assert ample.stages[0].layers == (0, 7)
    short = share * ample.memory.peak_bytes / ample.memory.limit_bytes * recipe.memory_fraction
    plan = planned(8 * WIDTH, replace(recipe, memory_fraction=short))
    assert [last - first for first, last in (stage.layers for stage in plan.stages)] == sizes
    assert plan.memory.peak_bytes <= plan.memory.limit_bytes


def test_chunks_that_fit_are_as_even_as_brute_force_finds_them():
    draw = np.random.default_rng(1)
    fitted = 0
    for _ in range(100):
        work = draw.integers(1, 9, draw.integers(3, 9)).astype(float)
        num_stages, num_layers = int(draw.integers(2, len(work) + 1)), len(work)
        fits = draw.random((num_stages, num_layers, num_layers + 1)) < 0.7
        every = [[0, *inside, num_layers] for inside in combinations(range(1, num_layers), num_stages - 1)]
        every = [e for e in every if all(fits[s, a, b] for s, (a, b) in enumerate(pairwise(e)))]
        found = Split(work).fitting_chunks(fits, 1)
        assert (found is None) == (not every)
        if found is not None:
            edges = [0, *found[1].ravel().tolist()]
            assert edges in every
            assert max(loads(work, edges)) == min(max(loads(work, e)) for e in every)
            fitted += 1
    assert 0 < fitted < 100


def loads(work, edges):
    return [work[a:b].sum() for a, b in pairwise(edges)]
