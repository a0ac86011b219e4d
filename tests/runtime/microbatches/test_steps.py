"""Ordinary training steps are cut into microbatches, and what they would keep for the whole batch is not made."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from meshwright.runtime.microbatches.cut_operations import CannotCut
from tests.runtime.microbatches.cutting import in_parts
from tests.runtime.microbatches.test_microbatches import assert_same, draw

pytestmark = pytest.mark.devices

B, T, D = 8, 5, 6
W = {
    "in": draw(D, D, seed=1),
    "out": draw(D, 7, seed=2),
    "table": draw(11, D, seed=3),
    "place": draw(T, D, seed=4),
    "layers": draw(3, D, D, seed=5),
    "kernel": draw(3, 3, 2, 4, seed=6),
}
BATCH = {
    "x": draw(B, T, D, seed=7),
    "ids": np.arange(B * T).reshape(B, T) % 11,
    "label": np.arange(B * T).reshape(B, T) % 7,
    "length": np.arange(B) % T + 1,
    "image": draw(B, 8, 8, 2, seed=8),
}


def cross_entropy(w, b, h):
    return optax.softmax_cross_entropy_with_integer_labels(h @ w["out"], b["label"])


def attention(w, b):
    x = w["table"][b["ids"]] + w["place"] + 0.1 * jnp.arange(T)[:, None]
    scores = jnp.where(jnp.tril(jnp.ones((B, T, T), bool)), jnp.einsum("btd,bsd->bts", x, x), -1e9)
    h = jax.nn.softmax(scores) @ (x @ w["in"])
    h = (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-6)
    return cross_entropy(w, b, h).mean()


def padded(w, b):
    mask = jnp.arange(T) < b["length"][:, None]
    return jnp.where(mask, cross_entropy(w, b, jnp.tanh(b["x"] @ w["in"])), 0).sum() / mask.sum()


def recurrent(w, b):
    def trip(h, x):
        h = jnp.tanh(h @ w["in"] + x)
        return h, h

    _, hs = lax.scan(trip, jnp.zeros((B, D)), b["x"].swapaxes(0, 1))
    return cross_entropy(w, b, hs.swapaxes(0, 1)).mean()


def layered(w, b):
    layer = jax.checkpoint(lambda x, k: (x + jnp.tanh(x @ k[:, :3]) @ k[:3], None))
    return cross_entropy(w, b, lax.scan(layer, b["x"], w["layers"])[0]).mean()


def images(w, b):
    x = jax.nn.relu(
        lax.conv_general_dilated(b["image"], w["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    )
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(B, -1, 2, 2)
    x = (x - x.mean((1, 3), keepdims=True)) / (x.std((1, 3), keepdims=True) + 1e-5)  # groups of features
    return (x.mean(1).reshape(B, 4) @ w["in"][:4, :1]).mean()


def narrow(w, b, dtype=jnp.bfloat16):
    low = jax.tree.map(lambda x: x.astype(dtype), w)
    h = jnp.tanh(b["x"].astype(dtype) @ low["in"]) @ low["out"]
    return optax.softmax_cross_entropy_with_integer_labels(h.astype(jnp.float32), b["label"]).mean()


LOSSES = {f.__name__: f for f in (attention, padded, recurrent, layered, images)}


def trained(loss, optimizer):
    def step(state, batch):
        value, slopes = jax.value_and_grad(loss)(state["w"], batch)
        updates, moments = optimizer.update(slopes, state["moments"], state["w"])
        return {"w": optax.apply_updates(state["w"], updates), "moments": moments}, {"loss": value}

    return step, {"w": W, "moments": optimizer.init(W)}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_of_ordinary_models(name):
    step = jax.value_and_grad(LOSSES[name])
    cut = in_parts(step, (W, BATCH), (1,), 4)
    one, many = jax.jit(lambda w, b: (step(w, b), cut(w, b)))(W, BATCH)
    assert_same(one, many)


def test_gradients_in_bfloat16_are_as_exact_as_it_allows():
    """Those of the whole batch may be less so: XLA of JAX 0.12 sums up products in bfloat16, and adds up no parts."""
    step, exact = jax.value_and_grad(narrow), jax.jit(jax.value_and_grad(partial(narrow, dtype=jnp.float32)))(W, BATCH)
    many = jax.jit(in_parts(step, (W, BATCH), (1,), 4))(W, BATCH)
    for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(many), strict=True):
        assert np.linalg.norm(a - b) <= 0.02 * np.linalg.norm(a)


OPTIMIZERS = {
    "clipped adam": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "several steps": optax.MultiSteps(optax.sgd(0.1), 2),
    "only finite": optax.apply_if_finite(optax.sgd(0.1), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_see_the_whole_gradient(name):
    step, state = trained(padded, OPTIMIZERS[name])
    cut = in_parts(step, (state, BATCH), (1,), 2)
    one, many = jax.jit(lambda s, b: (step(s, b), cut(s, b)))(state, BATCH)
    assert_same(one, many, rtol=1e-4)


def test_gradients_clipped_for_each_example():
    def step(w, b):
        slopes = jax.vmap(jax.grad(lambda k, x: jnp.sum(jnp.tanh(x @ k))), (None, 0))(w["in"], b["x"])
        norms = jnp.sqrt(jnp.sum(slopes**2, (1, 2)))
        return jnp.sum(slopes / jnp.maximum(1.0, norms)[:, None, None], 0), (norms > 1.0).mean()

    cut = in_parts(step, (W, BATCH), (1,), 4)
    assert_same(*jax.jit(lambda w, b: (step(w, b), cut(w, b)))(W, BATCH))


def test_float16_with_a_scaled_loss():
    def step(w, b):
        low = w["in"].astype(jnp.float16)
        slopes = jax.grad(lambda k: 1024.0 * jnp.mean((b["x"].astype(jnp.float16) @ k).astype(jnp.float32) ** 2))(low)
        return slopes.astype(jnp.float32) / 1024.0, jnp.all(jnp.isfinite(slopes))

    cut = in_parts(step, (W, BATCH), (1,), 4)
    assert_same(*jax.jit(lambda w, b: (step(w, b), cut(w, b)))(W, BATCH), rtol=1e-2)


@pytest.mark.parametrize("kind", ["scan", "checkpoint", "cond"])
def test_float16_inside_of_layers_is_added_up_in_float32(kind):
    """A part of the sum overflows where the whole one does not: parts leave the layer as float32."""

    def layer(x, k):
        return x + k, None

    def run(x, ks):
        if kind == "scan":
            return lax.scan(layer, x, ks)[0]
        for k in ks:
            many = {
                "checkpoint": jax.checkpoint(layer),
                "cond": lambda x, k: (lax.cond(k[0] < 9, _sum, _less, x, k), 0),
            }
            x = many[kind](x, k)[0]
        return x

    def step(ks, b):
        return jax.grad(lambda ks: jnp.sum(run(b["x"], ks).astype(jnp.float32) * b["weight"][:, None]))(ks)

    weights = np.repeat(np.float32([4e4, 4e4, -4e4, -3e4]), 2)
    batch = {"x": np.ones((8, 4), np.float16), "weight": weights}
    ks = np.zeros((3, 4), np.float16)
    cut = in_parts(step, (ks, batch), (1,), 4)
    found = jax.jit(cut)(ks, batch)
    assert found.dtype == np.float16
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.full((3, 4), np.float16(2e4)))


def _sum(x, k):
    return x + k


def _less(x, k):
    return x - k


def test_float16_added_up_from_trip_to_trip_is_not_cut():
    def step(k, b):
        trips = lambda k: lax.scan(lambda x, _: (x * k, None), b["x"], None, length=2)[0]  # noqa: E731
        return jax.grad(lambda k: jnp.sum(trips(k).astype(jnp.float32)))(k)

    args = np.zeros(4, np.float16), {"x": np.ones((8, 4), np.float16)}
    with pytest.raises(CannotCut, match="known only after the whole batch"):
        in_parts(step, args, (1,), 4)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_masks_of_all_examples_are_not_kept(checkpointed):
    """What is broadcast or drawn for examples inside of layers is made for each part."""

    def layer(x, given):
        k, key = given
        keep = jax.random.bernoulli(key, 0.5, (B, T, D))
        return jnp.where(keep & jnp.tri(T, D, dtype=bool), jnp.tanh(x @ k), 0.0), None

    layer = jax.checkpoint(layer) if checkpointed else layer

    def step(state, b):
        keys = jax.random.split(state[1], 3)
        return jax.grad(lambda k: jnp.sum(lax.scan(layer, b["x"], (k, keys))[0]))(state[0])

    state = W["layers"], jax.random.key(3)
    text = str(jax.make_jaxpr(in_parts(step, (state, BATCH), (1,), 4))(state, BATCH))
    drawn = re.findall(r"u32\[([\d,]*)\] = threefry2x32 ", text)
    assert drawn and set(drawn) == {f"2,{T},{D}"} and "random_bits" not in text
    assert f"bool[{B},{T},{D}]" not in text and f"bool[3,{B},{T},{D}]" not in text


def test_what_is_printed_is_printed_once(capfd):
    def step(w, b):
        found = jnp.tanh(b["x"] @ w["in"])
        jax.debug.print("mean {} of {}", found.mean(), found.sum((1, 2)).shape)
        return found.sum()

    cut = jax.jit(in_parts(step, (W, BATCH), (1,), 4))
    np.testing.assert_allclose(cut(W, BATCH), step(W, BATCH), rtol=1e-5)
    jax.effects_barrier()
    printed = capfd.readouterr().out.strip().splitlines()
    assert len(printed) == 2 and printed[0][:10] == printed[1][:10]
