"""Keeps the structure of a pytree as plain JSON, so that a saved plan can give its shardings back in it."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from types import ModuleType
from typing import Any

from meshwright.schema import Size, built, checked

LEAF = "leaf"
log = logging.getLogger("meshwright")


def skeleton(tree: Any) -> dict[str, Any] | None:
    """A JSON-like form of a JAX tree structure; leaves are numbered in order."""
    import jax

    return _picture(jax.tree_util.tree_unflatten(tree, range(tree.num_leaves)))


def _picture(node: Any) -> dict[str, Any] | None:
    if type(node) is int:
        return {LEAF: node}
    if node is None:
        return None
    if type(node) is dict and all(isinstance(k, str) for k in node):
        return {"dict": {k: _picture(v) for k, v in node.items()}}
    if type(node) in (list, tuple):
        return {type(node).__name__: [_picture(v) for v in node]}
    import jax

    children, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
    keys = [str(getattr(p[0], "key", getattr(p[0], "name", getattr(p[0], "idx", p[0])))) for p, _ in children]
    name = f"{type(node).__module__}:{type(node).__qualname__}"
    return {"node": name, "named": hasattr(node, "_fields"), "keys": keys, "items": [_picture(v) for _, v in children]}


def checked_structure(picture: Any, num_leaves: int, where: str) -> dict[str, Any] | None:
    """The picture itself, if it has the form that `skeleton` gives, with each leaf once.

    Args:
        picture: What a file has.
        num_leaves: The number of leaves.
        where: Its name in messages.

    Raises:
        ValueError: It has not; the message says where.
    """
    try:
        leaves = list(_leaves(picture, where))
    except RecursionError:
        raise ValueError(f"{where} is nested too deeply") from None
    if sorted(leaves) != list(range(num_leaves)):
        raise ValueError(f"{where} does not name each of {num_leaves} leaves once")
    return picture


def _leaves(picture: Any, where: str) -> Iterator[int]:
    if picture is None:
        return
    checked(picture, dict[str, Any], where)
    content: Any
    kind, content = next(iter(picture.items()), ("", None))
    inner = f"{where}.{kind}"
    if kind == LEAF:
        checked(content, Size, inner)
        yield content
    elif kind == "dict":
        for key, value in checked(content, dict[str, Any], inner).items():
            yield from _leaves(value, f"{inner}[{key!r:.60}]")
    elif kind in ("list", "tuple"):
        for place, value in enumerate(checked(content, list, inner)):
            yield from _leaves(value, f"{inner}[{place}]")
    else:
        node = built(_Node, picture, where)
        if len(node.keys) != len(node.items):
            raise ValueError(f"{where} has {len(node.keys)} keys for {len(node.items)} items")
        for key, value in zip(node.keys, node.items, strict=True):
            yield from _leaves(value, f"{inner}[{key!r:.60}]")


@dataclass(frozen=True)
class _Node:
    """The picture of a container of any other class, ``module:name``."""

    node: str
    named: bool
    keys: tuple[str, ...]
    items: tuple[Any, ...]


def rebuild(picture: Any, leaves: Sequence[Any]) -> Any:
    """The tree of a picture, without running any code of the file's choosing.

    Named tuples come back as such where their class is imported already; containers of any other class come back as
    dicts by key, and named tuples of unknown classes as tuples, which the log says.
    """
    if picture is None:
        return None
    kind, content = next(iter(picture.items()))
    if kind == LEAF:
        return leaves[content]
    if kind == "dict":
        return {k: rebuild(v, leaves) for k, v in content.items()}
    if kind in ("list", "tuple"):
        items = [rebuild(v, leaves) for v in content]
        return items if kind == "list" else tuple(items)
    items = [rebuild(v, leaves) for v in picture["items"]]
    if not picture["named"]:
        return dict(zip(picture["keys"], items, strict=True))
    named_tuple = _imported_namedtuple(content, picture["keys"])
    if named_tuple is None:
        log.warning(
            "%r comes back as a plain tuple: no named tuple of this name with the fields %s is imported here; import "
            "its module before the shardings of the plan are read",
            content,
            picture["keys"],
        )
        return tuple(items)
    return tuple.__new__(named_tuple, items)  # not its own `__new__`, which may do anything


def _imported_namedtuple(name: str, keys: Sequence[str]) -> type[tuple] | None:
    """The named tuple ``module:name``, if it is already imported; nothing is imported, and no getter is called.

    A module may import others when an attribute is asked for, so its dictionary is looked at instead.
    """
    module, _, attribute = name.partition(":")
    if module not in sys.modules or not isinstance(sys.modules[module], ModuleType):
        return None
    kind = object.__getattribute__(sys.modules[module], "__dict__").get(attribute)
    if not issubclass(type(kind), type) or tuple not in type.mro(kind):  # isinstance would ask the object itself
        return None
    return kind if getattr_static(kind, "_fields", None) == tuple(keys) else None
