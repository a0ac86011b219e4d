"""`mw.reshard`: an array with one sharding on some devices becomes one with another sharding on any other devices."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from meshwright import jax_compat, jax_devices
from meshwright.errors import ShardingError
from meshwright.runtime.cpu_turns import put_in_turn
from meshwright.runtime.processes.sharing import put
from meshwright.runtime.transfer.choice import chosen
from meshwright.runtime.transfer.routes import Box, Move, find_route
from meshwright.runtime.transfer.steps import Steps
from meshwright.runtime.transfer.transports import Keys, Transport

_KEPT = 1024  # transfers that `reshard` remembers


def reshard(array: Any, sharding: Any) -> jax.Array:
    """Moves an array to the devices of a sharding, split as the sharding says.

    The devices may be the array's own, others, or some of both, in any number. Each device receives only what it needs
    and does not have, from a device that is near; what several devices of one process need crosses between processes
    once. A part of the array that stays on its device is not copied: both arrays share its memory, as with
    `jax.device_put`, so that donating the one deletes the other.

    The route is found, and programs that cut and join pieces are compiled, at the first call for a shape, dtype, and
    pair of shardings. Calls do not wait for the data.

    With several processes, those that have devices of the old or the new sharding call it in the same order. Numbers,
    arrays of NumPy, and arrays of JAX that were not placed on devices by a sharding are the same in all of them.

    Args:
        array: An array of JAX or NumPy, or a number.
        sharding: Any sharding of JAX that divides the array's shape, or one device.

    Returns:
        The array with that sharding.

    Raises:
        ShardingError: The array was deleted or is being traced, or the sharding does not divide its shape.
        ProcessError: Another process ended, or does not send its part.

    Examples:
        >>> import jax, numpy as np, meshwright as mw
        >>> from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
        >>> first = SingleDeviceSharding(jax.devices()[0])
        >>> mesh = Mesh(np.array(jax.devices()[-2:]), ("x",))
        >>> array = mw.reshard(np.arange(8.0), first)
        >>> mw.reshard(array, NamedSharding(mesh, PartitionSpec("x"))).sharding.mesh.shape["x"]
        2
    """
    if isinstance(sharding, jax.Device):
        sharding = SingleDeviceSharding(sharding)
    if hasattr(array, "array_type"):  # a stack of a pipeline's layers
        array = array.array()
    if not isinstance(array, jax.Array):
        return _from_host(array, sharding)
    _check_array(array)
    if jax.process_count() > 1 and not getattr(array, "committed", True):
        return _from_host(array, sharding)  # each process has made it on a device of its own
    return _transfer(array.shape, array.dtype, array.sharding, sharding)(array)


class Transfer:
    """Moves arrays of one type from one sharding to another; made once and called for each array.

    Args:
        shape: The shape of the arrays.
        dtype: Their dtype.
        source: The sharding they have.
        target: The sharding they get.
        group_of: Which group each device belongs to; devices of a group share a fast link, and what several of them
            need is sent to one of them. By default the devices of a process are a group.
        transport: How pieces get from one process to another; by default what the processes chose (`choice.py`).
        timeout_s: Seconds to wait for a process that exists and does not take part. That one ended is noticed at once.

    Attributes:
        route: Which pieces move from where to where.

    Raises:
        ShardingError: A sharding does not divide the shape.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        source: Any,
        target: Any,
        *,
        group_of: Callable[[Any], Hashable] = lambda device: device.process_index,
        transport: type[Transport] | None = None,
        timeout_s: float = 300.0,
    ):
        self.shape, self.dtype, self.source, self.target = tuple(shape), dtype, source, target
        held, needed = boxes(self.shape, source), boxes(self.shape, target)
        itemsize = jax_compat.itemsize(dtype)
        self.route = find_route(held, needed, itemsize, group_of)
        self._is_local = source.is_fully_addressable and target.is_fully_addressable
        self._is_plain = not all(self.shape) or not (_is_usual(source) and _is_usual(target))
        self._is_aligned = self._is_local and self.route.is_aligned(held, needed, itemsize, group_of)
        self._copy = jax_devices.shard_copier(target, dtype) if self._is_aligned else None
        if not self._is_local and not (_is_usual(source) and _is_usual(target)):
            raise ShardingError(
                f"arrays in {source.memory_kind} cannot become arrays in {target.memory_kind} of other processes; move "
                "them to the usual memory of their devices first"
            )

        transport = transport or chosen().transport

        def connect(moves: Sequence[Move]) -> Transport:
            if not jax_compat.is_key_dtype(dtype):
                return transport(moves, dtype, timeout_s)
            return Keys(moves, dtype, lambda bits: transport(bits, np.dtype("uint32"), timeout_s))

        self._steps = None if self._is_plain or self._is_aligned else Steps(self.route, held, needed, dtype, connect)

    def __call__(self, array: Any) -> jax.Array:
        """Moves one array; takes the arguments of `start`, and raises its errors."""
        if self._copy is None:
            return self.start(array)()
        return self._copy(self._checked(array))

    def start(self, array: Any) -> Callable[[], Any]:
        """Begins to move an array.

        Where devices of several processes are concerned, all of them call this in the same order, and then the
        functions it returns. A process with none of the devices need not call it.

        Args:
            array: The array; in a process that holds no part of it None suffices.

        Returns:
            A function that waits for pieces from other processes, and returns the result. In a process that holds no
            part of it the result is an array without addressable shards.

        Raises:
            ShardingError: The array is not of the type or has not the sharding that this transfer is for.
            ProcessError: Another process ended or did not answer; the returned function raises it, too.
        """
        if array is not None or self.source.has_addressable_devices:
            array = self._checked(array)
        if self._copy is not None:
            moved = self._copy(array)
        elif self._is_local and (self._steps is None or getattr(array, "weak_type", False)):
            moved = put_in_turn([array], [self.target])[0]  # arrays made of pieces would be strongly typed
        elif self._steps is None:
            empty = np.zeros(self.target.shard_shape(self.shape), self.dtype)
            moved = jax.make_array_from_callback(self.shape, self.target, lambda _: empty, empty.dtype)
        else:
            return self._run(self._steps.start(array))
        return lambda: moved

    def _run(self, finish: Callable[[], list[Any]]) -> Callable[[], Any]:
        def assemble() -> jax.Array:
            return jax.make_array_from_single_device_arrays(self.shape, self.target, finish(), dtype=self.dtype)

        if not self._is_local:
            return assemble
        moved = assemble()
        return lambda: moved

    def _checked(self, array: Any) -> jax.Array:
        """The array, committed to its devices: JAX runs programs of one that is not on the default device."""
        _check_array(array)
        if array.shape != self.shape or array.dtype != self.dtype or array.sharding != self.source:
            raise ShardingError(
                f"the array is {array.dtype}{list(array.shape)} with the sharding {array.sharding}, and this transfer "
                f"is for {self.dtype}{list(self.shape)} with {self.source}; make another Transfer, or call mw.reshard"
            )
        return array if getattr(array, "committed", True) else jax.device_put(array, self.source)


