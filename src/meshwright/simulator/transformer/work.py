"""Makes the work of a recipe: its virtual stages with their tasks, memory, and the work of each stage once a step."""

from dataclasses import replace
from functools import cache

from meshwright.cost.attention import half_type
from meshwright.cost.rates import Rates, step_rates
from meshwright.simulator.transformer import memory
from meshwright.simulator.transformer.exchange import Exchange
from meshwright.simulator.transformer.recipe import Recipe
from meshwright.simulator.transformer.tasks import StageTasks
from meshwright.simulator.work import COMPUTE, Chunk, Task, Tasks, Work


def recipe_work(recipe: Recipe, name: str, prices: Rates | None = None) -> Work:
    """The work of one step of a recipe.

    Args:
        recipe: The recipe.
        name: A name for people.
        prices: Prices of kernels; those that ship by default.
    """
    prices = prices or step_rates(recipe.cluster.chip)
    constants = prices.constants
    exchange = Exchange(recipe.cluster, constants.network)
    num_chunks = recipe.pipeline * recipe.interleave
    sizes = [
        recipe.shape.layers * (i + 1) // num_chunks - recipe.shape.layers * i // num_chunks for i in range(num_chunks)
    ]

    @cache
    def chunk(layers: int, first: bool, last: bool) -> Chunk:
        return _chunk(StageTasks(recipe, prices, exchange, layers, first, last))

    stages = range(recipe.pipeline)
    send_bytes = 2.0 * recipe.tokens * recipe.shape.hidden / recipe.tensor if recipe.pipeline > 1 else 0.0
    stage_size = recipe.cluster.num_devices // recipe.pipeline
    sends = [exchange.send_s(stage, stage_size, send_bytes) for stage in stages]
    chunks = tuple(
        replace(chunk(size, i == 0, i == num_chunks - 1), send_s=sends[i % recipe.pipeline], send_bytes=send_bytes)
        for i, size in enumerate(sizes)
    )
    return Work(
        name=name,
        chunks=chunks,
        num_stages=recipe.pipeline,
        num_microbatches=recipe.num_microbatches,
        schedule="interleaved" if recipe.interleave > 1 else recipe.schedule,
        update=tuple(_update(recipe, prices, exchange, stage) for stage in stages),
        state_bytes=tuple(constants.allocator * memory.state_bytes(recipe, stage) for stage in stages),
        devices=(recipe.cluster.num_devices // recipe.pipeline,) * recipe.pipeline,
        limit_bytes=(recipe.cluster.memory_bytes,) * recipe.pipeline,
        peak_flops=recipe.cluster.chip.peak_flops(half_type(recipe.cluster.chip)),
        model_flops=recipe.shape.flops_per_token * recipe.step_tokens,
        tokens=recipe.step_tokens,
        contention=constants.contention,
        fixed_s=constants.fixed_s,
    )


def _chunk(tasks: StageTasks) -> Chunk:
    recipe, allocator = tasks.recipe, tasks.kernels.constants.allocator
    return Chunk(
        forward=tasks.forward(),
        backward=tasks.backward(sync=False),
        closing=tasks.backward(sync=True),
        activation_bytes=allocator * tasks.layers * memory.layer_bytes(recipe),
        working_bytes=allocator * memory.working_bytes(recipe, tasks.last),
    )


def _update(recipe: Recipe, prices: Rates, exchange: Exchange, stage: int) -> Tasks:
    """The optimizer, after gradients that were not exchanged beside the backward pass."""
    params = memory.stage_params(recipe, stage)
    stack = recipe.stack
    moved = 2 * (stack.optimizer_bytes + stack.weight_bytes + stack.gradient_bytes)
    updated = params / (recipe.shard if recipe.zero > 0 else 1)
    step = Task("optimizer", COMPUTE, "compute", prices.stream_s(moved * updated))
    if stack.overlap or recipe.zero == 3:
        return (step,)
    whole = StageTasks(recipe, prices, exchange, 0, first=False, last=False)
    sent = whole.gradient_tasks("gradients", params * recipe.tensor, sync=True)
    return (*sent, step._replace(needs=tuple(range(len(sent)))))
