"""Private or unstable JAX of devices and processes: copies between devices, and how processes meet and leave texts."""

import io
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from meshwright.jax_compat import is_key_dtype
from meshwright.jax_compat.versions import private

clusters = private("jax._src.clusters", "ClusterEnv")
compiler = private("jax._src.compiler", "get_compile_options")
config = private("jax._src.config", "compilation_cache_dir", "enable_compilation_cache")
distributed = private("jax._src.distributed", "global_state")
jax_lib = private("jax._src.lib", "xla_client")
serialize_executable = private("jax.experimental.serialize_executable", "serialize")

_Unpickler: Any = getattr(serialize_executable, "_JaxPjrtUnpickler", None)
_copy_arrays = getattr(jax_lib.xla_client, "batched_copy_array_to_devices_with_sharding", None)


def without_compilation_cache() -> AbstractContextManager:
    """A context in which programs are compiled, even if a cache on disk has them."""
    return config.enable_compilation_cache(False)


def copy_shards(arrays: Sequence[Any], shardings: Sequence[Any], *, may_alias: bool = True) -> list[Any]:
    """Copies arrays to other devices of this process, each shard as it is to the device at its place in the sharding.

    `jax.device_put` does the same where the shardings split alike, in about twice as long on the host.

    Args:
        arrays: The arrays.
        shardings: The sharding that each of them gets.
        may_alias: Whether a shard that is on its device already may be shared by both arrays.
    """
    if _copy_arrays is None or not arrays or is_key_dtype(arrays[0].dtype):
        return jax.device_put(list(arrays), list(shardings), may_alias=may_alias)
    devices = [sharding._internal_device_list for sharding in shardings]
    kinds = jax_lib.xla_client.ArrayCopySemantics
    kind = kinds.REUSE_INPUT if may_alias else kinds.ALWAYS_COPY
    return _copy_arrays(list(arrays), devices, list(shardings), [kind] * len(arrays))


def shard_copier(sharding: Any, dtype: Any) -> Callable[[Any], Any]:
    """`copy_shards` for many arrays of one dtype, one by one, that get one sharding."""
    if _copy_arrays is None or is_key_dtype(dtype):
        return lambda array: jax.device_put(array, sharding)
    copy, rest = _copy_arrays, ([sharding._internal_device_list], [sharding])
    kinds = [jax_lib.xla_client.ArrayCopySemantics.REUSE_INPUT]
    return lambda array: copy([array], *rest, kinds)[0]


def load_for(compiled: Any, devices: Sequence[Any], others: Sequence[Any]) -> Any | None:
    """A program that was compiled for some devices, for others of the same kind; None where it must be compiled again.

    JAX's persistent cache does the same for GPUs: it loads a program for other devices than it was compiled for. On
    CPUs a program that came out of that cache is saved without its machine code, so there the cache serves alone.
    """
    platform = devices[0].platform
    if _Unpickler is None or platform not in ("cpu", "gpu") or (platform == "cpu" and _has_compilation_cache()):
        return None
    try:
        text, in_tree, out_tree = serialize_executable.serialize(compiled)
        unloaded, types, no_kwargs = _moved_executable(text, devices, others)
    except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError):
        return None  # not every backend saves programs, and not every program can be saved
    return jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(types), out_tree, no_kwargs=no_kwargs)


def _has_compilation_cache() -> bool:
    """Whether JAX keeps programs on disk."""
    return bool(config.enable_compilation_cache.value and config.compilation_cache_dir.value)


