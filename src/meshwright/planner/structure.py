"""Keeps the structure of a pytree as plain JSON, so that a saved plan can give its shardings back in it."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

LEAF = "leaf"


def skeleton(tree: Any) -> Any:
    """A JSON-like picture of a JAX tree structure; leaves are numbered in order."""
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
    """The tree of a picture; containers of unknown classes come back as dicts by key."""
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
    if picture["named"]:
        module, _, name = content.partition(":")
        try:
            return getattr(import_module(module), name)(*items)
        except (ImportError, AttributeError):
            return tuple(items)
    return dict(zip(picture["keys"], items, strict=True))
