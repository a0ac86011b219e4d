"""Groups: the same as when operations are placed one after another by hand, on models of every kind."""

from dataclasses import asdict

import jax
import jax.numpy as jnp
import pytest

from meshwright.cost.xla_gpu.traffic import plain_traffic
from meshwright.graph import trace
from meshwright.planner.grouping.folding import fold
from meshwright.planner.grouping.groups import Grouping
from meshwright.planner.grouping.likeness import tokens_of
from tests.planner import by_hand
from tests.planner.examples import mlp_step, traced_zoo

pytestmark = pytest.mark.slow

MODELS = {
    "llama": ("llama-tiny", {"layers": 5, "checkpoint": True}),
    "llama, scanned": ("llama-tiny", {"scan": True}),
    "gpt, dropout": ("gpt-tiny", {"dropout": 0.1, "layers": 4}),
    "mixtral": ("mixtral-tiny", {}),
    "moe": ("moe-tiny", {}),
    "vit": ("vit-tiny", {}),
    "unet": ("unet-tiny", {}),
    "wide resnet": ("wide-resnet-tiny", {}),
}


def vector(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def loops_and_branches(x, w, flag):
    def body(carry):
        count, h = carry
        return count + 1, jnp.where(flag, h @ w, jnp.broadcast_to(h[:, :1], h.shape))

    _, x = jax.lax.while_loop(lambda carry: carry[0] < 3, body, (0, x))
    return jax.lax.cond(flag, lambda: jnp.cumsum(x, 0), lambda: jnp.sort(x, 0)), x.sum()


def masks(x, key):
    mask = jnp.tril(jnp.ones((16, 16))) * x[0, 0]
    noise = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.where(noise, x, 0.0) @ mask, jnp.outer(x[0], x[1]) + mask, jnp.arange(3), x[0, 0] + 1


FUNCTIONS = {
    "mlp": mlp_step(64, 16, 7),
    "loops and branches": (loops_and_branches, (vector(8, 8), vector(8, 8), vector(dtype=bool))),
    "masks": (masks, (vector(16, 16), jax.random.key(0))),
    "nothing": (lambda x: x, (vector(4),)),
    "scalars": (lambda x, y: (x + y, x * 2), (vector(), vector())),
}


@pytest.fixture(scope="module", params=[*MODELS, *FUNCTIONS])
def both(request):
    """A program's groups, and the same by hand."""
    if request.param in MODELS:
        name, options = MODELS[request.param]
        traced = traced_zoo(name, **options)
    else:
        function, args = FUNCTIONS[request.param]
        traced = trace(function, *args)
    return Grouping(traced.graph), by_hand.GroupingByHand(traced.graph)


def test_groups_are_as_placed_by_hand(both):
    found, expected = both
    assert [asdict(group) for group in found.groups] == [asdict(group) for group in expected.groups]
    assert (found.home, found.place, found.gradients) == (expected.home, expected.place, expected.gradients)
    assert all(found.roots(v) == expected.roots(v) for v in expected.rooted)


def test_tokens_are_equal_where_groups_are_built_alike(both):
    found, expected = both
    pins = {v: f"pin {v % 3}" for group in expected.groups[::4] for v in group.values[:1]}
    for marks in ({}, pins):
        tokens = tokens_of(found, marks).tolist()
        by_token = [by_hand.token(expected, i, marks) for i in range(len(expected.groups))]
        assert len(set(zip(tokens, by_token, strict=True))) == len(set(tokens)) == len(set(by_token))


def test_classes_and_edges_are_as_folded_by_hand(both):
    found, expected = both
    folded = fold(found, {}, plain_traffic(found.graph))
    classes = by_hand.classes(expected, {})
    pairs = set(zip(folded.group_class, classes, strict=True))
    assert len(pairs) == len(set(classes)) == len(folded.members)
    assert folded.shared == by_hand.shared_readings(expected)
    assert list(folded.edges.items()) == list(by_hand.edges(expected, folded).items())
    assert sum(folded.edges.values()) == len(folded.untied.which)


def test_unfolded_every_group_is_its_own_class(both):
    found, _ = both
    folded = fold(found, {}, plain_traffic(found.graph), enabled=False)
    assert folded.members == [[i] for i in range(len(found.groups))]


def test_a_long_chain_on_a_broadcast_value_is_not_made_by_every_reader():
    def function(bias, x):
        value = jnp.broadcast_to(bias, x.shape)
        for _ in range(100):
            value = jnp.tanh(value)
        return x * value

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8,), (64, 8))]
    grouping = Grouping(trace(function, *shapes).graph)
    read = [len(grouping.pulled(v)) for v in grouping.graph.columns.reads.tolist()]
    assert 1 < max(read) < 100
