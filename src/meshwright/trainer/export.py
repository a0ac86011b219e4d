"""Writes the weights that a run has trained as a model of Hugging Face."""

from pathlib import Path
from typing import Any

import jax

from meshwright.errors import TrainingError
from meshwright.trainer.models import TrainedModel
from meshwright.trainer.settings import Settings
from meshwright.zoo.low_rank import merged


def check_export(path: str, model: TrainedModel) -> None:
    """Refuses a model or a place that cannot be written, before anything is trained.

    Raises:
        TrainingError: The folder holds something already or has no parent, or a library is not installed.
        CheckpointError: No architecture of transformers is such a model.
    """
    folder = Path(path).expanduser()
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise TrainingError(f"export is {path}, which is there already; choose another folder, or remove it")
    if not folder.parent.is_dir():
        raise TrainingError(f"export is {path}, and there is no folder {folder.parent}; make it first")
    try:
        from meshwright.hf.configuration import written_config
    except ImportError as error:
        raise TrainingError(str(error)) from None
    written_config(model.config)


def export(settings: Settings, model: TrainedModel, state: Any, scale: float) -> None:
    """Writes the parameters of a state, to which adapters are added."""
    from meshwright import hf

    params = state["params"]
    if "frozen" in state:
        params = jax.jit(merged, static_argnums=2)(state["frozen"], params, scale)
    assert settings.export is not None
    hf.save(settings.export, params, model.config, source=settings.path)
