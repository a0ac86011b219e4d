"""What layers may keep: the corners of the trade are those of all subsets, and the choice for all kinds is exact."""

from functools import cache
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.runtime.recomputation.policies import parsed, worded
from meshwright.runtime.recomputation.recomputed import regions_of
from meshwright.step_search.keeping import Keeping
from meshwright.step_search.layer_kinds import Choice, Figures, LayerKind
from tests.draws import normal

WIDTH = 16


def encoder(x, w):
    return x + jnp.tanh(jnp.tanh(x @ w["up"]) * 2.0) @ w["down"]


def decoder(x, w):
    return jnp.sin(x @ w["in"]) @ w["out"] * x


def loss(state, batch, one=encoder, other=decoder):
    for w in state["encoder"]:
        batch = one(batch, w)
    for w in state["decoder"]:
        batch = other(batch, w)
    return jnp.mean(jnp.square(batch))


def step(state, batch):
    value, gradients = jax.value_and_grad(loss)(state, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, state, gradients), value


@cache
def arguments():
    def weights(rows, columns, seed):
        return normal(rows, columns, seed=seed) / rows**0.5  # activations stay near one, where rounding stays rounding

    encoders = [{"up": weights(WIDTH, 64, n), "down": weights(64, WIDTH, 9 + n)} for n in range(4)]
    decoders = [{"in": weights(WIDTH, 32, n), "out": weights(32, WIDTH, 9 + n)} for n in range(3)]
    return {"encoder": encoders, "decoder": decoders}, normal(512, WIDTH, seed=99)


@cache
def kinds():
    plan = mw.plan(step, *arguments(), cluster="1x1 h100", method=mw.Auto(recompute="none", microbatches=1))
    figures = Figures(plan)
    (region,) = regions_of(plan.origin.call.program)
    return [LayerKind(region, number, figures) for number in range(region.layers.num_kinds)]


def test_layers_of_two_kinds_are_found():
    assert len(kinds()) == 2
    assert [kind.count for kind in kinds()] == [4, 3]


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("price", [1e-15, 1e-12, 1e-9, 1e-6])
def test_no_subset_of_results_is_cheaper_than_the_minimum_cut(number, price):
    kind = kinds()[number]
    makers = range(len(kind.operations))
    subsets = (kept for size in range(len(makers) + 1) for kept in combinations(makers, size))
    priced = (kind.priced("", kept) for kept in subsets)
    least = min(one.seconds + price * one.num_bytes for one in priced)
    cut = kind._cheapest(price)
    assert cut.seconds + price * cut.num_bytes == pytest.approx(least, rel=1e-9)


def test_choices_go_from_all_bytes_to_none():
    for kind in kinds():
        choices = {one.level: one for one in kind.choices()}
        assert choices["none"].seconds == 0 and choices["full"].num_bytes == 0
        assert choices["none"].num_bytes > choices["selective"].num_bytes > 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_the_choice_for_all_kinds_is_the_best_of_all(share):
    keeping = Keeping(kinds())
    keeping.choices = [[Choice("none", 9.0, 0.0), Choice("keep 1", 4.0, 1.0), Choice("full", 0.0, 5.0)],
                       [Choice("none", 5.0, 0.0), Choice("full", 1.0, 2.0)]]  # fmt: skip
    room = share * (4 * 9.0 + 3 * 5.0)
    ways = [
        (sum(one.num_bytes for one in way), sum(one.seconds for one in way))
        for way in product(*[keeping.choices[0]] * 4, *[keeping.choices[1]] * 3)
    ]
    fitting = [seconds for size, seconds in ways if size <= room]
    found = keeping.within(room)
    assert (found is None) == (not fitting)
    if found is not None:
        assert found.seconds == min(fitting) and found.num_bytes <= room
        assert worded(parsed(found.policy)) == found.policy


def test_each_kind_has_a_policy_of_its_own_and_the_numbers_stay():
    expected = jax.jit(step)(*arguments())
    recomputed = {}
    for policy in ("none", "full | none", "none | full", "full:1/2, selective:1/2 | keep 0 1", "full"):
        plan = mw.plan(step, *arguments(), cluster="1x1 cpu", method=mw.Auto(recompute=policy, microbatches=1))
        recomputed[policy] = sum(op.load.flops for op in plan.ops if op.load is not None and op.load.recomputed)
        found = mw.parallelize(step, method=plan, donate_argnums=())(*arguments())
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)
    assert recomputed["none"] == 0 < recomputed["none | full"]
    assert recomputed["full | none"] + recomputed["none | full"] == recomputed["full"]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("full:2/3, selective:1/2", "shares 'full:2/3, selective:1/2' are more than all layers"),
        ("full | selectiv", "did you mean 'selective'"),
        ("keep x", "give one of 'auto'"),
    ],
)
def test_a_policy_that_cannot_be_read_is_refused(policy, said):
    with pytest.raises(mw.ShardingError, match=said):
        mw.Auto(recompute=policy)


def test_a_policy_of_more_kinds_than_the_step_has_layers_is_refused():
    with pytest.raises(mw.ShardingError, match="recompute names 3 kinds of layers, and this step has 2"):
        mw.plan(step, *arguments(), cluster="1x1 cpu", method=mw.Auto(recompute="full | none | full"))
