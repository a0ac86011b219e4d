"""Microbatches: the numbers of the whole batch, whatever the step computes; or a word that it cannot be cut."""

import logging
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.runtime.checking.compiled import collectives_of
from meshwright.runtime.microbatches.microbatches import CannotCut
from tests.runtime.microbatches.cutting import in_parts
from tests.runtime.test_spmd import compiled

pytestmark = pytest.mark.devices

BATCH = 16


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def assert_same(one, many, rtol=2e-5):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(many), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=2e-6, err_msg=jax.tree_util.keystr(path))


def cut(function, *args, count=4, batch=(1,)):
    return in_parts(function, args, batch, count)


def check(function, *args, counts=(4,)):
    expected = jax.jit(function)(*args)
    for count in counts:
        assert_same(expected, jax.jit(cut(function, *args, count=count))(*args))


W = {"in": draw(8, 16, seed=1), "out": draw(16, 4, seed=2)}
DATA = {"x": draw(BATCH, 6, 8, seed=3), "y": draw(BATCH, 6, 4, seed=4), "length": np.arange(BATCH) % 6 + 1}


def predict(w, x):
    return jnp.tanh(x @ w["in"]) @ w["out"]


def errors(w, batch):
    return jnp.sum((predict(w, batch["x"]) - batch["y"]) ** 2, axis=-1)


def masked(w, batch):
    mask = jnp.arange(6) < batch["length"][:, None]
    return jnp.sum(jnp.where(mask, errors(w, batch), 0.0)) / jnp.sum(mask)


LOSSES = {
    "a mean": lambda w, batch: jnp.mean(errors(w, batch)),
    "a sum": lambda w, batch: jnp.sum(errors(w, batch)),
    "a mean over what is no padding": masked,
    "a norm": lambda w, batch: jnp.sqrt(jnp.sum(errors(w, batch))) / 7,
    "with decay": lambda w, batch: jnp.mean(errors(w, batch)) + 0.1 * sum(jnp.sum(x**2) for x in jax.tree.leaves(w)),
    "per example": lambda w, batch: jax.vmap(lambda x, y: jnp.mean((predict(w, x) - y) ** 2))(
        batch["x"], batch["y"]
    ).mean(),
    "merged dims": lambda w, batch: jnp.mean((predict(w, batch["x"].reshape(-1, 8)) - batch["y"].reshape(-1, 4)) ** 2),
    "checkpointed": lambda w, batch: jnp.mean(jax.checkpoint(errors)(w, batch)),
    "over a sequence": lambda w, batch: jax.lax.scan(
        lambda total, xy: (total + jnp.mean((predict(w, xy[0]) - xy[1]) ** 2), None),
        0.0,
        (batch["x"].swapaxes(0, 1), batch["y"].swapaxes(0, 1)),
    )[0],
    "one of two branches": lambda w, batch: jnp.mean(
        jax.lax.cond(w["in"][0, 0] > 0, errors, lambda w, batch: jnp.ones((BATCH, 6)) * jnp.arange(6.0), w, batch)
    ),
    "the other branch": lambda w, batch: jax.lax.cond(
        w["in"][0, 0] > 0, lambda w, batch: 0.0, lambda w, batch: jnp.sum(jnp.cos(errors(w, batch))), w, batch
    ),
    "branches in a loop": lambda w, batch: jax.lax.scan(
        lambda x, i: (jax.lax.switch(i, [jnp.sin, jnp.tanh, lambda x: x + jnp.ones(8)], x), None),
        batch["x"] @ w["in"] @ w["in"].T,
        np.arange(3),
    )[0].mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_and_losses_are_those_of_the_whole_batch(name):
    if name == "a norm":  # its gradient at each example is divided by what all of them make
        with pytest.raises(CannotCut, match="needs a value that is known only after the whole batch has run"):
            cut(jax.value_and_grad(LOSSES[name]), W, DATA)
        return
    check(jax.value_and_grad(LOSSES[name]), W, DATA, counts=(2, 8))


def test_metrics_of_all_kinds():
    def step(w, batch):
        found = errors(w, batch)
        return {
            "mean": found.mean(),
            "worst": found.max(),
            "best": found.min(),
            "spread": found.std(),
            "any": jnp.any(found > 10.0),
            "all": jnp.all(found >= 0.0),
            "count": jnp.sum(batch["length"]),
            "perplexity": jnp.exp(found.mean() / 100),
            "each": found,
            "rows": predict(w, batch["x"]).reshape(-1, 4),
            "norm": jnp.sqrt(jnp.sum(w["in"] ** 2)),
            "first": batch["x"],
            "seven": 7,
        }

    check(step, W, DATA)


def test_what_only_gradients_of_metrics_would_need_is_left_out():
    def loss(w, batch):
        found = errors(w, batch)
        return found.mean(), {"worst": found.max(), "norm": jnp.sqrt(jnp.sum(found**2))}

    check(jax.value_and_grad(loss, has_aux=True), W, DATA)


def test_a_whole_step_with_clipping_and_momentum():
    def step(state, batch):
        loss, grads = jax.value_and_grad(LOSSES["a mean"])(state["w"], batch)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g / jnp.maximum(1.0, norm), grads)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, state["m"], grads)
        return {"w": jax.tree.map(jnp.subtract, state["w"], moments), "m": moments}, {"loss": loss, "norm": norm}

    check(step, {"w": W, "m": jax.tree.map(np.zeros_like, W)}, DATA)


