"""Clusters compared: ranking, prices, the Pareto front, and what has no plan or no price."""

import json
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.errors import ClusterError
from meshwright.exploration.exploration import Exploration
from meshwright.exploration.rental_prices import _data, cluster_price
from meshwright.hardware import chips, find_chip

ARGS = (jnp.ones((512, 256)), jnp.ones((256, 256)))


def product(x, w):
    return x @ w


@pytest.fixture(scope="module")
def found():
    return mw.explore(product, ARGS, clusters=["1x8 h100", "1x4 a100-80gb", "1x8 mi300x", "1x2 v100"])


def test_the_best_comes_first_and_the_unpriced_last(found):
    values = [offer.tokens_per_dollar for offer in found.offers]
    assert values[-1] is None
    assert values[:-1] == sorted(values[:-1], reverse=True)
    assert found.best is found.offers[0]


@pytest.mark.parametrize(("objective", "more"), [("tokens_per_s", True), ("step_s", False), ("mfu", True)])
def test_any_figure_may_rank(found, objective, more):
    ranked = Exploration(found.offers, objective).ranked()
    values = [getattr(offer, objective) for offer in ranked.offers]
    assert values == sorted(values, reverse=more)


def test_nobody_beats_the_front_in_both(found):
    priced = [o for o in found.offers if o.tokens_per_dollar is not None]
    for offer in found.pareto:
        assert not any(
            o.tokens_per_s > offer.tokens_per_s and o.tokens_per_dollar > offer.tokens_per_dollar for o in priced
        )


def test_tokens_for_a_dollar(found):
    offer = found.best
    assert offer.tokens_per_dollar == pytest.approx(offer.tokens_per_s * 3600 / offer.dollars_per_hour)


def test_it_is_printed_drawn_and_kept(found, tmp_path):
    text = str(found)
    assert "1x8 h100" in text
    assert "★" in text
    assert "prices:" in text
    found.save_picture(tmp_path / "front.svg")
    circles = ElementTree.parse(tmp_path / "front.svg").getroot().findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 3
    assert len(json.loads(json.dumps(found.to_json()))["offers"]) == 4


def test_own_prices_count(found):
    cheap = mw.explore(product, ARGS, clusters=["1x8 h100", "1x8 mi300x"], prices={"mi300x": 0.01})
    assert cheap.best.cluster.chip.name == "mi300x"
    assert cheap.best.price_source == "given"


def test_a_cluster_that_is_too_small_does_not_hide_the_others():
    big = (jnp.ones((8, 8)), mw_struct((200_000, 200_000)))
    found = mw.explore(lambda x, w: x.sum() + w.sum(), big, clusters=["1x1 rtx-3090", "8x8 h100"], objective="step_s")
    assert found.best.cluster.name == "8x8 h100"
    assert "fits" in found.offers[-1].problem
    assert "no plan" in str(found)


def test_hosts_of_several_kinds_are_planned_in_stages_or_say_how():
    clusters = ["1x2 h100 + 1x2 a100-40gb", "1x2 a100-40gb"]
    found = mw.explore(product, ARGS, clusters=clusters, objective="step_s", method=mw.Auto(memory_fraction=0.5))
    assert [offer.problem for offer in found.offers] == ["", ""]
    told = mw.explore(product, ARGS, clusters=clusters, objective="step_s", method=mw.TensorParallel())
    assert told.best.cluster.name == "1x2 a100-40gb"
    assert "mw.Auto(pipeline=True)" in told.offers[-1].problem


def mw_struct(shape):
    import jax

    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_every_price_belongs_to_a_chip_and_has_a_source():
    data = _data()
    names = {chip.name for chip in chips()}
    for chip, entry in data["per_hour"].items():
        assert chip in names
        assert entry["dollars"] > 0
        assert data["sources"][entry["source"]]["date"]


def test_an_alias_names_its_chip():
    price = cluster_price(mw.cluster("2x8 h100"), {"h100": 2.0})
    assert price.dollars == 32.0
    assert find_chip("h100").name == "h100-sxm-80gb"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "beauty"}, "choose one of tokens_per_dollar"),
        ({"clusters": []}, "give a list such as"),
        ({"clusters": "1x8 h100"}, "give a list such as"),
        ({"clusters": ["1x8 abacus"]}, "unknown chip"),
        ({"prices": {"h100": -1}}, "above 0"),
        ({"prices": {"abacus": 1}}, "unknown chip"),
    ],
)
def test_bad_input_is_refused_in_words(options, message):
    with pytest.raises(ClusterError, match=message):
        mw.explore(product, ARGS, **({"clusters": ["1x8 h100"]} | options))
