"""A checkpoint's record of each leaf of a state, and how it is compared with the state it is restored into."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.tree_util import keystr, tree_flatten_with_path

from meshwright import jax_compat
from meshwright.errors import CheckpointError
from meshwright.runtime.processes.sharing import put
from meshwright.runtime.stages.cutting.layer_stack import StackSharding, placed, stacked
from meshwright.schema import Size

# Characters that separate keys, number equal paths, mark escapes, or are not allowed in the name of a file.
_RESERVED = re.compile("[/#%\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_NUMBERS: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "complex": complex,
}


@dataclass(frozen=True)
class SavedLeaf:
    """One leaf as a checkpoint records it; the elements of arrays are stored apart, under the leaf's path.

    Attributes:
        path: Pytree keys joined by ``/``, as `named_leaves` writes them.
        kind: ``array``; ``key``, an array of random keys; ``number``, a Python number; ``kept`` for anything else.
        dtype: An array's dtype; otherwise the name of the leaf's class.
        shape: An array's shape.
        weak: Whether a scalar array is weakly typed, as Python numbers are.
        text: A number as Python writes it; the implementation of keys.
        words: Number of words in one key.
        checksum: Checksum of the stored array; empty where none is stored, and in checkpoints of the first version.
    """

    path: str
    kind: str
    dtype: str
    shape: tuple[Size, ...] = ()
    weak: bool = False
    text: str = ""
    words: Size = 0
    checksum: str = ""

    def __str__(self) -> str:
        if self.kind in ("array", "key"):
            return f"{self.dtype}{list(self.shape)}"
        return f"the {self.dtype} {self.text}" if self.kind == "number" else f"a {self.dtype}"

    def check(self) -> None:
        """Raises a ValueError where the record contradicts itself."""
        dtypes = _NUMBERS if self.kind == "number" else (self.dtype,)
        if self.kind not in ("array", "key", "number", "kept") or self.dtype not in dtypes:
            raise ValueError(f"{self.path} is recorded as a {self.kind} of {self.dtype}")
        if self.weak and self.shape:
            raise ValueError(f"{self.path} is recorded as a scalar of shape {self.shape}")
        if self.kind == "number":
            self.number  # noqa: B018 - raises where the text is not a number

    @property
    def number(self) -> bool | int | float | complex:
        """The value of a Python number."""
        return _NUMBERS[self.dtype](self.text)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape of the plain array that is stored: keys are stored as their words."""
        return (*self.shape, self.words) if self.kind == "key" else self.shape

    @property
    def stored_dtype(self) -> np.dtype:
        return jnp.dtype("uint32" if self.kind == "key" else self.dtype)

    @property
    def is_stored(self) -> bool:
        """Whether there are elements to store: Orbax does not accept empty arrays."""
        return self.kind in ("array", "key") and 0 not in self.shape


def named_leaves(tree: Any, escape: bool = True) -> list[tuple[str, Any]]:
    """The leaves with their paths, which are all different.

    Args:
        tree: The tree.
        escape: Whether to percent-encode characters that keys must not contain: ``{"a": {"b": 1}, "a/b": 2}`` has
            leaves ``a/b`` and ``a%2Fb``. Checkpoints of the first version did not.
    """
    seen: Counter[str] = Counter()
    named = []
    for keys, leaf in tree_flatten_with_path(tree)[0]:
        parts = (keystr((key,), simple=True) for key in keys)
        path = "/".join(_escaped(part) if escape else part for part in parts) or "state"
        seen[path] += 1  # a user-defined node may give several children one key
        named.append((path if seen[path] == 1 else f"{path}#{seen[path]}", leaf))
    return named


def _escaped(key: str) -> str:
    return _RESERVED.sub(lambda found: quote(found[0], safe="", errors="surrogatepass"), key) or "%"


def describe(path: str, leaf: Any) -> SavedLeaf:
    """The record of a leaf."""
    if type(leaf) in (bool, int, float, complex):
        return SavedLeaf(path, "number", type(leaf).__name__, text=repr(leaf))
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return SavedLeaf(path, "kept", type(leaf).__name__)
    aval = jax_compat.abstract(leaf)
    if not jax_compat.is_key_dtype(aval.dtype):
        return SavedLeaf(path, "array", str(aval.dtype), tuple(aval.shape), bool(aval.weak_type))
    name = jax.random.key_impl(leaf)
    if not isinstance(name, str):
        raise CheckpointError(f"{path} holds random keys of the custom kind {name}; save jax.random.key_data of them")
    words = jax.eval_shape(jax.random.key_data, leaf).shape[-1]
    return SavedLeaf(path, "key", str(aval.dtype), tuple(aval.shape), text=name, words=words)


