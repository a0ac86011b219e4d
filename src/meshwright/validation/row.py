"""One row of a table of published results: its cells, and the recipe they describe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from meshwright.errors import MeshwrightError
from meshwright.simulator.transformer.memory import peak_bytes
from meshwright.simulator.transformer.recipe import Recipe
from meshwright.simulator.transformer.shape import Shape
from meshwright.validation.machines import machines
from meshwright.validation.words import SHARES, dtype_of, recompute_of, stack_of, zero_of

_GATED = re.compile(r"llama|mistral|mixtral|qwen|gemma|deepseek|palm|yi-|grok|olmo|phi-?3", re.IGNORECASE)
_EXPERTS = re.compile(r"(\d+)\s*x\s*\d+(?:\.\d+)?\s*b\b|(\d+)\s*experts|\bE\s*=\s*(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"[~≈]?\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)(?![\d.])", re.IGNORECASE)
_ACTIVE = re.compile(r"top-?\s*(\d+)|(\d+)\s*active", re.IGNORECASE)


_USUAL_VOCAB = 50304  # GPT-2's, padded


class RowError(MeshwrightError, ValueError):
    """A row that cannot be understood; the message names its cell."""


@dataclass(frozen=True)
class Row:
    """A row of a CSV file in the format of `published.csv`."""

    cells: Mapping[str, str]

    def text(self, name: str) -> str:
        value = (self.cells.get(name) or "").strip()
        return "" if value.lower() in ("nan", "n/a", "na", "none?", "-", "?") else value

    def number(self, name: str) -> float | None:
        """A cell's number; None where it is empty."""
        value = self.text(name)
        if not value:
            return None
        match = _NUMBER.match(value.replace(",", ""))
        if match is None:
            raise RowError(f"{self.id}: {name} is {value!r}; write a number or leave it empty")
        return float(match[1])

    def whole(self, name: str, default: int | None = None) -> int:
        """A cell's whole number of at least 1."""
        value = self.number(name)
        if value is None and default is not None:
            return default
        if value is None or not 1 <= value < 2**31 or value != int(value):
            raise RowError(f"{self.id}: {name} is {self.text(name)!r:.60}; it must be a whole number of at least 1")
        return int(value)

    @property
    def id(self) -> str:
        return self.text("row_id") or self.text("model") or "row"

    @property
    def trust(self) -> str:
        return self.text("trust")

    @property
    def step_s(self) -> float | None:
        """The published time of a step, or the time that follows from the published rate of tokens."""
        given, rate = self.number("step_time_s"), self.number("tokens_per_s_per_gpu")
        if given or not rate:
            return given
        batch, seq = self.number("global_batch"), self.number("seq")
        return batch * seq / rate / self.whole("gpus") if batch and seq else None

    @property
    def peak_gib(self) -> float | None:
        return self.number("peak_mem_gib")

    @property
    def is_half(self) -> bool:
        """Whether all of it ran in 16 bits."""
        return dtype_of(self.text("precision")) == "bfloat16"


def recipe_of(row: Row) -> Recipe:
    """The recipe that a row describes.

    Raises:
        RowError: A cell is missing or cannot be understood.
    """
    try:
        return _recipe(row)
    except (ValueError, MeshwrightError) as error:
        if isinstance(error, RowError):
            raise
        raise RowError(f"{row.id}: {error}") from None


