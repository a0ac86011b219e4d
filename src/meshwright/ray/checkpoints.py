"""Checkpoints of a run on Ray: Orbax writes them to the run's storage, and Ray Train learns when they are complete."""

from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from meshwright.errors import CheckpointError
from meshwright.training.saving.checkpoints import restore as restore_step
from meshwright.training.saving.checkpoints import save as save_step
from meshwright.training.saving.checkpoints import saved_steps

_FOLDER = "checkpoints"


def directory() -> str:
    """The directory of the run's checkpoints, for `mw.save` and `mw.restore`; to be called in a training loop."""
    storage = ray.train.get_context().get_storage()
    kind = storage.storage_filesystem.type_name
    path = f"{storage.experiment_fs_path}/{_FOLDER}"
    if kind == "local":
        return path
    scheme = {"gcs": "gs", "s3": "s3"}.get(kind)
    if scheme is None:
        raise CheckpointError(
            f"the run's storage is of the kind {kind!r}, which Orbax cannot write to; give a storage_path in a file "
            "system that all workers share, or in a bucket (gs://, s3://)"
        )
    return f"{scheme}://{path}"


def save(step: int, state: Any, metrics: dict[str, Any] | None = None) -> None:
    """Saves a training state in the background, and reports metrics to Ray with the checkpoint when it is complete.

    All workers must call it. ``CheckpointConfig(num_to_keep=…)`` of the run says how many checkpoints are kept. An
    error ends the loop, as `ray.train.report` has it.

    Args:
        step: The number of the step; a step is saved once.
        state: A pytree.
        metrics: What `ray.train.report` takes.
    """
    saving = save_step(directory(), step, state, wait=False)
    assert saving is not None

    def complete(checkpoint: Checkpoint, _: str) -> Checkpoint:
        saving.wait()
        return checkpoint

    ray.train.report(
        metrics or {},
        checkpoint=_checkpoint(step),
        checkpoint_dir_name=f"{_FOLDER}/{step}",
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=complete,
        delete_local_checkpoint_after_upload=False,
    )


def restore(like: Any) -> tuple[int, Any] | None:
    """The step and the state of the run's newest complete checkpoint; None if there is none yet.

    All workers must call it. Their number and devices may differ from those of the workers that saved.

    Args:
        like: The parallelised function that the state is for, which must have a plan; or what else `mw.restore` takes.
    """
    steps = saved_steps(directory())
    if not steps:
        return None
    state = restore_step(directory(), like=like, step=steps[-1])
    known = ray.train.get_checkpoint()
    if known is None or known.path != _checkpoint(steps[-1]).path:
        # The workers were lost after the checkpoint was complete and before Ray knew of it: it would never be removed.
        ray.train.report({}, checkpoint=_checkpoint(steps[-1]), checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
    return steps[-1], state


def _checkpoint(step: int) -> Checkpoint:
    storage = ray.train.get_context().get_storage()
    return Checkpoint(f"{storage.experiment_fs_path}/{_FOLDER}/{step}", storage.storage_filesystem)
