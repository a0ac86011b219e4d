"""Where loaded parameters go: the shardings and dtypes of a parallelised function, or of a tree of types."""

from dataclasses import dataclass
from typing import Any

from jax.tree_util import tree_flatten_with_path

from meshwright.errors import CheckpointError
from meshwright.hf.layout import path_of
from meshwright.plans.plan import PlanData
from meshwright.runtime.placement import argument_shardings
from meshwright.training.parallelize import Parallelized


@dataclass(frozen=True)
class Target:
    """Where one parameter goes; None for what is not asked."""

    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    sharding: Any = None


def targets(like: Any, paths: list[str]) -> list[Target]:
    """Where each parameter goes that has one of some paths.

    Args:
        like: As in `mw.hf.load`.
        paths: The parameters', such as `layers/3/q`.
    """
    if like is None:
        return [Target() for _ in paths]
    known = _of_function(like) if isinstance(like, Parallelized) else _of_tree(like)
    found = [known.get(path) for path in paths]
    missing = [path for path, target in zip(paths, found, strict=True) if target is None]
    if missing:
        what = like.__name__ if isinstance(like, Parallelized) else "the tree"
        raise CheckpointError(
            f"like: {what} has no parameter {missing[0]} of the model; plan it with the types of model.example(…), "
            "or give a tree like its parameters'"
        )
    return [target for target in found if target is not None]


def _of_function(like: Parallelized) -> dict[str, Target]:
    """The parameters of a function's state, by their paths within it."""
    plan = like.last_plan
    if plan is None:
        raise CheckpointError(
            f"like: {like.__name__} has no plan yet, so the shardings of its parameters are not known; first call "
            f"{like.__name__}.plan(…) with the types of its arguments"
        )
    return _of_plan(plan)


def _of_plan(plan: PlanData) -> dict[str, Target]:
    found: dict[str, Target] = {}
    for tensor, sharding in zip(plan.arguments, argument_shardings(plan), strict=True):
        before, within, path = f"/{tensor.path}".partition("/params/")
        if within and before.count("/") <= 1:  # the whole path is params/… or, in a state, state/params/…
            found[path] = Target(tuple(tensor.shape), tensor.dtype, sharding)
    return found


def _of_tree(like: Any) -> dict[str, Target]:
    leaves = tree_flatten_with_path(like)[0]
    return {path_of(keys): _of_leaf(path_of(keys), leaf) for keys, leaf in leaves}


def _of_leaf(path: str, leaf: Any) -> Target:
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        what = f"like: {path} is" if path else "like is"
        raise CheckpointError(f"{what} of type {type(leaf).__name__}; give arrays or jax.ShapeDtypeStructs")
    return Target(tuple(leaf.shape), str(leaf.dtype), getattr(leaf, "sharding", None))
