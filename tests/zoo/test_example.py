"""The contract of every family, shown on its tiny member: it runs, and scan and checkpoint change nothing."""

import doctest
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright import zoo
from tests.compiling import QUICK

pytestmark = pytest.mark.slow

TINY = ["mlp", *(name for name in zoo.names() if name.endswith("-tiny"))]
SCANNED = [name for name in TINY if zoo.entry(name).family not in ("wide_resnet", "unet")]


def build(name, **options):
    """Builds a tiny model in float32, so that results can be compared to rounding, and as shallow as it can be."""
    layers = 2 if name in ("moe-tiny", "deepseek-tiny") else 1
    return zoo.build(name, **{"batch": 4, "dtype": "float32", "layers": layers} | options)


def compiled(function, *args):
    return jax.jit(function).lower(*args).compile(compiler_options=QUICK)


def run(function, *args):
    return compiled(function, *args)(*args)


def clipped(grads):
    norm = math.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: np.asarray(g) * min(1.0, 1 / norm), grads)


# Each way in which layers are recomputed: one after another, with a second value beside the activation, with an
# argument that is no array, and in a loop. All families call the same function for it.
RECOMPUTED = [("mlp", False), ("moe-tiny", False), ("wide-resnet-tiny", False), ("llama-tiny", True)]


def lowers_the_loss(step, state, batch, loss):
    """Whether a step from a state that was reached with this loss has a smaller one."""
    state, later = step(state, batch)
    return math.isfinite(loss) and later < loss and state["step"] == 2


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", [name for name in TINY if (name, False) not in RECOMPUTED])
def test_steps_lower_the_loss(name):
    example = build(name)
    state, batch = example.init(0), example.sample(1)
    step = compiled(example.train_step, state, batch)
    state, loss = step(state, batch)
    assert lowers_the_loss(step, state, batch, loss)


@pytest.mark.sweep(2)
@pytest.mark.parametrize(("name", "scan"), RECOMPUTED)
def test_steps_lower_the_loss_and_checkpoint_changes_nothing(name, scan):
    example = build(name, scan=scan)
    state, batch = example.init(0), example.sample(1)
    recomputed = jax.value_and_grad(build(name, scan=scan, checkpoint=True).loss)
    same_loss, grads = run(recomputed, state["params"], batch)

    step = compiled(example.train_step, state, batch)
    state, loss = step(state, batch)
    np.testing.assert_allclose(same_loss, loss, rtol=1e-6)
    # After one step the first moment is (1 - beta1) times the gradient, as it was after clipping.
    grads = grads if name == "mlp" else clipped(grads)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(grads))
    check = partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5 * scale)
    jax.tree.map(lambda mu, g: check(np.asarray(mu) / 0.1, g), state["mu"], grads)

    assert lowers_the_loss(step, state, batch, loss)


def test_steps_lower_the_loss_in_bfloat16():
    example = build("gpt-tiny", dtype="bfloat16")
    state, batch = example.init(0), example.sample(1)
    step = compiled(example.train_step, state, batch)
    state, loss = step(state, batch)
    assert lowers_the_loss(step, state, batch, loss)


@pytest.mark.parametrize("name", TINY)
def test_shapes_foretell_the_arrays(name):
    example = build(name)
    for foretold, real in (
        (example.state["params"], example.init(0)["params"]),
        (example.batch, example.sample(1)),
        (example.state, jax.eval_shape(example.train_step, example.state, example.batch)[0]),
    ):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), foretold) == jax.tree.map(lambda x: (x.shape, x.dtype), real)


def test_a_jax_key_draws_the_same_weights_stacked_or_not():
    key = jax.random.key(0)
    unrolled, scanned = (run(zoo.build("mlp", layers=2, scan=scan).init, key)["params"]["layers"] for scan in (0, 1))
    for i, layer in enumerate(unrolled):
        np.testing.assert_array_equal(layer["kernel"], scanned["kernel"][i])


@pytest.mark.parametrize("name", TINY)
def test_state_is_float32_and_moments_mirror_parameters(name):
    state = zoo.build(name).state
    assert set(state) == {"params", "mu", "nu", "step"}
    assert state["params"] == state["mu"] == state["nu"]
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {jnp.dtype("float32")}
    assert state["step"].dtype == jnp.int32


@pytest.mark.sweep(4)
@pytest.mark.parametrize("name", SCANNED)
def test_scanned_layers_give_the_loss_of_unrolled_ones(name):
    losses = []
    for scan in (False, True):
        example = build(name, layers=3 if name == "gemma-tiny" else 2, scan=scan)  # a period of two, and one more
        assert isinstance(example.state["params"]["layers"], dict) == scan
        losses.append(run(example.loss, example.init(0)["params"], example.sample(1)))
    np.testing.assert_allclose(*losses, rtol=1e-6)