def test_embeddings_are_added_up():
    table, ids = draw(10, 4), np.arange(BATCH * 3).reshape(BATCH, 3) % 10

    def step(table, ids):
        return jax.value_and_grad(lambda t: jnp.mean(t[ids] ** 2) + jnp.mean(t[ids[:, 0]] @ t.T))(table)

    check(step, table, ids)


def test_half_precision_is_added_up_in_float32():
    def step(w, batch):
        return jax.grad(lambda w: jnp.sum((batch["x"].astype(jnp.bfloat16) @ w).astype(jnp.float32)))(w)

    w = jnp.asarray(W["in"], jnp.bfloat16)
    jaxpr = jax.make_jaxpr(cut(step, w, DATA))(w, DATA)
    loop = next(e for e in jaxpr.eqns if e.primitive.name in ("scan", "jit") and "scan" in str(e))
    assert "f32[16,8] = add" in str(loop)
    exact = np.asarray(DATA["x"].astype(jnp.bfloat16), np.float64).sum((0, 1))  # the same for every column
    made = np.asarray(cut(step, w, DATA)(w, DATA), np.float32)
    np.testing.assert_allclose(made, np.broadcast_to(exact[:, None], w.shape), rtol=1e-2)


def test_arrays_without_elements_are_cut_and_joined():
    def step(w, batch):
        return jax.grad(lambda w: (batch["x"] @ w).sum())(w), batch["none"] * 2, (batch["none"] * 2).sum(0)

    check(step, draw(8, 0), DATA | {"none": draw(BATCH, 3, 0)})


LOOKED_UP = {
    "indexed": lambda table, ids: table[ids],
    "taken": lambda table, ids: jnp.take(table, ids, axis=0),
    "tied": lambda table, ids: table[ids] @ table.T,
    "pooled": lambda table, ids: jax.ops.segment_sum(table[ids[:, 0]], ids[:, 1], 10),
    "mapped": lambda table, ids: jax.vmap(lambda i: table[i])(ids),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LOOKED_UP)
def test_gradients_of_half_precision_tables_are_added_up_in_float32(name, dtype):
    """The function with which a scatter adds two numbers is one for numbers of its dtype."""
    table, ids = draw(10, 4).astype(dtype), np.arange(BATCH * 3).reshape(BATCH, 3) % 10

    def step(table, ids):
        return jax.value_and_grad(lambda t: jnp.mean(LOOKED_UP[name](t, ids).astype("f4") ** 2))(table)

    found, expected = (jax.jit(run)(table, ids) for run in (cut(step, table, ids), step))
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert_same(*(jax.tree.map(lambda x: x.astype("f4"), made) for made in (expected, found)), rtol=2e-2)


