"""A step that computes again what a policy does not keep has the numbers of the step as it was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.graph.tracing.call import call_abstractly
from meshwright.runtime.recomputation.layers import layers_of
from meshwright.runtime.recomputation.policies import LEVELS, check_word
from meshwright.runtime.recomputation.recomputed import recomputed
from tests.draws import normal
from tests.generator.train_steps import draw_train_step

pytestmark = pytest.mark.devices

LAYERS, WIDTH = 3, 8
W = {
    "up": normal(LAYERS, WIDTH, 16, seed=1),
    "down": normal(LAYERS, 16, WIDTH, seed=2),
    "inlet": normal(WIDTH, WIDTH),
    "head": normal(WIDTH, 4),
}
X = normal(4, 5, WIDTH, seed=3)


def layer(x, w):
    y = x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", y @ w["up"], y @ w["up"]))
    return x + jax.nn.silu(scores @ y @ w["up"]) @ w["down"]


def of_layer(w, i):
    return {"up": w["up"][i], "down": w["down"][i]}


def stack(w):
    return {"up": w["up"], "down": w["down"]}


def unrolled(one):
    def loss(w, x):
        x = x @ w["inlet"]
        for i in range(LAYERS):
            x = one(x, of_layer(w, i))
        return jnp.mean((x @ w["head"]) ** 2)

    return loss


def scanned(one):
    def loss(w, x):
        x, _ = jax.lax.scan(lambda x, own: (one(x, own), jnp.mean(x)), x @ w["inlet"], stack(w))
        return jnp.mean((x @ w["head"]) ** 2)

    return loss


def accumulated(one):
    """The gradient of the user's own microbatches."""
    loss = scanned(one)

    def step(w, x):
        def add(total, part):
            value, grads = jax.value_and_grad(loss)(w, part[None])
            return jax.tree.map(jnp.add, total, grads), value

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, w), x)

    return step


STEPS = {
    "unrolled": jax.value_and_grad(unrolled(layer)),
    "unrolled, with checkpoints": jax.value_and_grad(unrolled(jax.checkpoint(layer))),
    "scanned": jax.value_and_grad(scanned(layer)),
    "scanned, with checkpoints": jax.value_and_grad(scanned(jax.checkpoint(layer))),
    "scanned, accumulated": accumulated(layer),
}


def count(program, name):
    return sum(operation.name == name for operation in program.walk())


def program_of(function, args):
    return call_abstractly(function, args).program


def run(program, args):
    return jax.jit(program.run)(jax.tree.leaves(args))


def assert_same(expected, found):
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5 * abs(a).max())


@pytest.mark.sweep(2)
@pytest.mark.parametrize("name", STEPS)
def test_numbers_are_those_of_the_step_as_written_and_work_is_added_as_the_policy_says(name):
    program = program_of(STEPS[name], (W, X))
    expected = run(program, (W, X))
    products = {}
    for word in LEVELS[:4]:
        new = recomputed(program, word).program
        products[word] = count(new, "dot_general")
        assert_same(expected, run(new, (W, X)))
        assert any(one.is_checkpoint for one in new.walk()) == (word != "none")
    each = 1 if "scanned" in name else LAYERS
    # Of the products of a layer the last one is not read by the backward pass. Scores are products of activations.
    assert products["selective"] - products["none"] == 2 * each
    assert products["full"] - products["none"] == 5 * each
    assert products["none"] < products["selective"] < products["alternate"] < products["full"]


def test_every_second_layer():
    program = program_of(STEPS["unrolled"], (W, X))
    products = [count(recomputed(program, word).program, "dot_general") for word in ("none", "full:1/3", "full:2/3")]
    assert np.diff(products).tolist() == [5, 5]


@pytest.mark.sweep(3)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("word", ["offload", "keep 3 offload 7"])
def test_what_goes_to_the_host_comes_back_for_the_same_numbers(name, word):
    program = program_of(STEPS[name], (W, X))
    new = recomputed(program, word).program
    assert_same(run(program, (W, X)), run(new, (W, X)))
    copies = [one for one in new.walk() if one.name == "device_put"]
    away = [one for one in copies if jax_compat.is_on_host(one.equation.outvars[0].aval)]
    assert away and len(copies) == 2 * len(away)


