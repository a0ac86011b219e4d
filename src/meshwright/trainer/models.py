"""The model of a run: a loss of parameters and a batch of tokens, and how its parameters come to be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from meshwright.arrays import PyTree
from meshwright.errors import TrainingError
from meshwright.trainer.settings import Settings
from meshwright.zoo import ZooError, build


@dataclass(frozen=True)
class TrainedModel:
    """A model to be trained.

    Attributes:
        name: What it is called.
        loss: ``loss(params, batch) -> scalar``, of ``{"tokens", "labels"}``, both of rows and positions.
        init: ``init(key) -> params``, fresh ones.
        params: Their shapes.
        batch: The shapes of a whole batch.
        config: The zoo's `Config`.
        read: ``read(like) -> params`` reads a checkpoint's into the shardings of `like`; None for fresh ones.
    """

    name: str
    loss: Callable[[PyTree, PyTree], Any]
    init: Callable[[Any], PyTree]
    params: PyTree
    batch: PyTree
    config: Any
    read: Callable[[Any], PyTree] | None = None

    @property
    def vocab(self) -> int:
        """The number of tokens."""
        return int(self.config.vocab)


def find_model(settings: Settings) -> TrainedModel:
    """The model that the settings name.

    Raises:
        TrainingError: There is none of that name, it lacks an option, or it does not take tokens.
        CheckpointError: There is no model in that folder, or a file of it is damaged.
    """
    options = {"dtype": settings.precision, **settings.shape}
    if settings.path is not None:
        return _in_folder(settings, settings.path, options)
    assert settings.model is not None
    try:
        example = build(settings.model, batch=settings.rows, seq=settings.seq, **options)
    except ZooError as error:
        raise TrainingError(str(error)) from None
    except TypeError as error:
        raise TrainingError(f"[shape] cannot be used for {settings.model}: {error}") from None
    if not isinstance(example.batch, dict) or set(example.batch) != {"tokens", "labels"}:
        raise TrainingError(f"{settings.model} is not trained on the next token; choose a language model")

    def init(key: Any) -> PyTree:
        return example.init(key)["params"]

    return TrainedModel(settings.model, example.loss, init, example.state["params"], example.batch, example.config)


def _in_folder(settings: Settings, path: str, options: dict[str, Any]) -> TrainedModel:
    """A model of Hugging Face; weights that are trained are float32, and those beside adapters stay what they are."""
    try:
        from meshwright import hf
    except ImportError as error:
        raise TrainingError(str(error)) from None
    options = options | {"param_dtype": None if settings.lora else "float32"}
    example = hf.load(path, **options).example(settings.rows, settings.seq)
    params = example.state["params"]

    def init(key: Any) -> PyTree:  # what is read takes its place
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)

    def read(like: Any) -> PyTree:
        return hf.load(path, like=like, **options).params

    return TrainedModel(example.name, example.loss, init, params, example.batch, example.config, read)
