"""What one device computes, and how far right results may be from it."""

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.matrix.precision import OF
from tests.matrix.training import Training

STEPS = 2
_DRAWS = 4  # perturbations; the largest effect of four is hardly ever below a third of what is usual
_FACTOR = 8.0
MODULES = {
    "plain": "plain",
    "linen": "linen_models",
    "nnx": "nnx_models",
    "equinox": "equinox_models",
    "haiku": "haiku_models",
}


class Reference(NamedTuple):
    """States and metrics of one device, leaf by leaf, and by how much each may differ.

    Two right results differ by rounding, since devices add in another order. How much that is depends on the program:
    on how deep it is, on what cancels, on gradients divided by their own size. So it is measured on one device: every
    number that a step reads is changed by one unit roundoff of the precision, up or down at random, and what the step
    changes then changes by so much. Eight times the largest of four such changes, added up over the steps, and the
    roundoff of storing the result, is what a leaf may differ by, as a root mean square.
    """

    leaves: tuple[tuple[str, Any], ...]
    tolerances: tuple[float, ...]


@lru_cache(maxsize=4)
def made(precision: str, program: str, framework: str) -> Training:
    """A program; the same functions whenever it is asked for, which JAX has traced already."""
    return import_module(f"tests.matrix.{MODULES[framework]}").training(program, OF[precision])


@lru_cache(maxsize=4)
def reference(precision: str, program: str, framework: str) -> Reference:
    """Two steps on one device."""
    training = made(precision, program, framework)
    step = training.jit(training.step)
    # An update in place changes the modules that it is given, so each call gets a state of its own.
    state, changes = _first(training), []
    for number in range(STEPS):
        *parts, metrics = step(*_copied(state), training.batch)
        after = tuple(parts)
        draws = [_effect(training, step, state, (after, metrics), precision, (number, d)) for d in range(_DRAWS)]
        changes.append(np.max(draws, axis=0))
        state = after
    leaves = numbered((state, metrics))
    grown = np.sum(changes, axis=0) * _FACTOR
    stored = [STEPS * _unit(leaf) * size(leaf) for _, leaf in leaves]
    return Reference(tuple(leaves), tuple(float(a + b) for a, b in zip(grown, stored, strict=True)))


def _first(training: Training) -> tuple[Any, ...]:
    state = training.jit(training.init)(jax.random.key(0))
    return state if training.num_state > 1 else (state,)


def _copied(state: Any) -> Any:
    leaves, tree = jax.tree.flatten(state)
    return jax.tree.unflatten(tree, leaves)


def _effect(
    training: Training, step: Any, state: Any, found: Any, precision: str, seed: tuple[int, int]
) -> list[float]:
    """By how much each leaf's change differs where all that the step reads is perturbed."""
    draw = np.random.default_rng(seed)
    unit = OF[precision].rounding
    start, batch = (jax.tree.map(lambda x: _perturbed(x, unit, draw), tree) for tree in (state, training.batch))
    *parts, metrics = step(*_copied(start), batch)
    befores, starts = (dict(numbered((tree, {}))) for tree in (state, start))
    effects = []
    for (path, one), (_, other) in zip(numbered(found), numbered((tuple(parts), metrics)), strict=True):
        change = _wide(other) - _wide(one)
        if path in befores:
            change = change - (_wide(starts[path]) - _wide(befores[path]))
        effects.append(size(change))
    return effects


def _perturbed(x: Any, unit: float, draw: np.random.Generator) -> Any:
    if not _is_float(x):
        return x
    signs = draw.choice([-1.0, 1.0], np.shape(x))
    wide = np.asarray(x, np.float64)
    return jax.device_put((wide * (1 + max(unit, 2 * _unit(x)) * signs)).astype(x.dtype))  # which compiles nothing


def numbered(tree: Any) -> list[tuple[str, Any]]:
    """Paths and arrays of a tree; keys as their words, and nothing that is not a number."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, int | float | np.ndarray | np.generic) or hasattr(leaf, "dtype"):
            found.append((jax.tree_util.keystr(path), np.asarray(leaf)))
    return found


def _wide(leaf: Any) -> np.ndarray:
    return np.asarray(leaf, np.float64)


def size(leaf: Any) -> float:
    """The root mean square of its numbers."""
    wide = _wide(leaf)
    return float(np.sqrt(np.mean(wide**2))) if wide.size else 0.0


def _is_float(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _unit(leaf: Any) -> float:
    return float(jnp.finfo(leaf.dtype).eps) / 2 if _is_float(leaf) else 0.0


def differs(expected: Reference, found: Any) -> str:
    """Where a result differs from one device's; empty if nowhere."""
    return differing(expected, numbered(found))


def differing(expected: Reference, leaves: list[tuple[str, np.ndarray]]) -> str:
    """The same of a tree as `numbered` gives it."""
    if [path for path, _ in leaves] != [path for path, _ in expected.leaves]:
        lost = {path for path, _ in expected.leaves} ^ {path for path, _ in leaves}
        return f"the tree of the results differs at {sorted(lost)[:3]}"
    for (path, one), (_, other), tolerance in zip(expected.leaves, leaves, expected.tolerances, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"{path} is {other.dtype}{list(other.shape)} instead of {one.dtype}{list(one.shape)}"
        allowed = tolerance if _is_float(one) else 0.0
        if not (apart := size(_wide(other) - _wide(one))) <= allowed:
            return f"{path} differs by {apart:.1e}, where rounding explains {allowed:.1e} and it is {size(one):.1e}"
    return ""