def words_of(record: SavedLeaf, leaf: Any) -> object:
    """A leaf with the words of random keys in place of keys."""
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise CheckpointError(
            f"{record.path} of the state is deleted: it was donated to a step; save the state that the step returned"
        )
    return jax.random.key_data(leaf) if record.kind == "key" else leaf


def stored(record: SavedLeaf, array: Any, of_some: bool) -> np.ndarray | jax.Array:
    """The plain array that is stored for a leaf; ``of_some``: only some processes have it."""
    # An array on one process's own devices is the same in all processes: the first one writes it.
    is_local = isinstance(array, jax.Array) and not of_some and jax.process_count() > 1 and array.is_fully_addressable
    return np.asarray(array, record.stored_dtype) if is_local or not isinstance(array, jax.Array) else array


@dataclass(frozen=True)
class Wanted:
    """One leaf of the state that is to be restored.

    Attributes:
        path: As in `SavedLeaf`.
        leaf: The leaf itself if it is not an array.
        dtype: An array's dtype; None for anything else.
        shape: Its shape.
        sharding: The sharding that it is to have.
    """

    path: str
    leaf: Any = None
    dtype: str | None = None
    shape: tuple[int, ...] = ()
    sharding: Any = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.dtype is not None else str(describe(self.path, self.leaf))

    def is_read_in_place(self, saved: SavedLeaf) -> bool:
        """Whether the processes that have the leaf's devices read it as it is stored, without the others."""
        is_plain = saved.kind == "array" and saved.is_stored and not saved.weak
        return is_plain and isinstance(self.sharding, NamedSharding)

    def takes(self, saved: SavedLeaf) -> bool:
        """Whether the saved leaf has the same type."""
        if self.dtype is None:
            return saved.kind in ("number", "kept") and describe(self.path, self.leaf).kind == saved.kind
        if saved.kind == "number":
            return (self.shape, self.dtype) == ((), str(jax_compat.abstract(saved.number).dtype))
        return (self.shape, self.dtype) == (saved.shape, saved.dtype)

    def fill(self, saved: SavedLeaf, array: Any) -> Any:
        """The restored leaf, from its record and the stored array."""
        if self.dtype is None:
            return saved.number if saved.kind == "number" else self.leaf
        if saved.kind == "number":
            return put([saved.number], [self.sharding])[0]
        is_stack = isinstance(self.sharding, StackSharding)
        if not saved.is_stored and is_stack:
            array = np.zeros(saved.stored_shape, saved.stored_dtype)
        elif not saved.is_stored:
            empty = np.zeros(saved.stored_shape, saved.stored_dtype)
            array = jax.make_array_from_callback(empty.shape, self.sharding, lambda index: empty[index])
        if saved.kind == "key":
            keys = jax.random.wrap_key_data(array, impl=saved.text)
            return stacked(keys, self.sharding) if is_stack else put([keys], [self.sharding])[0]
        if saved.weak:
            return put([np.asarray(array).item()], [self.sharding])[0]
        return placed(array, self.sharding)


def check_alike(saved: Sequence[SavedLeaf], wanted: Sequence[Wanted], where: str) -> None:
    """Refuses a checkpoint of another state; the first path that differs is named, with both types."""
    there, here = {leaf.path: leaf for leaf in saved}, {leaf.path: leaf for leaf in wanted}
    advice = "restore it into a function that was planned for the state it was saved from"
    for path, leaf in here.items():
        if path not in there:
            raise CheckpointError(f"{where} has no {path}, which is {leaf} here; {advice}")
        if not leaf.takes(there[path]):
            raise CheckpointError(f"{where} has {path} as {there[path]} and it is {leaf} here; {advice}")
    for path, record in there.items():
        if path not in here:
            raise CheckpointError(f"{where} has {path} as {record} and there is no such leaf here; {advice}")
