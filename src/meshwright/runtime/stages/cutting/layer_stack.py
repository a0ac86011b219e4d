"""Arrays that are stacked over layers, of which the stages of a pipeline have unequal numbers.

An array of JAX has equal parts on all its devices. So where stages have equally many layers, side by side, a stack is
one array of JAX (`layout.stacked_mesh`). Otherwise it is a `LayerStack`: one array of JAX for each virtual stage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meshwright.runtime.cpu_turns import in_turn
from meshwright.runtime.transfer.reshard import reshard


@dataclass(frozen=True)
class StackSharding:
    """How a stack is placed.

    Attributes:
        bounds: The first layer of each piece, and one past its last.
        pieces: The sharding of each piece.
    """

    bounds: tuple[tuple[int, int], ...]
    pieces: tuple[NamedSharding, ...]

    @property
    def device_set(self) -> set[Any]:
        """The devices of all pieces."""
        return {device for piece in self.pieces for device in piece.device_set}


class LayerStack:
    """An array of all layers, whose layers are on the devices of different stages.

    It has the shape and dtype of the whole array; NumPy converts it, and `array()` makes one array of JAX.

    Args:
        pieces: The layers of each virtual stage, in order.
        sharding: Where they are.
    """

    def __init__(self, pieces: Sequence[Any], sharding: StackSharding):
        self.pieces, self.sharding = tuple(pieces), sharding

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.sharding.bounds[-1][1], *self.pieces[0].shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.pieces[0].dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def array_type(self) -> jax.ShapeDtypeStruct:
        """The type of the whole array."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    def array(self) -> jax.Array:
        """The whole array, spread over all devices; with several processes all must ask for it."""
        rest = [reshard(piece, spread_sharding(piece.shape, first=1)) for piece in self.pieces]
        join = jax.jit(jnp.concatenate, out_shardings=spread_sharding(self.shape, first=1))
        found: jax.Array = in_turn(join, jax.devices())(rest)
        return found

    def is_deleted(self) -> bool:
        """Whether a step that it was donated to has taken over its memory."""
        return any(piece.is_deleted() for piece in self.pieces)

    def block_until_ready(self) -> "LayerStack":
        """Waits until all layers are computed."""
        jax.block_until_ready(self.pieces)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.concatenate([np.asarray(piece) for piece in self.pieces]).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        return np.asarray(self)[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        held = " + ".join(str(end - begin) for begin, end in self.sharding.bounds)
        return f"<LayerStack: {self.dtype}{list(self.shape)}, layers {held}>"


def stacked(array: Any, sharding: StackSharding) -> LayerStack:
    """An array of JAX or NumPy, or another stack, as a stack; with several processes all must ask for it."""
    if isinstance(array, LayerStack):
        if array.sharding == sharding:
            return array
        array = array.array()
    if not isinstance(array, jax.Array):
        pieces: list[np.ndarray] | list[jax.Array] = [np.asarray(array)[begin:end] for begin, end in sharding.bounds]
    else:
        place = spread_sharding(array.shape, first=1)
        cut = in_turn(_cutting(sharding.bounds, place), jax.devices())
        pieces = cut(reshard(array, place))
    return LayerStack([reshard(piece, own) for piece, own in zip(pieces, sharding.pieces, strict=True)], sharding)


def placed(array: Any, sharding: NamedSharding | StackSharding) -> jax.Array | LayerStack:
    """An array in a sharding of either kind."""
    if isinstance(sharding, StackSharding):
        return stacked(array, sharding)
    return array if getattr(array, "sharding", None) == sharding else reshard(array, sharding)


@lru_cache(maxsize=256)
def _cutting(bounds: tuple[tuple[int, int], ...], place: NamedSharding) -> Callable[[Any], list[jax.Array]]:
    return jax.jit(lambda x: [x[begin:end] for begin, end in bounds], out_shardings=[place] * len(bounds))


def spread_sharding(shape: Sequence[int], first: int = 0) -> NamedSharding:
    """A sharding over all devices, along one dim from ``first`` on: of all, the one with the smallest parts.

    Where the devices do not divide any dim, groups of them have equal parts.
    """
    devices = jax.devices()
    found, most = -1, 1
    for dim, size in enumerate(shape):
        parts = max((n for n in range(1, len(devices) + 1) if not (size % n or len(devices) % n)), default=1)
        if dim >= first and size and parts > most:
            found, most = dim, parts
    mesh = Mesh(np.array(devices).reshape(most, -1), ("devices", "copies"))
    return NamedSharding(mesh, PartitionSpec(*(None,) * found, "devices") if found >= 0 else PartitionSpec())
