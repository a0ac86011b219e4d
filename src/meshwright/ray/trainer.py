"""`meshwright.ray.Trainer`: a training loop on the workers of a Ray cluster, started again when some are lost.

Ray Train starts one worker for each process, watches them, and starts all again on what is left when one is lost; JAX
cannot replace a single process. What is added here is the start of JAX in each worker, also on CPUs, by `mw.initialize`
as on any other cluster: the workers end together, within seconds, and name the one that was lost. JAX is started by the
thread that runs the loop, and not by a `Backend` of Ray Train, whose errors Ray does not count as a worker's: it would
give up where a worker is lost before the loop has begun.
"""

import logging
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import ray
import ray.train
import ray.train.collective
import ray.util
from ray.train.backend import Backend, BackendConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from meshwright.errors import ProcessError
from meshwright.plan_files import PLANS
from meshwright.runtime.processes.connections import RESERVED, reserved_port

_PART_S = 2.0  # for workers to learn that they will be ended; those that are lost learn nothing


class Trainer(DataParallelTrainer):
    """Runs a training loop on the workers of a Ray cluster, as one program of several processes.

    The loop is an ordinary one: it parallelises a train step, creates or restores its state, and saves with
    `meshwright.ray.save`. Ray starts all workers again when one is lost: with as many as there is room for, if
    ``num_workers`` is a range. The loop then begins anew, plans for the devices there are, and `meshwright.ray.restore`
    returns the state of the last complete checkpoint. After `mw.preempted()` returned True a loop saves and ends, and
    is started again, too.

    Args:
        train_loop: What each worker runs; it takes ``train_loop_config``, or nothing.
        scaling_config: Ray's `ScalingConfig`: ``num_workers`` processes, or ``(least, most)``, and their resources.
        run_config: Ray's `RunConfig`: the storage, which all workers must reach, ``FailureConfig(max_failures=…)`` and
            ``CheckpointConfig(num_to_keep=…)``.
        train_loop_config: The argument of the loop.
        devices_per_worker: How many virtual devices each worker has on CPUs. On GPUs, it has those that Ray gives it.
        timeout: Seconds that workers wait for each other when they start.
        heartbeat: Seconds after which a host that does not answer counts as lost.
        **options: Further arguments of Ray's `DataParallelTrainer`, such as ``datasets``.
    """

    def __init__(
        self,
        train_loop: Callable[..., Any],
        scaling_config: ray.train.ScalingConfig | None = None,
        run_config: ray.train.RunConfig | None = None,
        *,
        train_loop_config: dict[str, Any] | None = None,
        devices_per_worker: int = 1,
        timeout: float = 300.0,
        heartbeat: float = 10.0,
        **options: Any,
    ):
        scaling = scaling_config or ray.train.ScalingConfig()
        if devices_per_worker < 1:
            raise ProcessError(f"devices_per_worker is {devices_per_worker}; give 1 or more")
        is_cpu = not (scaling.use_gpu or scaling.use_tpu)
        if not is_cpu and devices_per_worker > 1:
            raise ProcessError(
                f"devices_per_worker is {devices_per_worker}, which is for CPUs; give the accelerators of each worker "
                "in ScalingConfig(resources_per_worker=…)"
            )

        @wraps(train_loop)
        def run(*given: Any) -> Any:
            _start(devices_per_worker if is_cpu else 0, timeout, heartbeat)
            result = train_loop(*given)
            _end()
            return result

        super().__init__(
            run,
            train_loop_config=train_loop_config,
            scaling_config=scaling,
            run_config=run_config,
            backend_config=_Config(),
            **options,
        )


class _Config(BackendConfig):
    @property
    def backend_cls(self) -> type[Backend]:
        return _Backend


class _Backend(Backend):
    """Tells workers that Ray is about to end them, one after the other: none of them is to report another as lost."""

    def on_shutdown(self, worker_group: Any, backend_config: BackendConfig) -> None:
        ray.wait(told := worker_group.execute_async(_part), num_returns=len(told), timeout=_PART_S)


def _part() -> None:
    from meshwright.runtime.processes import peers

    if peers.current is not None:
        peers.current.end()


def _start(virtual_devices: int, timeout: float, heartbeat: float) -> None:
    """Starts JAX in this worker, as one of all workers."""
    import jax

    from meshwright.runtime.processes.initialize import initialize

    logging.getLogger("absl").setLevel(logging.WARNING)  # Ray logs everything of a worker, and Orbax says a lot
    if virtual_devices:
        if not os.environ.get("JAX_PLATFORMS"):
            jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", virtual_devices)
    context = ray.train.get_context()
    count, rank = context.get_world_size(), context.get_world_rank()
    with reserved_port() as port_socket:  # by all, and only the first one's is used
        port = port_socket.getsockname()[1]
        here = f"{ray.util.get_node_ip_address()}:{port}"
        address = ray.train.collective.broadcast_from_rank_zero(here)
        if rank == 0:
            os.environ[RESERVED] = str(port)
        storage = context.get_storage()
        if storage.storage_filesystem.type_name == "local":  # buckets keep checkpoints alone
            _keep(storage.experiment_fs_path)
        initialize(address, count, rank, timeout=timeout, heartbeat=heartbeat, cluster_detection_method="deactivate")


def _keep(folder: str) -> None:
    """Has workers that are started again take the plans and programs of those before them."""
    import jax

    os.environ.setdefault(PLANS, f"{folder}/plans")
    cache = "jax_compilation_cache_dir"
    if not getattr(jax.config, cache):  # the user's own choice stays
        jax.config.update(cache, f"{folder}/programs")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def _end() -> None:
    """Ends JAX in all workers together, so that none of them takes the end of another for a loss."""
    import jax

    from meshwright.runtime.processes import peers
    from meshwright.runtime.processes.preemption import watch
    from meshwright.training.saving.under_way import wait_for_saves

    wait_for_saves()
    if peers.current is not None:
        peers.current.end()
    jax.distributed.shutdown()
    if watch.is_asked:
        raise ProcessError("the workers were asked to end (SIGTERM), and the loop ended: it is to be started again")
