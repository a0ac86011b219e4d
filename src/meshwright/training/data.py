"""Prefetches batches and puts them on the devices in the shardings that a parallelised function needs."""

import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh as DeviceMesh
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten, tree_unflatten

from meshwright import jax_compat
from meshwright.errors import ShardingError
from meshwright.facade import Plan
from meshwright.runtime.cpu_turns import put_in_turn
from meshwright.runtime.placement import argument_shardings
from meshwright.runtime.processes import peers
from meshwright.runtime.processes.agreement import Agreement, Stopped
from meshwright.runtime.spmd import argument_leaves
from meshwright.training.parallelize import Parallelized

_AHEAD = 2  # batches that are prefetched
_STOP_S = 5.0  # how long to wait for a busy iterable whose batches are no longer needed


def batches(iterable: Iterable[Any], function: Parallelized) -> "Batches":
    """Iterates over batches, which a thread prefetches and puts in the shardings of a function's plan.

    With one process each item is a whole batch. With several, each process gives its own part of every batch, and all
    get the whole as one array: of n processes, process p gives rows ``p·B/n`` to ``(p+1)·B/n`` of each leaf of B rows,
    in full along the other dims, and the same value of leaves without dims. The parts must be equally large, and all
    processes must give the same number of batches: this is checked ahead, and if it does not hold, or if one process's
    iterable raises an error, all of them get an error that names the process and the cause, at the same batch. This
    holds for every plan: rows that a plan needs on other devices are moved.

    Args:
        iterable: Yields batches: pytrees of NumPy arrays, of objects that convert to them, or of `jax.Array`s. It is
            read in another thread, two batches ahead, and may reuse its buffers.
        function: Made by `parallelize`; the batch is the first of its ``batch_argnums``. Until it has a plan for a
            batch, that batch is passed on unchanged, and the function plans when it is called with it.

    Returns:
        An iterator; its `close` stops fetching, and so does deleting it. An error of the iterable is raised by the
        iterator, after the batches that came before it.

    Examples:
        >>> import numpy as np, meshwright as mw
        >>> step = mw.parallelize(lambda w, x: (w + x.sum(), x.max()), cluster="1x1 cpu")
        >>> w = np.float32(0)
        >>> for x in mw.batches([np.ones(4), np.ones(4)], step):
        ...     w, top = step(w, x)
        >>> float(w)
        8.0
    """
    if not isinstance(function, Parallelized):
        raise ShardingError(f"batches are for a function that mw.parallelize made, not for {function!r:.60}")
    if not function.settings.batch_argnums:
        raise ShardingError(f"{function.__name__} has no batch: batch_argnums is empty; name its position there")
    return Batches(iterable, function)


class Batches(Iterator[Any]):
    """An iterator over placed batches; made by `batches`."""

    def __init__(self, iterable: Iterable[Any], function: Parallelized):
        if peers.current is not None:
            peers.current.announce(f"mw.batches for {function.__name__}", {}, is_next=True)
        self._placer = _Placer(function)
        self._feed = _Feed(iter(iterable), self._placer.prepare, function.__name__)
        self._finalizer = weakref.finalize(self, self._feed.stop)  # when this is deleted, and when Python ends
        self._feed.thread.start()

    def __next__(self) -> Any:
        if not self._finalizer.alive:
            raise StopIteration
        batch, is_last, failure = self._feed.take()
        if not is_last:
            return self._placer.place(batch)
        self.close()
        if failure is not None:
            raise failure
        raise StopIteration

    def close(self) -> None:
        """Stops fetching."""
        self._finalizer()


class _Feed:
    """The state that the fetching thread shares with the consumer; it holds no reference to the iterator it serves."""

    def __init__(self, source: Iterator[Any], prepare: Any, name: str):
        self.thread = Thread(target=self._run, name="meshwright-batches", daemon=True)
        self._source = source
        self._prepare = prepare
        self._ready: SimpleQueue[tuple[Any, bool, BaseException | None]] = SimpleQueue()
        self._room = Semaphore(_AHEAD)
        self._is_stopped = False
        self._agreement = Agreement(name, lambda: self._is_stopped)

    def take(self) -> tuple[Any, bool, BaseException | None]:
        """The next batch, whether the batches have ended, and the error that ended them."""
        began = time.perf_counter()
        taken = self._ready.get()
        if peers.current is not None:
            peers.current.pace.waited(time.perf_counter() - began)
        self._room.release()
        return taken

    def stop(self) -> None:
        self._is_stopped = True
        self._room.release()
        self.thread.join(_STOP_S)

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._may_fetch():
                began = time.perf_counter()
                try:
                    batch = next(self._source)
                except StopIteration:
                    self._agreement.on_end()
                    break
                prepared = self._prepare(batch)
                if peers.current is not None:
                    peers.current.pace.fetched(time.perf_counter() - began)
                self._agreement.on_batch(prepared)
                self._ready.put((prepared, False, None))
            self._agreement.leave()
        except Stopped:
            self._agreement.leave()
        except BaseException as error:
            failure = error
            self._agreement.leave(error)
        self._ready.put((None, True, failure))

    def _may_fetch(self) -> bool:
        self._room.acquire()
        return not self._is_stopped


@dataclass(frozen=True)
class _Placement:
    """The shardings of one plan's batch.

    Attributes:
        tree: The batch's structure.
        types: Shape and dtype of each array; None for leaves that are not arrays.
        shardings: The sharding of each array; None for leaves that are not arrays, and for all of a pipeline's, whose
            stages take their own rows.
    """

    tree: Any
    types: Sequence[Any]
    shardings: Sequence[NamedSharding | None]

    def fits(self, types: Sequence[Any]) -> bool:
        """Whether the batch has arrays of these types."""
        return all(wanted is None or wanted == given for wanted, given in zip(self.types, types, strict=True))


