"""Layers: where a forward pass is cut, and where backward work, updates and arguments go."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.errors import ShardingError
from tests.pipeline.models import flops_by_layer, layers_of, mlp

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "options"), [("llama-tiny", {}), ("bert-tiny", {}), ("gpt-tiny", {"dropout": 0.1})])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_a_transformer_is_cut_where_one_activation_crosses(name, options, checkpoint):
    example = zoo.build(name, batch=8, layers=5, checkpoint=checkpoint, **options)
    flow, layers = layers_of(example.train_step, example.state, example.batch)
    assert 5 <= layers.num_layers <= 6  # the head may be one of its own
    assert layers.crossing_bytes[1:5] == pytest.approx(layers.crossing_bytes[1], rel=0.01)  # but for random keys
    forward, backward = (flops_by_layer(flow, layers, phase) for phase in (0, 1))
    assert np.allclose(forward[1:4], forward[1])
    ratio = backward[1] / forward[1]
    assert (2.5 if checkpoint else 1.9) < ratio < (3.1 if checkpoint else 2.1)
    assert np.allclose(backward[1:4], backward[1])
    assert forward.sum() + backward.sum() == pytest.approx(flow.flops.sum())


@pytest.mark.parametrize("checkpoint", [False, True])
def test_the_trips_of_a_scan_are_layers(checkpoint):
    example = zoo.build("llama-tiny", batch=8, layers=6, scan=True, checkpoint=checkpoint)
    flow, layers = layers_of(example.train_step, example.state, example.batch)
    assert 6 <= layers.num_layers <= 7
    unrolled = zoo.build("llama-tiny", batch=8, layers=6, checkpoint=checkpoint)
    other, expected = layers_of(unrolled.train_step, unrolled.state, unrolled.batch)
    for phase in (0, 1):
        found, wanted = flops_by_layer(flow, layers, phase), flops_by_layer(other, expected, phase)
        assert found[1:5] == pytest.approx(wanted[1:5])
    assert layers.crossing_bytes[1:5] == pytest.approx(expected.crossing_bytes[1:5])


def test_the_trips_of_a_loop_over_tokens_are_no_layers():
    example = zoo.build("gpt-tiny", batch=16, layers=2, loss_chunks=2)
    flow, _ = layers_of(example.train_step, example.state, example.batch)
    assert flow.graph.loops
    assert flow.loops == ()


def test_a_head_that_outweighs_the_layers_asks_for_no_more_cuts_than_there_are():
    example = zoo.build("gpt3-1.3b", batch=4, layers=2)
    _, layers = layers_of(example.train_step, example.state, example.batch)
    assert 1 < layers.num_layers <= 3


def test_weights_and_their_state_lie_with_their_layer():
    step, args = mlp(layers=4, optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    flow, layers = layers_of(step, *args)
    assert layers.num_layers == 4
    for path, value in zip(flow.graph.input_paths, flow.graph.inputs, strict=True):
        number = path.rsplit("/", 1)[-1]
        if number.isdecimal() and flow.graph.types[value].shape:
            units = layers.places.arguments[value]
            assert [int(layers.first[u]) for u in units] == [int(number)], path
    update = flow.graph.columns.phase == 2
    assert set(layers.first[layers.places.unit[update]]) == {0, 1, 2, 3}


def test_a_tied_weight_has_an_owner_and_another_reader():
    example = zoo.build("gpt-tiny", batch=8, layers=4)
    flow, layers = layers_of(example.train_step, example.state, example.batch)
    at = flow.graph.input_paths.index("state/params/embed")
    units = layers.places.arguments[flow.graph.inputs[at]]
    assert {int(layers.first[u]) for u in units} == {0, layers.num_layers - 1}


def test_a_residual_that_skips_layers_crosses_every_cut():
    kept = {}

    def body(i, w, x):
        if i == 0:
            kept["x"] = x = jnp.tanh(x @ w)
        elif i == 3:
            return jnp.tanh(x @ w) + kept["x"]
        return jnp.tanh(x @ w)

    plain = layers_of(*mlp_args(mlp(layers=4)))[1]
    flow, layers = layers_of(*mlp_args(mlp(layers=4, body=body)))
    assert layers.crossing_bytes[2] == 2 * plain.crossing_bytes[2]
    assert flops_by_layer(flow, layers, 1).sum() > 0


def mlp_args(made):
    return made[0], *made[1]


def test_boundaries_are_the_users_own():
    def marked(i, w, x):
        x = jnp.tanh(x @ w)
        return mw.boundary(x) if i in (0, 3) else x

    flow, layers = layers_of(*mlp_args(mlp(layers=6, body=marked)))
    forward = flops_by_layer(flow, layers, 0)
    assert forward / forward.min() == pytest.approx([1, 3, 2])


def test_boundaries_by_name_scope():
    def scoped(i, w, x):
        with jax.named_scope(f"block{i // 2}"):
            return jnp.tanh(x @ w)

    flow, layers = layers_of(*mlp_args(mlp(layers=6, body=scoped)), boundaries=("block*",))
    forward = flops_by_layer(flow, layers, 0)
    assert forward / forward.min() == pytest.approx([1, 1, 1])
    with pytest.raises(ShardingError, match="no name scope matches"):
        layers_of(*mlp_args(mlp()), boundaries=("layer*",))


def test_shares_of_the_compute_may_be_uneven():
    flow, layers = layers_of(*mlp_args(mlp(layers=6)), layers=(1, 3, 2))
    forward = flops_by_layer(flow, layers, 0)
    assert forward / forward.min() == pytest.approx([1, 3, 2])
    assert layers_of(*mlp_args(mlp(layers=6)), layers=3)[1].num_layers == 3


@pytest.mark.parametrize("name", ["wide-resnet-tiny", "unet-tiny", "mixtral-tiny", "vit-tiny"])
def test_every_layer_of_other_models_has_work(name):
    example = zoo.build(name, batch=8)
    flow, layers = layers_of(example.train_step, example.state, example.batch)
    forward = flops_by_layer(flow, layers, 0)
    assert layers.num_layers > 1
    assert (forward > 0).all()
    assert forward.sum() == pytest.approx(flow.flops[flow.forward].sum())


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"layers": 0}, "above 0"),
        ({"layers": 99}, "more than the model's 6 contractions"),
        ({"layers": (1, -1)}, "all"),
    ],
)
def test_wishes_that_cannot_be_met_are_refused(wish, words):
    with pytest.raises(ShardingError, match=words):
        layers_of(*mlp_args(mlp(layers=6)), **wish)


def test_a_scan_cannot_be_cut_otherwise():
    example = zoo.build("llama-tiny", batch=8, layers=4, scan=True)
    with pytest.raises(ShardingError, match="loops over 4 layers"):
        layers_of(example.train_step, example.state, example.batch, layers=2)