@pytest.mark.parametrize("kind", ["typed", "raw"])
@pytest.mark.parametrize("where", ["plain", "checkpoint", "scan"])
def test_every_part_draws_bits_of_its_own(kind, where):
    key = jax.random.key(5) if kind == "typed" else jax.random.PRNGKey(5)

    def drop(x, key):
        return jnp.where(jax.random.bernoulli(jax.random.fold_in(key, 3), 0.5, x.shape), x, 0.0)

    def layers(x, key):
        return jax.lax.scan(lambda c, k: (drop(c, k) + 1e-9, None), x, jax.random.split(key, 2))[0]

    inner = {"plain": drop, "checkpoint": jax.checkpoint(drop), "scan": layers}[where]

    def step(key, batch):
        kept = inner(batch["x"], key)
        return kept, jax.grad(lambda x: jnp.sum(inner(x, key)))(batch["x"])

    data = {"x": np.ones((BATCH, 50), np.float32)}
    kept, slope = jax.jit(cut(step, key, data))(key, data)
    np.testing.assert_allclose(kept, slope, atol=1e-5)  # the backward pass drops what the forward pass dropped
    rows = {tuple(row) for row in np.asarray(kept > 0.5).tolist()}
    assert len(rows) == BATCH, "no two examples may share a mask"
    share = 0.25 if where == "scan" else 0.5
    assert abs(float((kept > 0.5).mean()) - share) < 0.1
    again, _ = jax.jit(cut(step, key, data))(key, data)
    np.testing.assert_array_equal(kept, again)


def test_noise_that_is_not_drawn_for_examples_is_the_same():
    def step(key, batch):
        w = W["in"] + jax.random.normal(key, W["in"].shape)
        return jnp.mean(batch["x"] @ w)

    check(step, jax.random.key(1), DATA)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (
            lambda w, b: jnp.mean((b["x"] - b["x"].mean(0) @ w["in"] @ w["in"].T) @ w["in"]),
            "needs a value that is known only after the whole batch",
        ),
        (lambda w, b: jnp.mean(b["x"][:, 0] @ w["in"] @ w["in"].T @ b["x"][:, 0].T), "mixes|pairs"),
        (lambda w, b: jnp.cumsum(b["x"] @ w["in"], axis=0).sum(), "mixes examples"),
        (lambda w, b: jnp.sort(b["x"], axis=0), "mixes examples"),
        (lambda w, b: jax.lax.scan(lambda c, x: (c + x @ w["in"], None), jnp.zeros((6, 16)), b["x"])[0], "runs over"),
    ],
)
def test_what_mixes_examples_is_not_cut(function, reason):
    with pytest.raises(CannotCut, match=reason):
        cut(function, W, DATA)


def test_batches_that_cannot_be_cut_are_refused():
    with pytest.raises(mw.ShardingError, match="a batch of 16 does not divide into 3 microbatches"):
        cut(LOSSES["a mean"], W, DATA, count=3)
    with pytest.raises(mw.ShardingError, match="first dims of 4 and 16"):
        cut(LOSSES["a mean"], W, DATA | {"length": DATA["length"][:4]}, count=2)
    with pytest.raises(mw.ShardingError, match="no batch to cut"):
        cut(LOSSES["a mean"], W, DATA, batch=())


def test_a_model_trains_in_microbatches_on_many_devices():
    """A transformer every other layer of which has experts."""
    example = zoo.build("moe-tiny", batch=16, dtype="float32", layers=2)
    step = mw.parallelize(example.train_step, cluster="1x8 cpu", mesh=(2, 4), microbatches=2)
    one, expected = jax.jit(example.train_step)(example.init(0), example.sample(1))
    many, loss = step(example.init(0), example.sample(1))
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_same(one["mu"], many["mu"])