@lru_cache(maxsize=_KEPT)
def _transfer(shape: tuple[int, ...], dtype: Any, source: Any, target: Any) -> Transfer:
    return Transfer(shape, dtype, source, target)


def _from_host(value: Any, sharding: Any) -> jax.Array:
    """A number or an array of the host, which must be the same in all processes."""
    if isinstance(value, jax.ShapeDtypeStruct):
        raise ShardingError(f"array is {value}, a type without values; give an array")
    try:
        shape = jax.typeof(value).shape
    except OverflowError as error:
        raise ShardingError(f"array is {value}: {error}; give it a dtype, such as numpy.float32({value})") from None
    except TypeError:
        raise ShardingError(
            f"array is {type(value).__name__}, which JAX has no type for; give an array or a number, and move the "
            "leaves of a tree by jax.tree.map"
        ) from None
    boxes(shape, sharding)
    return put([value], [sharding])[0]


def _check_array(array: Any) -> None:
    if not isinstance(array, jax.Array) or isinstance(array, jax.core.Tracer):
        what = "being traced" if isinstance(array, jax.core.Tracer) else f"a {type(array).__name__}"
        raise ShardingError(
            f"array is {what}, and only arrays on devices can be moved; inside of a jitted function call "
            "jax.lax.with_sharding_constraint"
        )
    if array.is_deleted():
        raise ShardingError(
            f"the array {array.dtype}{list(array.shape)} was deleted or donated to a jitted function; use that "
            "function's result instead, or do not donate it"
        )


def boxes(shape: tuple[int, ...], sharding: Any) -> dict[Any, Box]:
    """The box of each device, in the order of the sharding's devices.

    Raises:
        ShardingError: The sharding does not divide the shape, or is none.
    """
    if not isinstance(sharding, Sharding):
        raise ShardingError(
            f"sharding is {sharding!r}; give a sharding of JAX, such as jax.sharding.NamedSharding(mesh, spec), or a "
            "device"
        )
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        raise ShardingError(f"the mesh of {sharding} is abstract: it has no devices; give a jax.sharding.Mesh")
    if isinstance(sharding, NamedSharding) and sharding.spec.unreduced:
        raise ShardingError(f"{sharding.spec} keeps partial sums, which cannot be moved; reduce them first")
    refusal = f"an array of shape {list(shape)} cannot have the sharding {sharding}"
    if isinstance(sharding, NamedSharding) and len(sharding.spec) > len(shape):
        raise ShardingError(f"{refusal}: it has {len(shape)} dims, and the spec has entries for {len(sharding.spec)}")
    try:
        indices = sharding.devices_indices_map(shape)
    except ValueError as error:
        raise ShardingError(f"{refusal}: {str(error).splitlines()[0]:.300}") from error
    return {
        device: tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))
        for device, index in indices.items()
    }


def _is_usual(sharding: Any) -> bool:
    """Whether arrays with a sharding are in the usual memory of their devices."""
    usual = next(iter(sharding.device_set)).default_memory().kind
    return sharding.memory_kind in (None, usual)
