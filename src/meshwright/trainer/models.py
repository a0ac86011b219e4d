"""The model of a run: a loss of parameters and a batch of tokens, and how its parameters come to be."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshwright.errors import TrainingError
from meshwright.trainer.settings import Settings
from meshwright.zoo import ZooError, build

PyTree = Any


@dataclass(frozen=True)
class TrainedModel:
    """A model to be trained.

    Attributes:
        name: What it is called.
        loss: ``loss(params, batch) -> scalar``, of ``{"tokens", "labels"}``, both of rows and positions.
        init: ``init(key) -> params``, fresh ones.
        params: Their shapes.
        batch: The shapes of a whole batch.
        vocab: The number of tokens.
    """

    name: str
    loss: Callable[[PyTree, PyTree], Any]
    init: Callable[[Any], PyTree]
    params: PyTree
    batch: PyTree
    vocab: int


def find_model(settings: Settings) -> TrainedModel:
    """The model that the settings name.

    Raises:
        TrainingError: There is none of that name, it lacks an option, or it does not take tokens.
    """
    try:
        example = build(
            settings.model,
            batch=settings.rows,
            seq=settings.seq,
            **{"dtype": settings.precision, **settings.shape},
        )
    except ZooError as error:
        raise TrainingError(str(error)) from None
    except TypeError as error:
        raise TrainingError(f"[shape] cannot be used for {settings.model}: {error}") from None
    if not isinstance(example.batch, dict) or set(example.batch) != {"tokens", "labels"}:
        raise TrainingError(f"{settings.model} is not trained on the next token; choose a language model")

    def init(key: Any) -> PyTree:
        return example.init(key)["params"]

    params = example.state["params"]
    return TrainedModel(settings.model, example.loss, init, params, example.batch, example.config.vocab)