def _moved_executable(text: bytes, devices: Sequence[Any], others: Sequence[Any]) -> Any:
    """What `serialize` wrote, with some devices in place of others."""
    places = np.array([[device.id for device in others]])
    options = compiler.get_compile_options(1, len(others), device_assignment=places)
    backend = others[0].client

    class Loader(_Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            if pid[0] != "exec":
                return super().persistent_load(pid)
            return backend.deserialize_executable(pid[1], self.execution_devices, options)

    loader = Loader(io.BytesIO(text), backend, tuple(others))
    loader.devices_by_id = {old.id: new for old, new in zip(devices, others, strict=True)}
    return loader.load()


def of_first_process(number: float) -> float:
    """The first process's number, in all processes; all must ask together."""
    if jax.process_count() == 1:
        return number
    from jax.experimental.multihost_utils import broadcast_one_to_all

    return float(broadcast_one_to_all(np.float32(number)))


def largest_number(number: float) -> float:
    """The largest of all processes' numbers, in all processes; all must ask together."""
    from jax.experimental.multihost_utils import process_allgather

    return float(np.max(process_allgather(np.float32(number))))


def sends_across_processes(device: Any) -> bool:
    """Whether `jax.device_put` sends from a device to one of another process without the host."""
    return bool(getattr(device.client, "supports_cross_host_transfers", False))


def broadcast(text: bytes) -> bytes:
    """The first process's text, in all processes; all must ask together."""
    from jax.experimental.multihost_utils import broadcast_one_to_all

    size = int(broadcast_one_to_all(np.int32(len(text))))
    sent = np.zeros(size, np.uint8)
    if jax.process_index() == 0:
        sent[:] = np.frombuffer(text, np.uint8)
    return np.asarray(broadcast_one_to_all(sent)).tobytes() if size else b""


def meet(place: str, timeout_s: float) -> bool:
    """Waits until all processes are at a place; False where some did not come in time."""
    client = distributed.global_state.client
    if jax.process_count() == 1 or client is None:
        return True
    try:
        client.wait_at_barrier(place, int(1000 * timeout_s))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def start_transfer_server(host: str) -> Any:
    """Starts a server from which other processes pull arrays, at a free port of one of this machine's addresses."""
    from jax.experimental import transfer

    address = f"[{host}]:0" if ":" in host else f"{host}:0"
    return transfer.start_transfer_server(jax.local_devices()[0].client, address, [address])


def coordinator_address() -> str | None:
    """Host and port of the process that coordinates all others; None where there is only one."""
    return distributed.global_state.coordinator_address


def detect_processes(
    address: str | None, count: int | None, process: int | None, method: str | None, timeout_s: float
) -> tuple[Any, Any, Any]:
    """The coordinator's address, the number of processes, and the index of this one; None is detected."""
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    if method == "deactivate" or None not in (address, count, process):
        return address, count, process
    found = clusters.ClusterEnv.auto_detect_unset_distributed_params(
        address, count, process, None, method, max(1, round(timeout_s))
    )
    return found[:3]


def has_preemption_service() -> bool:
    """Whether JAX itself receives SIGTERM here and has all processes agree on a step to end at."""
    return distributed.global_state.preemption_sync_manager is not None


def publish(key: str, text: str) -> bool:
    """Puts a text where all processes can read it; False where it is no longer possible, as when all are ending."""
    client: Any = distributed.global_state.client
    try:
        client.key_value_set(key, text, allow_overwrite=True)
    except (AttributeError, jax.errors.JaxRuntimeError):  # there is no client any more once JAX has shut down
        return False
    return True


def read_published(key: str, timeout_s: float) -> str | None:
    """The text that some process put there; None where none did in time.

    Raises:
        ConnectionError: The process that keeps the texts cannot be reached.
    """
    client: Any = distributed.global_state.client
    try:
        return client.blocking_key_value_get(key, max(1, int(1000 * timeout_s)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise ConnectionError(str(error).splitlines()[0]) from error


def all_published(folder: str) -> dict[str, str]:
    """All texts under a key that ends in a slash, by the rest of their keys."""
    client: Any = distributed.global_state.client
    found = client.key_value_dir_get(folder)
    return {key.removeprefix(folder): text for key, text in found}


def forget_published(key: str) -> None:
    """Removes a text, or all under a key that ends in a slash."""
    client: Any = distributed.global_state.client
    client.key_value_delete(key)
