"""Expresses a published row as a program of the zoo, a method, a mesh, and the software that ran it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from math import ceil
from typing import Any

from meshwright import zoo
from meshwright.cost.attention import MATERIALISED
from meshwright.cost.rates import step_rates
from meshwright.hardware import Cluster, Mesh
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.planner.methods import DataParallel, Method, TensorParallel, Zero
from meshwright.simulator.software import Software
from meshwright.simulator.transformer.layer import Layer
from meshwright.simulator.transformer.recipe import Recipe
from meshwright.validation.row import Row, recipe_of

#: What each recomputation of a recipe is called in the zoo. Megatron's recomputes attention alone, which costs about
#: what all but products with weights cost.
_CHECKPOINTS = {
    "none": "none",
    "full": "full",
    "some layers": "full",
    "attention": "selective",
    "alternate products": "alternate",
    "elementwise": "selective",
    "attention and elementwise": "selective",
}
_GRADIENT_BYTES = 2.0  # of the zoo's products
# Planned at least. From 4 and 8 layers of the zoo's GPT and Llama (ZeRO-3, data or tensor parallel on 8 devices) the
# step of 16 layers follows within 0.04% and the memory within 0.01%; from 2 and 4 the memory of ZeRO-3 is 42% off.
_FEW_LAYERS = 4
_WHOLE: dict[str, Any] = {"memory_fraction": 1.0, "microbatches": 1}  # a plan of one microbatch, as the row has it
_ROOMY = 16  # times the memory of a device: rows ran, and whether they fit is the recipe's question


@dataclass(frozen=True)
class PlannedRow:
    """A row as a program and a way to split it.

    Attributes:
        recipe: The recipe of the row.
        build: Makes the zoo's example with so many layers: of one microbatch, or of a whole batch for a pipeline, and
            where that is asked for.
        method: The method that the row's authors used.
        mesh: The mesh, on the row's cluster; None for a pipeline, whose stages have meshes of their own.
        software: What ran it.
    """

    recipe: Recipe
    build: Callable[..., zoo.Example]
    method: Method
    mesh: Mesh | None
    software: Software

    @property
    def roomy_cluster(self) -> Cluster:
        """The cluster with more memory than any plan needs."""
        chip = self.recipe.cluster.chip
        return replace(self.recipe.cluster, chip=replace(chip, memory_bytes=_ROOMY * chip.memory_bytes))

    @property
    def depths(self) -> tuple[int, int]:
        """Two numbers of layers to plan, of which each adds as much; chunks of a pipeline have equally many."""
        # Of layers of which a part recomputes, as many recompute in every round.
        chunks = self.recipe.pipeline * self.recipe.interleave * _share(self.recipe).denominator
        few = chunks * ceil(_FEW_LAYERS / chunks)
        return few, 2 * few


def express(row: Row) -> PlannedRow | str:
    """The program of a row, or why there is none.

    Raises:
        RowError: The row cannot be understood.
    """
    recipe = recipe_of(row)
    missing = _missing(recipe)
    if missing:
        return missing
    split = _split(recipe)
    if isinstance(split, str):
        return split
    return PlannedRow(recipe, partial(_build, recipe), *split, _software(recipe))


def _missing(recipe: Recipe) -> str:
    """What a plan of the zoo cannot express of a recipe; empty where it can express all."""
    shape, stack = recipe.shape, recipe.stack
    if recipe.dtype != "bfloat16":
        return "the zoo has no 8-bit products"
    if recipe.context > 1:
        return "context parallelism has no method"
    if recipe.recompute.offloads or recipe.recompute.name not in _CHECKPOINTS:
        return f"recomputation ({recipe.recompute.name}) that the zoo does not have"
    if shape.experts > 1:
        return "experts without fixed buffers"
    if shape.gated and stack.attention == MATERIALISED:
        return "a gated model without a fused kernel"
    return ""


def _split(recipe: Recipe) -> tuple[Method, Mesh | None] | str:
    cluster, data, tensor = recipe.cluster, recipe.data, recipe.tensor
    if recipe.pipeline > 1:
        return _staged(recipe)
    if tensor == 1 and recipe.zero and recipe.shard < data:
        method = Zero(recipe.zero, recipe.shard, **_WHOLE)
        return method, cluster.mesh((data // recipe.shard, recipe.shard))
    if tensor == 1:
        return Zero(recipe.zero, **_WHOLE) if recipe.zero else DataParallel(**_WHOLE), cluster.mesh((data,))
    if recipe.zero and recipe.shard < data:
        return "ZeRO within groups, with tensor parallelism, has no method"
    mesh = cluster.mesh((data, tensor) if data > 1 else (tensor,))
    return TensorParallel(recipe.zero, **_WHOLE), mesh


def _staged(recipe: Recipe) -> tuple[Method, None] | str:
    """A pipeline; its model recomputes by itself, since stages would recompute the head as well."""
    if recipe.zero:
        return f"ZeRO-{recipe.zero} in a pipeline has no method"
    sizes = (recipe.data, recipe.tensor, recipe.pipeline, round(recipe.microbatch))
    return ThreeD(*sizes, recipe.schedule, recipe.interleave, memory_fraction=1.0), None


def _build(recipe: Recipe, layers: int, whole: bool = False) -> zoo.Example:
    """The zoo's example of one microbatch on all devices; of all microbatches in a pipeline, or where asked for."""
    shape = recipe.shape
    options: dict[str, Any] = {"vocab": shape.vocab, "hidden": shape.hidden, "heads": shape.heads}
    options |= {"kv_heads": shape.kv_heads, "ffn": shape.ffn}
    if not shape.gated:
        # XLA keeps the residual stream in the order in which it sums the gradient of learned positions over sequences,
        # and transposes it elsewhere; no other software does.
        options["positions"] = shape.seq if recipe.stack.xla else None
    return zoo.build(
        "llama-tiny" if shape.gated else "gpt-tiny",
        batch=round(recipe.microbatch * recipe.data) * (recipe.num_microbatches if whole or recipe.pipeline > 1 else 1),
        seq=shape.seq,
        layers=layers,
        checkpoint=_checkpoint(recipe),
        attention="plain" if recipe.stack.attention == MATERIALISED else "fused",
        loss_chunks=1,
        dtype="float16" if recipe.cluster.chip.name.startswith("v100") else "bfloat16",
        **options,
    )


def _checkpoint(recipe: Recipe) -> str:
    name, share = _CHECKPOINTS[recipe.recompute.name], _share(recipe)
    return name if share == 1 else f"{name}:{share}"


def _share(recipe: Recipe) -> Fraction:
    return Fraction(recipe.recompute.share).limit_denominator(_FEW_LAYERS)


def _software(recipe: Recipe) -> Software:
    stack, prices = recipe.stack, step_rates(recipe.cluster.chip)
    fused, separate = (
        sum(_streamed(replace(recipe, stack=replace(stack, fused=fuses)))) for fuses in (True, stack.fused)
    )
    return Software(
        attention=stack.attention,
        separate=separate / fused,
        gradients=stack.reduce_bytes / _GRADIENT_BYTES,
        message_bytes=2.0 * recipe.layer_params / recipe.tensor / stack.messages,
        overlap=stack.overlap,
        fixed_s=prices.constants.fixed_s,
    )


def _streamed(recipe: Recipe) -> list[float]:
    """Seconds of the kernels of a layer that only move bytes."""
    layer = Layer(recipe, step_rates(recipe.cluster.chip))
    kernels = (*layer.attention_block(), *layer.feed_forward_block())
    return [k.forward_s + k.backward_s for k in kernels if k.name in ("norm", "rotary", "residual", "activation")]
