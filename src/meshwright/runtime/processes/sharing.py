"""Shares the plan of a function, and arrays on the devices of all processes, between the processes of one program."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from meshwright import jax_compat, jax_devices
from meshwright.errors import ShardingError
from meshwright.graph import Traced
from meshwright.hardware import Cluster, Mesh
from meshwright.hardware.axes import Shape
from meshwright.hardware.load import is_local
from meshwright.plan_files.known_plans import of_call
from meshwright.plan_files.storage import plan_from_json, plan_to_json
from meshwright.plans.plan import PlanData
from meshwright.profiler import cluster as find_cluster
from meshwright.runtime.cpu_turns import put_in_turn
from meshwright.runtime.processes import peers


def shared_plan(name: str, traced: Traced, make: Callable[[], PlanData]) -> PlanData:
    """The plan that `make` returns; with several processes, all of them get the first process's plan.

    A solver that stops by the clock may find another plan on another machine, and programs that are split differently
    would wait for each other for ever. So one process plans, and the others use its plan.

    Args:
        name: The function's name.
        traced: The function.
        make: Plans it.

    Raises:
        ShardingError: The processes call the function with arguments of different types.
    """
    if jax.process_count() == 1:
        return make()
    _check_types(name, traced)
    if jax.process_index() == 0:
        try:
            plan = make()
        except Exception:
            jax_devices.broadcast(b"")
            raise
        jax_devices.broadcast(json.dumps(plan_to_json(plan)).encode())
        return plan
    text = jax_devices.broadcast(b"")
    if not text:
        make()  # the error that stopped the first process is raised here, too
        raise ShardingError(f"process 0 could not plan {name}; its own message says why")
    return of_call(plan_from_json(json.loads(text)), traced)


def enter(program: Any) -> bool:
    """Begins a call that may run a program; returns whether the other processes expect it without an announcement.

    Raises:
        ProcessError: Another process ended, or makes another call.
    """
    if peers.current is None:
        return True
    peers.current.enter()
    return peers.current.runs is program


def leave(result: Any) -> None:
    """Ends a call, whose result may still be computed."""
    if peers.current is not None:
        peers.current.pace.end(result)


def runs(program: Any) -> None:
    """Records the program that the current call runs, once it was announced."""
    if peers.current is not None:
        peers.current.runs = program


def announce(name: str, names: Sequence[str], values: Sequence[Any], *, is_next: bool = False) -> None:
    """Announces a call to the other processes that `mw.initialize` connected, if it differs from the last one.

    Args:
        name: The function called.
        names: Its arguments' names.
        values: The arguments.
        is_next: Whether it is not a call of a parallelised function, but an action that all processes must take.
    """
    if peers.current is None:
        return
    types = {}
    for argument, value in zip(names, values, strict=True):
        for path, leaf in tree_flatten_with_path(value)[0]:
            where = "/".join([argument, *filter(None, [keystr(path, simple=True, separator="/")])])
            types[where] = describe_type(leaf)
    peers.current.announce(name, types, is_next=is_next)


def describe_type(leaf: Any) -> str:
    """Dtype and shape of an array or number; the class of anything else."""
    try:
        kind = jax_compat.abstract(leaf)
    except (TypeError, OverflowError):
        return type(leaf).__name__
    return f"{kind.dtype}{list(kind.shape)}"


def meet_to_measure(cluster: Cluster | str | None, mesh: Mesh | Shape | None) -> None:
    """Lets all processes measure the local devices together where a plan needs it, since only the first one plans."""
    if jax.process_count() > 1 and not isinstance(mesh, Mesh) and (cluster is None or is_local(cluster)):
        find_cluster("local")


def _check_types(name: str, traced: Traced) -> None:
    graph = traced.graph
    kinds = [graph.types[value] for value in graph.inputs]
    here = {p: f"{k.dtype}{list(k.shape)}" for p, k in zip(graph.input_paths, kinds, strict=True)}
    there: dict[str, str] = json.loads(jax_devices.broadcast(json.dumps(here).encode()))
    different = [int(i) for i in np.flatnonzero(_gather(here != there))]
    if not different:
        return
    advice = "all processes must call it with the same types; give parts of a batch through mw.batches"
    if here == there:
        raise ShardingError(f"process {different[0]} calls {name} with other types than process 0; {advice}")
    path = next(p for p in (*here, *there) if here.get(p) != there.get(p))
    raise ShardingError(
        f"{name} has {path} as {here.get(path, 'nothing')} in process {jax.process_index()} and as "
        f"{there.get(path, 'nothing')} in process 0; {advice}"
    )


def _gather(value: bool) -> np.ndarray:
    """The value of every process, in all of them."""
    from jax.experimental.multihost_utils import process_allgather

    return np.asarray(process_allgather(np.int32(value))).reshape(-1)


def put(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """`jax.device_put`, also onto devices of other processes: all must then give equal arrays.

    Raises:
        ShardingError: The processes give different arrays.
    """
    if jax.process_count() == 1:
        return put_in_turn(list(arrays), list(shardings))
    try:
        return [_put_global(array, sharding) for array, sharding in zip(arrays, shardings, strict=True)]
    except AssertionError as error:
        raise ShardingError(
            f"the processes call the function with different values: {str(error).splitlines()[0]:.200} Arrays from the "
            "host must be the same in all processes; give each process's part of a batch through mw.batches"
        ) from error


def _put_global(array: Any, sharding: Any) -> jax.Array:
    if not isinstance(array, jax.Array):
        return jax.device_put(array, sharding)
    if jax_compat.is_key_dtype(array.dtype):
        return jax.random.wrap_key_data(
            _put_global(jax.random.key_data(array), sharding), impl=jax.random.key_impl(array)
        )
    if array.is_fully_addressable:  # it is on this process's devices alone; JAX moves only arrays from the host
        return jax.device_put(array.item() if array.weak_type and not array.shape else np.asarray(array), sharding)
    return put_in_turn([array], [sharding])[0]
