"""Pictures of pytrees: plain JSON from which the tree comes back."""

import json
import sys
from collections import OrderedDict
from types import ModuleType
from typing import NamedTuple

import equinox as eqx
import jax
import optax
import pytest

from meshwright.plans.pytree_json import checked_structure, rebuild, skeleton


class Pair(NamedTuple):
    left: object
    right: object


class Layer(eqx.Module):
    weight: object
    bias: object


def through_json(tree):
    """The tree with its leaves numbered, after its picture was written and read."""
    leaves, structure = jax.tree.flatten(tree)
    picture = checked_structure(json.loads(json.dumps(skeleton(structure))), len(leaves), "structure")
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


class Greedy(NamedTuple("Greedy", [("left", object), ("right", object)])):
    """A named tuple whose own making has an effect."""

    made: list = []  # noqa: RUF012

    def __new__(cls, left, right):
        cls.made.append((left, right))
        return super().__new__(cls, left, right)


def node(name, *items, keys=None):
    names = keys or [f"k{i}" for i in range(len(items))]
    return {"node": name, "named": True, "keys": names, "items": list(items)}


@pytest.mark.parametrize(
    "name",
    ["subprocess:call", "os:system", "builtins:exec", "builtins:print", "json:loads", "sys:modules", "no colon", ":"],
)
def test_whatever_a_picture_names_nothing_is_called(name, monkeypatch):
    called = []
    module, _, attribute = name.partition(":")
    if module in sys.modules and attribute and attribute != "modules":
        monkeypatch.setattr(sys.modules[module], attribute, lambda *args: called.append(args))
    assert rebuild(node(name, {"leaf": 0}), ["true"]) == ("true",)
    assert not called


def test_a_picture_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "canary_of_structure.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert rebuild(node("canary_of_structure:Pair", {"leaf": 0}), [1]) == (1,)
    assert "canary_of_structure" not in sys.modules


def test_a_module_is_not_asked_for_attributes_that_it_makes(monkeypatch):
    module = ModuleType("lazy_of_structure")
    module.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")  # PEP 562: may import anything
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert rebuild(node("lazy_of_structure:Pair", {"leaf": 0}), [1]) == (1,)


def test_a_named_tuple_is_made_without_its_own_code():
    picture = node(f"{__name__}:Greedy", {"leaf": 0}, {"leaf": 1}, keys=["left", "right"])
    back = rebuild(picture, [1, 2])
    assert type(back) is Greedy and tuple(back) == (1, 2) and Greedy.made == []


def test_what_comes_back_plain_is_said(caplog):
    rebuild(node(f"{__name__}:Pair", {"leaf": 0}, keys=["other"]), [1])
    assert "comes back as a plain tuple" in caplog.text and "import its module" in caplog.text


@pytest.mark.parametrize(
    "picture",
    [{}, [], 7, {"leaf": 9}, {"leaf": "0"}, {"list": 3}, {"node": "x:y"}, {"node": 5, "named": True, "keys": 1}],
    ids=repr,
)
def test_a_damaged_picture_is_said(picture):
    with pytest.raises(ValueError, match=r"^in_structure"):
        checked_structure(picture, 1, "in_structure")
