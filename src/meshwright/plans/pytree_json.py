"""Keeps the structure of a pytree as plain JSON, so that a saved plan can give its shardings back in it."""

import logging
import sys
from collections.abc import Sequence
from inspect import getattr_static
from types import ModuleType
from typing import Any

from meshwright.errors import PlanFileError

LEAF = "leaf"
log = logging.getLogger("meshwright")


def skeleton(tree: Any) -> Any:
    """A JSON-like form of a JAX tree structure; leaves are numbered in order."""
    import jax

    return _picture(jax.tree_util.tree_unflatten(tree, range(tree.num_leaves)))


def _picture(node: Any) -> Any:
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


def rebuild(picture: Any, leaves: Sequence[Any]) -> Any:
    """The tree of a picture, without running any code of the file's choosing.

    Named tuples come back as such where their class is imported already; containers of any other class come back as
    dicts by key, and named tuples of unknown classes as tuples, which the log says.

    Raises:
        PlanFileError: The picture is damaged.
    """
    try:
        return _rebuild(picture, leaves)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, StopIteration, RecursionError) as error:
        raise PlanFileError(
            f"the plan is damaged in its structure of arguments or results: {type(error).__name__}: {error}; "
            "save the plan again"
        ) from None


def _rebuild(picture: Any, leaves: Sequence[Any]) -> Any:
    if picture is None:
        return None
    kind, content = next(iter(picture.items()))
    if kind == LEAF:
        return leaves[content]
    if kind == "dict":
        return {k: _rebuild(v, leaves) for k, v in content.items()}
    if kind in ("list", "tuple"):
        items = [_rebuild(v, leaves) for v in content]
        return items if kind == "list" else tuple(items)
    items = [_rebuild(v, leaves) for v in picture["items"]]
    if not picture["named"]:
        return dict(zip(picture["keys"], items, strict=True))
    found = _imported_namedtuple(content, picture["keys"])
    if found is None:
        log.warning(
            "%r comes back as a plain tuple: no named tuple of this name with the fields %s is imported here; import "
            "its module before the shardings of the plan are read",
            content,
            picture["keys"],
        )
        return tuple(items)
    return tuple.__new__(found, items)  # not its own `__new__`, which may do anything


def _imported_namedtuple(name: str, keys: Sequence[str]) -> type[tuple] | None:
    """The named tuple ``module:name``, if it is already imported; nothing is imported, and no getter is called.

    A module may import others when an attribute is asked for, so its dictionary is looked at instead.
    """
    module, _, attribute = name.partition(":")
    if module not in sys.modules or not isinstance(sys.modules[module], ModuleType):
        return None
    found = object.__getattribute__(sys.modules[module], "__dict__").get(attribute)
    if not issubclass(type(found), type) or tuple not in type.mro(found):  # isinstance would ask the object itself
        return None
    return found if getattr_static(found, "_fields", None) == tuple(keys) else None