def _recipe(row: Row) -> Recipe:
    shape = _shape(row)
    gpu_type = row.text("gpu_type")
    num_chips = row.whole("gpus")
    cluster = machines(gpu_type, num_chips, row.text("notes"))
    tensor, pipeline, context = (row.whole(name, 1) for name in ("tp", "pp", "cp"))
    others = tensor * pipeline * context
    if cluster.num_devices % others:
        raise RowError(
            f"{row.id}: tp·pp·cp is {tensor}·{pipeline}·{context} = {others}, which does not divide gpus, "
            f"{cluster.num_devices}"
        )
    if pipeline > shape.layers:
        raise RowError(f"{row.id}: pp is {pipeline}, but there are {shape.layers} layers; there cannot be more stages")
    data = cluster.num_devices // others  # tables count replicas in several ways, but devices in one
    microbatch, num_microbatches = _batch(row, data, tensor * context, pipeline)
    interleave = row.whole("interleave_v", 1) if pipeline > 1 else 1
    zero_text, precision, recompute = (row.text(name) for name in ("zero_stage", "precision", "recompute"))
    tpu = cluster.chip.vendor == "Google"
    shard = data * context
    zero = zero_of(zero_text) if shard > 1 else 0
    if pipeline > 1:
        zero = min(zero, 2)  # fetching parameters for every microbatch would cost too much: they are kept for the step
    said = (precision, recompute, row.text("model"), row.text("notes"))
    stack, selective = stack_of(row.text("source"), zero, *said, tpu)
    if "hsdp" in zero_text.lower():
        shard = min(shard, max(1, cluster.devices_per_host // tensor))
    recipe = Recipe(
        shape=shape,
        cluster=cluster,
        stack=stack,
        recompute=recompute_of(recompute, selective, row.text("model"), row.text("notes")),
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        expert=row.whole("ep", 1),
        zero=zero,
        shard=shard,
        microbatch=microbatch,
        num_microbatches=num_microbatches,
        interleave=interleave if num_microbatches % pipeline == 0 else 1,  # groups of microbatches must be full
        dtype=dtype_of(precision),
        by_row=re.search(r"row-?wise", precision, re.IGNORECASE) is not None,
    )
    return _with_share(recipe) if recipe.recompute.share < 1 else recipe


def _with_share(recipe: Recipe) -> Recipe:
    """The recipe with the least recomputed share of layers that fits, where the table does not give the share."""
    tried = [replace(recipe, recompute=replace(recipe.recompute, share=share)) for share in SHARES]
    return next((r for r in tried if peak_bytes(r) <= r.cluster.memory_bytes), tried[-1])


def _batch(row: Row, data: int, sharing: int, pipeline: int) -> tuple[float, int]:
    """Sequences of a microbatch, and the number of microbatches.

    Args:
        row: The row; its microbatch may be a part of a sequence, where devices share one.
        data: Number of data-parallel devices.
        sharing: Number of devices that share a sequence.
        pipeline: Number of stages.
    """
    given = row.number("microbatch")
    if given is not None and given < 1:
        given = max(1.0, given * sharing)
    whole = row.number("global_batch") or (given or 1.0) * data
    local = whole / data
    microbatch = min(given or (1.0 if pipeline > 1 else local), local)
    num = max(1, round(local / microbatch))
    if num == 1 and pipeline > 1:
        num = pipeline if local % pipeline == 0 else 1  # a table's batch of one replica, not of one microbatch
    return local / num, num


def _shape(row: Row) -> Shape:
    hidden, layers, seq = (row.whole(name) for name in ("hidden", "layers", "seq"))
    vocab = row.whole("vocab", _USUAL_VOCAB)
    heads = row.whole("heads", max(1, hidden // 128))
    if heads > hidden:
        raise RowError(f"{row.id}: heads is {heads}, but hidden is {hidden}; there cannot be more heads")
    model, notes = row.text("model"), row.text("notes")
    experts, active = _experts(f"{model} {notes}", row.whole("ep", 1), row.id)
    return Shape(
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=row.whole("kv_heads", heads),
        head_dim=hidden // heads,
        ffn=row.whole("ffn", 4 * hidden),
        vocab=vocab,
        seq=seq,
        gated=_GATED.search(model) is not None,
        tied="tied embedding" in notes and "untied" not in f"{model} {notes}",
        experts=experts,
        active=active,
    )


def _experts(text: str, degree: int, row_id: str) -> tuple[int, int]:
    """Number of experts and how many each token passes, from a model's name such as ``Mixtral-8x7B``."""
    match = _EXPERTS.search(text)
    if match is None:
        if degree > 1:
            raise RowError(f"{row_id}: ep is {degree}, but neither model nor notes say how many experts there are")
        return 1, 1
    experts = int(next(group for group in match.groups() if group))
    active = _ACTIVE.search(text)
    return experts, int(next(group for group in active.groups() if group)) if active else 2
