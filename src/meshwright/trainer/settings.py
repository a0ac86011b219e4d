"""The settings of a training run: frozen dataclasses, made from a TOML file, from keywords, or from both."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from meshwright.errors import TrainingError
from meshwright.schema import Between, Count, Size, built

Share = Annotated[float, Between(0.0, 0.5)]


@dataclass(frozen=True, kw_only=True)
class Data:
    """The documents to train on.

    Attributes:
        path: A file, or a folder with files below it: ``.txt``, ``.jsonl``, ``.parquet``, or tokens as ``.bin``.
        tokenizer: A ``tokenizer.json``, or a folder with one; without it every byte is a token.
        text: The field of JSON lines and the column of Parquet files that hold the text.
        end: The token that ends a document; by default what the tokenizer's folder says, and 0 among bytes.
        dtype: The type of the tokens in ``.bin`` files.
    """

    path: str
    tokenizer: str | None = None
    text: str = "text"
    end: str | None = None
    dtype: Literal["uint8", "uint16", "uint32", "int32"] = "uint16"


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """An optimizer of optax.

    Attributes:
        name: The function's name, such as ``"adamw"`` or ``"lion"``.
        learning_rate: The learning rate, or the peak of the schedule.
        clip_norm: Gradients are scaled down to this global norm; 0 for no limit.
        options: Its other arguments.
    """

    name: str = "adamw"
    learning_rate: Annotated[float, Between(0.0)] = 3e-4
    clip_norm: Annotated[float, Between(0.0)] = 1.0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule of optax.

    Attributes:
        name: The function's name; ``"warmup_cosine_decay"`` is enough for ``warmup_cosine_decay_schedule``.
        options: Its arguments; the peak is the optimizer's learning rate, and the decay ends with the run, by default.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the state is saved: every so many steps, and at the end; the newest `keep` stay."""

    every: Count = 500
    keep: Count = 2


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The held-out loss.

    Attributes:
        every: Steps from one evaluation to the next; there is one at the end as well.
        batches: How many batches it takes.
        path: Documents of its own; without it the last `share` of the data is held out.
        share: Of the data.
    """

    every: Count = 500
    batches: Count = 8
    path: str | None = None
    share: Share = 0.05


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank adapters, which are trained instead of the weights (https://arxiv.org/abs/2106.09685).

    Attributes:
        rank: The inner size of the adapters.
        alpha: The adapters' part is multiplied by ``alpha / rank``.
        targets: Names of the weights that get one, such as ``["q", "v"]``; by default all that are multiplied by.
    """

    rank: Count = 8
    alpha: Annotated[float, Between(0.0)] = 16.0
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Log:
    """Where figures go besides the terminal and the folder's ``metrics.jsonl``.

    Attributes:
        every: Steps from one line to the next.
        tensorboard: A folder for TensorBoard; nothing else is needed to write it.
        wandb: The name of a project of Weights & Biases, which needs wandb.
    """

    every: Count = 10
    tensorboard: str | None = None
    wandb: str | None = None


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of one run.

    Attributes:
        model: A model of the zoo, with fresh weights.
        path: Or the folder of a model of Hugging Face, with its weights and tokenizer. A keyword that gives one of the
            two takes the place of the other in a file.
        shape: Options of the model, such as ``{"layers": 4}``, or for any ``{"checkpoint": "full"}``.
        data: The documents.
        seq: Tokens of a sequence.
        batch_tokens: Tokens of a step, on all devices together; a multiple of `seq`.
        steps: Steps of the whole run, those before a restart included.
        precision: The type that activations have; weights are float32.
        seed: Of the weights and of the order of the data.
        folder: Keeps checkpoints, plans, tokens and figures, and is where a run that is started again continues.
            Without it nothing is kept.
        export: A folder for the trained weights, adapters included, as a model of Hugging Face.
        cluster, method, pipeline, microbatches: As for `mw.parallelize`.
        recipe: A pipeline that is given instead of searched for, as the arguments of `mw.ThreeD`.
        recompute: What the backward pass computes again, as for `mw.Auto`.
    """

    data: Data
    steps: Count
    model: str | None = None
    path: str | None = None
    shape: dict[str, Any] = field(default_factory=dict)
    seq: Count = 1024
    batch_tokens: Count = 65536
    precision: Literal["bfloat16", "float32"] = "bfloat16"
    seed: Size = 0
    folder: str | None = None
    export: str | None = None
    cluster: str = "local"
    method: str = "auto"
    pipeline: bool = False
    recipe: dict[str, Any] = field(default_factory=dict)
    microbatches: Count | Literal["auto"] | None = None
    recompute: str = "auto"
    optimizer: Optimizer = Optimizer()
    schedule: Schedule | None = None
    checkpoints: Checkpoints = Checkpoints()
    evaluation: Evaluation | None = None
    lora: Lora | None = None
    log: Log = Log()

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.batch_tokens // self.seq

    @property
    def is_staged(self) -> bool:
        """Whether a pipeline is asked for."""
        return self.pipeline or bool(self.recipe)


_SHORT = {"data": "path", "optimizer": "name", "schedule": "name"}  # what a text in place of a table stands for


def read_settings(config: str | PathLike[str] | None, given: Mapping[str, Any]) -> Settings:
    """The settings of a TOML file, with others in place of its own; tables are merged.

    Raises:
        TrainingError: The file cannot be read, or a setting is missing, unknown or of another type.

    >>> read_settings(None, {"model": "llama-tiny", "data": "text", "steps": 3}).data.path
    'text'
    """
    where = "settings" if config is None else str(config)
    file = {} if config is None else _read(Path(config))
    if "path" in given or "model" in given:
        file = {key: value for key, value in file.items() if key not in ("path", "model")}
    table = _merged(file, given)
    table = {key: {_SHORT[key]: v} if key in _SHORT and isinstance(v, str) else v for key, v in table.items()}
    try:
        found = built(Settings, table, where)
    except ValueError as error:
        raise TrainingError(str(error)) from None
    if (found.model is None) == (found.path is None):
        what = "both are given" if found.path else "both are missing"
        raise TrainingError(
            f"{where}.model is a model of the zoo and {where}.path a folder with weights; {what}: give one"
        )
    if found.batch_tokens % found.seq:
        near = max(1, round(found.batch_tokens / found.seq)) * found.seq
        raise TrainingError(
            f"{where}.batch_tokens is {found.batch_tokens}, which seq = {found.seq} does not divide; give a multiple, "
            f"such as {near}"
        )
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingError(f"{path} cannot be read: {error.strerror}; give the path of a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TrainingError(f"{path} is no TOML: {error}") from None


def _merged(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables, the second one's entries in place of the first one's."""
    found = dict(table)
    for key, value in given.items():
        before = found.get(key)
        if isinstance(before, str) and key in _SHORT and isinstance(value, Mapping):
            before = {_SHORT[key]: before}
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[key] = _merged(before, value) if both else value  # type: ignore[arg-type]
    return found