class _Placer:
    """Places batches for one function.

    With one process the fetching thread places them, as soon as there is a plan. With several, all processes must act
    in the same order, so the thread that calls the function places them.
    """

    def __init__(self, function: Parallelized):
        self._function = function
        static, number = function.settings.static_argnums, function.settings.batch_argnums[0]
        self._position = number - sum(n < number for n in static)
        self._placements: dict[int, tuple[Plan, _Placement | None]] = {}

    def prepare(self, batch: Any) -> Any:
        """A fetched batch, copied from buffers that may be reused, and placed if possible."""
        leaves, tree = tree_flatten(batch)
        copied = tree_unflatten(tree, [_own(leaf) for leaf in leaves])
        return self.place(copied) if jax.process_count() == 1 else copied

    def place(self, batch: Any) -> Any:
        """The batch in the shardings of its plan; unchanged if there is no plan."""
        leaves, tree = tree_flatten(batch)
        if jax.process_count() == 1:
            placement = self._find(tree, leaves, 1)
            return batch if placement is None else tree_unflatten(tree, _put(leaves, placement.shardings))
        placement = self._find(tree, leaves, jax.process_count())
        shardings = [None] * len(leaves) if placement is None else placement.shardings
        return tree_unflatten(tree, [_put_part(leaf, s) for leaf, s in zip(leaves, shardings, strict=True)])

    def _find(self, tree: Any, leaves: list[Any], num_parts: int) -> _Placement | None:
        """The placement of the newest plan for batches like this one."""
        types = [_type(leaf, num_parts) for leaf in leaves]
        for plan in self._function.plans:
            placement = self._placement(plan)
            if placement is not None and placement.tree == tree and placement.fits(types):
                return placement
        return None

    def _placement(self, plan: Plan) -> _Placement | None:
        if id(plan) not in self._placements:
            self._placements[id(plan)] = plan, self._make(plan)  # the plan is kept alive so that its id is not reused
        return self._placements[id(plan)][1]

    def _make(self, plan: Plan) -> _Placement | None:
        arguments = plan.in_tree.children()
        if self._position >= len(arguments):
            return None
        places = argument_leaves(plan.in_tree)[self._position]
        types = [None if t.role == "static" else (t.shape, t.dtype) for t in plan.arguments[places]]
        return _Placement(arguments[self._position], types, argument_shardings(plan)[places])


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _own(leaf: Any) -> Any:
    """The leaf, or a copy if the iterable might write into it again: on CPU, JAX may use the buffer without a copy."""
    return np.array(leaf) if not isinstance(leaf, jax.Array) and hasattr(leaf, "__array__") else leaf


def _type(leaf: Any, num_parts: int) -> tuple[tuple[int, ...], str] | None:
    """Shape and dtype of the whole array that a part belongs to; None for leaves that are not arrays."""
    try:
        aval = jax_compat.abstract(leaf)
    except TypeError:
        return None
    shape = _whole(aval.shape, num_parts) if _is_part(leaf) else tuple(aval.shape)
    return shape, str(aval.dtype)


def _whole(shape: Sequence[int], num_parts: int) -> tuple[int, ...]:
    return (shape[0] * num_parts, *shape[1:]) if shape else ()


def _put(leaves: Sequence[Any], shardings: Sequence[NamedSharding | None]) -> list[Any]:
    """The arrays in their shardings, put at once; Python numbers stay, since arrays would need another plan."""
    moved = [i for i, leaf in enumerate(leaves) if _is_array(leaf) and shardings[i] is not None]
    placed = list(leaves)
    for i, array in zip(moved, put_in_turn([leaves[i] for i in moved], [shardings[i] for i in moved]), strict=True):
        placed[i] = array
    return placed


def _is_part(leaf: Any) -> bool:
    """Whether a leaf is this process's part, rather than an array that spans all processes already."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _put_part(part: Any, sharding: NamedSharding | None) -> Any:
    """The whole array that this process's part belongs to; without a sharding it is split by rows over processes."""
    if not _is_array(part) or not _is_part(part) or jax_compat.is_key_dtype(part.dtype):
        return part
    host = np.asarray(part)
    shape = _whole(host.shape, jax.process_count())
    if sharding is not None and _lies_by_rows(sharding, shape):
        return jax.make_array_from_process_local_data(sharding, host, shape)
    whole = jax.make_array_from_process_local_data(_rows(len(shape)), host, shape)
    return whole if sharding is None else put_in_turn([whole], [sharding])[0]


def _rows(num_dims: int) -> NamedSharding:
    """Each process's rows on all of its devices."""
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    grid = np.array(devices).reshape(jax.process_count(), -1)
    spec = PartitionSpec("process") if num_dims else PartitionSpec()
    return NamedSharding(DeviceMesh(grid, ("process", "device")), spec)


def _lies_by_rows(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    """Whether every device holds only rows that its own process gives."""
    if not shape:
        return True
    rows = shape[0] // jax.process_count()
    rows_of: dict[Any, Any] = dict(sharding.devices_indices_map(shape))
    for device, index in rows_of.items():
        start, stop, _ = index[0].indices(shape[0])
        if start < device.process_index * rows or stop > (device.process_index + 1) * rows:
            return False
    return True
