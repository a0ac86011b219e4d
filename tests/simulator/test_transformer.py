"""The transformer's description: FLOPs, splits, recomputation and memory against what theory says."""

from dataclasses import replace

import pytest

from meshwright.cost.rates import step_rates
from meshwright.hardware import cluster, find_chip
from meshwright.simulator.engine import simulate_work
from meshwright.simulator.transformer import memory
from meshwright.simulator.transformer.layer import Layer
from meshwright.simulator.transformer.recipe import Recipe, Stack
from meshwright.simulator.transformer.recompute import ALTERNATE, ATTENTION, FULL, MINIMAL, NONE
from meshwright.simulator.transformer.shape import Shape
from meshwright.simulator.transformer.work import recipe_work

GPT = Shape(hidden=4096, layers=32, heads=32, kv_heads=32, head_dim=128, ffn=16384, vocab=51200, seq=2048)
LLAMA = Shape(4096, 32, 32, 8, 128, 14336, 128256, 8192, gated=True)
FLASH = Stack("flash", "flash2")
PLAIN = Stack("plain", "materialised", sequence_parallel=False)


def recipe(machines="1x8 a100-80gb", **options):
    settings = {"shape": GPT, "cluster": cluster(machines), "stack": FLASH, "recompute": NONE, "data": 8, "shard": 8}
    return Recipe(**(settings | options))


def step(**options):
    found = recipe(**options)
    return simulate_work(recipe_work(found, "test")).step_s


def test_parameters_are_those_of_known_models():
    assert LLAMA.params == pytest.approx(8.03e9, rel=0.001)
    assert replace(LLAMA, hidden=8192, layers=80, heads=64, ffn=28672).params == pytest.approx(70.6e9, rel=0.001)
    assert Shape(12288, 96, 96, 96, 128, 49152, 51200, 2048, tied=True).params == pytest.approx(174.6e9, rel=0.003)


def test_a_mixture_counts_the_experts_that_are_used():
    dense, mixture = GPT, replace(GPT, experts=8, active=2)
    assert mixture.params > 5 * dense.params
    assert dense.flops_per_token < mixture.flops_per_token < 2 * dense.flops_per_token


def test_tensor_parallelism_splits_products():
    chip = step_rates(find_chip("a100-80gb"))
    whole = {k.name: k for k in Layer(recipe(microbatch=4), chip).attention_block()}
    split = {k.name: k for k in Layer(recipe(microbatch=4, tensor=4, data=2), chip).attention_block()}
    for name in ("query", "out", "attention"):
        assert split[name].forward_s == pytest.approx(whole[name].forward_s / 4, rel=0.1)


def test_backward_takes_about_twice_forward():
    chip = step_rates(find_chip("a100-80gb"))
    block = list(Layer(recipe(microbatch=4), chip).feed_forward_block())
    forward, backward = (sum(getattr(k, part) for k in block) for part in ("forward_s", "backward_s"))
    assert 1.9 < backward / forward < 2.2


def test_recomputation_costs_what_it_repeats():
    times = [step(recompute=rule, microbatch=4) for rule in (NONE, MINIMAL, ATTENTION, ALTERNATE, FULL)]
    assert times[0] < times[1] < times[4]
    assert times[0] < times[2] < times[4]
    assert times[0] < times[3] < times[4]
    whole = step(recompute=FULL, microbatch=4, stack=replace(FLASH, repeats_last=True))
    assert times[4] < whole < 1.34 * times[0]


def test_recomputation_saves_memory():
    kept = [memory.layer_bytes(recipe(recompute=rule)) for rule in (NONE, MINIMAL, ALTERNATE, FULL)]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 2 * 2048 * 4096


def test_activations_are_those_of_korthikanti():
    """Bytes of a layer without recomputation: s·b·h·(34 + 5·a·s/h), with dropout and scores in memory."""
    found = recipe(stack=replace(PLAIN, dropout=True), microbatch=2)
    expected = 2048 * 2 * 4096 * (34 + 5 * 32 * 2048 / 4096)
    assert memory.layer_bytes(found) == pytest.approx(expected, rel=0.02)


def test_zero_spreads_state_stage_by_stage():
    sizes = [memory.state_bytes(recipe(zero=zero), 0) for zero in (0, 1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(18 * GPT.params)
    assert sizes[3] == pytest.approx(18 * GPT.params / 8)


def test_gradients_lie_whole_while_microbatches_add_up():
    one, many = (memory.state_bytes(recipe(zero=2, num_microbatches=m), 0) for m in (1, 4))
    assert many > one


def test_exchanges_beside_compute_cost_less_than_in_its_way():
    slow = "4x8 a100-80gb"
    beside, exposed = (
        step(machines=slow, stack=replace(FLASH, overlap=overlap), zero=3, data=32, shard=32)
        for overlap in (True, False)
    )
    assert beside < exposed


def test_pieces_of_exchanges_and_sums_beside_weights_hide_time():
    whole = step(tensor=8, data=1, shard=1, microbatch=4)
    assert step(tensor=8, data=1, shard=1, microbatch=4, stack=replace(FLASH, async_tensor=True)) < whole
    assert step(tensor=8, data=1, shard=1, microbatch=4, stack=replace(FLASH, sums_beside_weights=True)) < whole


def test_a_fused_kernel_beats_scores_in_memory():
    assert step(microbatch=4) < step(microbatch=4, stack=PLAIN)


def test_more_microbatches_shrink_the_bubble():
    found = [
        simulate_work(recipe_work(recipe(pipeline=8, data=1, shard=1, num_microbatches=m), "test")).bubble_fraction
        for m in (8, 32, 128)
    ]
    assert found == sorted(found, reverse=True)


def test_stages_inside_a_host_send_faster_than_across():
    inside = recipe_work(recipe(pipeline=4, data=2, shard=2), "test")
    across = recipe_work(recipe("4x8 a100-80gb", pipeline=4, data=8), "test")
    assert inside.chunks[0].send_s < across.chunks[0].send_s


@pytest.mark.parametrize("expert", [1, 8])
def test_experts_are_spread_over_data_parallel_devices(expert):
    found = recipe(shape=replace(GPT, experts=8, active=2), expert=expert)
    share = memory.stage_params(found, 0) / found.shape.params
    assert share == pytest.approx(1.0 if expert == 1 else 0.2, abs=0.06)
