"""Training on a Ray cluster: `Trainer` runs a loop on Ray's workers, and `save` and `restore` use the run's storage."""

try:
    import ray.train  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"meshwright.ray needs Ray Train, which is not installed ({error}): pip install 'meshwright[ray]'"
    ) from error

from meshwright.ray.checkpoints import directory, restore, save
from meshwright.ray.trainer import Trainer

__all__ = ["Trainer", "directory", "restore", "save"]