def test_batch_norm_runs_whole_and_says_so(caplog):
    example = zoo.build("wide-resnet-tiny", batch=16, dtype="float32")
    step = mw.parallelize(example.train_step, cluster="1x8 cpu", mesh=(8,), microbatches=2)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        plan = step.plan(example.state, example.batch)
    (remark,) = plan.remarks
    for said in (remark, caplog.text):
        assert "runs its batch whole instead of in 2 microbatches" in said
        assert "vision.py" in said and "batch_norm" in said


def sent(collectives):
    """Bytes by kind and axes; the CPU backend has no reduce-scatter but an all-reduce and a slice, of as many bytes."""
    total = Counter()
    for item in collectives:
        kind = "reduction" if item.kind in ("all_reduce", "reduce_scatter") else item.kind
        total[kind, item.axes] += item.bytes * item.trips
    return total


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("name", "options", "mesh", "method"),
    [
        ("gpt-tiny", {"layers": 1}, (8,), mw.DataParallel()),
        ("gpt-tiny", {"layers": 1}, (8,), mw.Zero(stage=3)),
        ("llama-tiny", {"scan": True}, (2, 4), mw.Auto()),
    ],
    ids=str,
)
def test_gradients_are_brought_together_once_a_step(name, options, mesh, method):
    example = zoo.build(name, batch=64, dtype="float32", **options)
    step = mw.parallelize(example.train_step, cluster="1x8 cpu", mesh=mesh, method=method, microbatches=4)
    plan = step.plan(example.state, example.batch)
    assert {c.trips for c in plan.collectives if c.purpose == "gradient"} == {1.0}
    program = compiled(step, example.state, example.batch)
    planned, made = sent(plan.collectives), sent(collectives_of(program.as_text(), plan.mesh.shape))
    for key in planned.keys() | made.keys():
        assert made[key] == pytest.approx(planned[key], rel=0.1, abs=2e3), key
    gradients = sum(np.prod(p.shape) * 4 for p in jax.tree.leaves(example.state["params"]))
    reduced = sum(size for (kind, _), size in made.items() if kind == "reduction")
    assert reduced < 1.3 * gradients


@pytest.mark.parametrize("mesh", [(8,), (2, 4)], ids=str)
def test_gradients_of_convolutions_are_brought_together_once_a_step(mesh):
    def loss(kernels, batch):
        x = batch["x"]
        for stride, kernel in enumerate(kernels, 1):
            dims = ("NHWC", "HWIO", "NHWC")
            x = jnp.tanh(jax.lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=dims))
        return jnp.mean((x.mean((1, 2)) - batch["y"]) ** 2)

    def step(kernels, batch):
        value, slopes = jax.value_and_grad(loss)(kernels, batch)
        return [k - 0.1 * slope for k, slope in zip(kernels, slopes, strict=True)], value

    kernels = [draw(3, 3, 4, 8, seed=1), draw(3, 3, 8, 8, seed=2)]
    batch = {"x": draw(32, 8, 8, 4, seed=3), "y": draw(32, 8, seed=4)}
    method = mw.DataParallel()
    many = mw.parallelize(step, cluster="1x8 cpu", mesh=mesh, method=method, microbatches=2, donate_argnums=())
    assert_same(jax.jit(step)(kernels, batch), many(kernels, batch))
    plan = many.plan(kernels, batch)
    made = collectives_of(compiled(many, kernels, batch).as_text(), plan.mesh.shape)
    assert {item.kind for item in made} == {"all_reduce"}  # nothing is gathered to be convolved
    assert sent(made) == sent(plan.collectives)
    (gradients,) = (item for item in made if item.trips == 1)  # combined; the loss is a number for each part
    assert gradients.bytes == sum(k.nbytes for k in kernels)


def test_numbers_that_python_reads_stay_numbers():
    def step(state, batch):
        grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(state["w"])
        return {"w": state["w"] - (0.1 if state["rate"] > 0 else 0.0) * grads, "rate": state["rate"]}, grads.sum()

    many = mw.parallelize(step, cluster="1x8 cpu", microbatches=2)
    state, _ = many({"w": jnp.ones((8, 4)), "rate": 0.5}, jnp.ones((8, 8)))
    assert type(state["rate"]) is float
    many(state, jnp.ones((8, 8)))
