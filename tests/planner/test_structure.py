"""Pictures of pytrees: plain JSON from which the tree comes back."""

import json
from collections import OrderedDict
from typing import NamedTuple

import equinox as eqx
import jax
import optax
import pytest

from meshwright.planner.structure import rebuild, skeleton


class Pair(NamedTuple):
    left: object
    right: object


class Layer(eqx.Module):
    weight: object
    bias: object


def through_json(tree):
    """The tree with its leaves numbered, after its picture was written and read."""
    leaves, structure = jax.tree.flatten(tree)
    picture = json.loads(json.dumps(skeleton(structure)))
    return rebuild(picture, leaves)


@pytest.mark.parametrize(
    "tree",
    [
        7.5,
        (),
        {},
        None,
        ({"b": [1.0, (2.0,)], "a": None}, 3.0),
        [Pair({"x": 1.0}, None), Pair(2.0, [3.0])],
        optax.adamw(1e-3).init({"w": 1.0, "b": 2.0}),
        {"leaf": {"dict": 1.0}, "list": [2.0], "node": 3.0, "keys": 4.0},  # names that pictures use themselves
    ],
    ids=[
        "leaf",
        "empty tuple",
        "empty dict",
        "none",
        "nested",
        "named tuples",
        "optimizer state",
        "pictures' own names",
    ],
)
def test_trees_of_known_containers_come_back_as_they_were(tree):
    back = through_json(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert jax.tree.leaves(back) == jax.tree.leaves(tree)


def test_leaves_are_numbered_in_jaxs_order():
    tree = {"z": "last", "a": ["first", "second"]}
    structure = jax.tree.structure(tree)
    assert rebuild(skeleton(structure), jax.tree.leaves(tree)) == tree
    assert skeleton(structure) == {"dict": {"a": {"list": [{"leaf": 0}, {"leaf": 1}]}, "z": {"leaf": 2}}}


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (Layer(1.0, [2.0]), {"weight": 1.0, "bias": [2.0]}),
        (OrderedDict(b=1.0, a=2.0), {"b": 1.0, "a": 2.0}),
        ({3: 1.0, 1: 2.0}, {"1": 2.0, "3": 1.0}),
    ],
    ids=["module", "ordered dict", "numbers as keys"],
)
def test_other_containers_come_back_as_dicts_by_key(tree, expected):
    assert through_json(tree) == expected


def test_a_named_tuple_that_cannot_be_imported_comes_back_as_a_tuple():
    class Local(NamedTuple):
        first: object
        second: object

    back = through_json(Local(1.0, {"a": 2.0}))
    assert type(back) is tuple
    assert back == (1.0, {"a": 2.0})
    gone = {"node": "no_such_module:Pair", "named": True, "keys": ["left"], "items": [{"leaf": 0}]}
    assert rebuild(gone, ["leaf"]) == ("leaf",)