@pytest.mark.parametrize("name", TINY)
def test_checkpoint_is_in_the_program(name):
    example = build(name, checkpoint=True, **({"layers": 2} if name == "mlp" else {}))
    assert "remat" in str(jax.make_jaxpr(example.loss)(example.state["params"], example.batch))


@pytest.mark.parametrize(("checkpoint", "count"), [("full", 4), ("full:1/2", 2), ("full:3/4", 3), ("none", 0)])
def test_a_part_of_the_layers_can_be_checkpointed(checkpoint, count):
    example = build("gpt-tiny", layers=4, checkpoint=checkpoint)
    program = jax.make_jaxpr(example.loss)(example.state["params"], example.batch)
    assert str(program).count("policy=") == count


def test_heads_of_a_gpt_can_share_keys_and_values():
    """Equal to a GPT whose heads all have their own, where those of a group are equal."""
    shared = build("gpt-tiny", heads=4, kv_heads=2, ffn=24)
    params, batch = shared.init(0)["params"], shared.sample(1)
    layer = params["layers"][0]
    assert layer["k"].shape[1] == 2 and layer["up"].shape[1] == 24
    repeated = {name: np.repeat(layer[name], 2, axis=layer[name].ndim - 2) for name in ("k", "v", "k_bias", "v_bias")}
    apart = build("gpt-tiny", heads=4, ffn=24)
    whole = params | {"layers": [layer | repeated]}
    np.testing.assert_allclose(run(shared.loss, params, batch), run(apart.loss, whole, batch), rtol=1e-6)


@pytest.mark.parametrize("scan", [False, True])
def test_dropout_draws_from_the_key_of_the_batch(scan):
    example = build("gpt-tiny", dropout=0.5, scan=scan)
    params, batch = example.init(0)["params"], example.sample(1)
    loss = compiled(example.loss, params, batch)
    other = batch | {"key": batch["key"] + 1}
    assert loss(params, batch) == loss(params, batch) != loss(params, other)


def test_paths_of_llama():
    example = zoo.build("llama2-13b", batch=200, seq=2048)
    layer = example.state["params"]["layers"][3]
    assert set(layer) == {"q", "k", "v", "o", "gate", "up", "down", "attn_norm", "mlp_norm"}
    assert (layer["q"].shape, layer["o"].shape) == ((5120, 40, 128), (40, 128, 5120))
    assert example.batch["tokens"].shape == (200, 2048)
    assert len(example.state["params"]["layers"]) == 40


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "gpt-tiny",
            {"hiden": 3},
            r"'gpt-tiny' has no option 'hiden'; its options are activation, attention, dropout, dtype, epsilon",
        ),
        ("unet-tiny", {"scan": True}, r"'unet-tiny' cannot be scanned"),
        ("mlp", {"batch": 0}, r"batch=0 must be a positive whole number"),
        ("mlp", {"layers": 1.5}, r"layers=1\.5 must be a positive whole number"),
        ("gpt2-125m", {"seq": 2048}, r"seq=2048 is longer than the 1024 positions of 'gpt2-125m'"),
        ("llama-tiny", {"heads": 5}, r"hidden=64 of 'llama-tiny' is no multiple of heads=5"),
        ("moe-tiny", {"layers": 3}, r"layers=3 must be even"),
        ("deepseek-tiny", {"layers": 1}, r"layers=1 must be above dense_layers=1"),
        (
            "llama-tiny",
            {"checkpoint": "some"},
            r"checkpoint='some' is none of 'none', 'selective', 'alternate', 'full'",
        ),
        ("llama-tiny", {"checkpoint": "full:3/2"}, r"checkpoint='full:3/2' names no part of the layers; write it as"),
        ("llama-tiny", {"checkpoint": "full:half"}, r"checkpoint='full:half' names no part of the layers"),
        ("llama-tiny", {"checkpoint": "full:1/2", "scan": True}, r"'full:1/2' is of a part of the layers.*scan=True"),
        ("unet-tiny", {"checkpoint": "full:1/2"}, r"'full:1/2' is of a part of the layers"),
        ("llama-tiny", {"attention": "flash"}, r"attention='flash' is none of 'fused', 'plain'"),
        ("llama-tiny", {"loss_chunks": 5}, r"loss_chunks=5 does not divide seq=32"),
        ("mamba-tiny", {"seq": 12}, r"seq=12 is no multiple of chunk=8"),
    ],
)
def test_bad_options_are_named(name, options, message):
    with pytest.raises(zoo.ZooError, match=message):
        zoo.build(name, **options)


def test_examples_in_docstrings_run():
    for module in (zoo, __import__("meshwright.zoo.example").zoo.example):
        assert doctest.testmod(module).failed == 0