def test_inputs_of_layers_are_read_from_the_host_by_their_own_backward_pass():
    program = recomputed(program_of(STEPS["unrolled"], (W, X)), "offload").program
    away = {one.outputs[0]: one.inputs[0] for one in program.operations if one.name == "device_put"}
    assert len(away) == LAYERS - 1  # the first reads what is in no layer
    backward = layers_of(program).backward
    for copy, value in away.items():
        readers = [n for n, one in enumerate(program.operations) if backward[n] and value in one.inputs]
        fetches = [one for one in program.operations if copy in one.inputs]
        assert not readers and len(fetches) == 1


def test_a_checkpoint_that_keeps_products_is_no_law():
    policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    written = jax.value_and_grad(unrolled(jax.checkpoint(layer, policy=policy)))
    program, plain = program_of(written, (W, X)), program_of(STEPS["unrolled"], (W, X))
    for word in ("none", "full"):
        found, wanted = (recomputed(one, word).program for one in (program, plain))
        assert count(found, "dot_general") == count(wanted, "dot_general")


def test_what_prints_does_so_once():
    def loud(x, w):
        jax.debug.print("sum {}", jnp.sum(x))
        return layer(x, w)

    full = recomputed(program_of(jax.value_and_grad(unrolled(loud)), (W, X)), "full").program
    assert sum(bool(one.equation.effects) for one in full.walk()) == LAYERS


@jax.custom_vjp
def held_back(x):
    return jnp.sin(x)


held_back.defvjp(lambda x: (jnp.sin(x), (x, jnp.cos(x))), lambda kept, g: (jnp.clip(g, -0.1, 0.1) * kept[1],))


def told(note, x, w, key):
    """A layer with dropout, a derivative of its own and something that is noted."""
    jax.debug.callback(note, jnp.sum(x))
    x = layer(held_back(x), w)
    key, other = jax.random.split(key)
    dropped = jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
    return jnp.tanh(dropped + 0.1 * jax.random.normal(other, x.shape))


@pytest.mark.sweep(1)
@pytest.mark.parametrize("in_loop", [False, True])
def test_random_numbers_are_drawn_again_and_what_is_noted_is_noted_once(in_loop):
    noted = []

    def loss(w, x, key):
        def one(carry, own):
            x, key = carry
            key, this = jax.random.split(key)
            return (told(lambda value: noted.append(round(float(value), 3)), x, own, this), key), None

        carry = x @ w["inlet"], key
        if in_loop:
            carry, _ = jax.lax.scan(one, carry, stack(w))
        else:
            for i in range(LAYERS):
                carry, _ = one(carry, of_layer(w, i))
        return jnp.mean((carry[0] @ w["head"]) ** 2)

    with jax.enable_x64(True):  # three layers make much of a rounding in float32
        args = (*jax.tree.map(lambda leaf: leaf.astype(jnp.float64), (W, X)), jax.random.key(3))
        program = program_of(jax.value_and_grad(loss), args)
        expected = run(program, args)
        jax.effects_barrier()
        first = sorted(noted)
        assert len(first) == LAYERS
        for word in ("full", "offload"):
            noted.clear()
            assert_same(expected, run(recomputed(program, word).program, args))
            jax.effects_barrier()
            assert sorted(noted) == first


def test_a_forward_pass_stays_as_it_is():
    program = program_of(unrolled(jax.checkpoint(layer)), (W, X))
    assert recomputed(program, "full").program is program


@pytest.mark.parametrize("seed", [1, 4])
def test_random_train_steps(seed):
    drawn = draw_train_step(seed)
    state = drawn.init(jax.random.key(0))
    program = program_of(drawn.step, (state, drawn.batch))
    expected = run(program, (state, drawn.batch))
    for word in ("none", "full"):
        found = run(recomputed(program, word).program, (state, drawn.batch))
        for a, b in zip(expected, found, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4, err_msg=drawn.words)


@pytest.mark.parametrize(
    ("word", "said"),
    [("selectiv", "did you mean 'selective'?"), ("full:0", "above 0 and at most 1"), (3, "give one of 'auto'")],
)
def test_an_unknown_policy_is_refused_and_the_nearest_named(word, said):
    with pytest.raises(ShardingError, match=said):
        check_word(word)
