"""Published rows as programs: what was trained and how it was split, or why no plan can express it."""

from dataclasses import replace
from pathlib import Path

import pytest

from meshwright import validation
from meshwright.pipeline.search.equal_stages import ThreeD
from meshwright.planner.methods import DataParallel, TensorParallel, Zero
from meshwright.validation.express import express
from meshwright.validation.replay import read_rows
from meshwright.validation.row import Row

LLAMA = {
    **{"row_id": "llama", "source": "torchtitan Dec-2024", "model": "Llama-3.1-8B", "hidden": "256", "layers": "6"},
    **{"heads": "4", "kv_heads": "2", "ffn": "512", "vocab": "1024", "seq": "512", "gpus": "8"},
    **{"gpu_type": "H100-SXM-80GB", "dp": "8", "zero_stage": "3 (FSDP2)", "microbatch": "2", "global_batch": "32"},
    **{"precision": "bf16", "recompute": "selective (op)", "step_time_s": "1.0"},
}


def row(**changes):
    return Row(LLAMA | changes)


def test_a_row_is_a_model_of_the_zoo_with_its_shape_microbatch_and_checkpoints():
    program = express(row())
    example = program.build(2)
    config = example.config
    assert (config.hidden, config.heads, config.kv_heads, config.ffn, config.vocab) == (256, 4, 2, 512, 1024)
    assert (config.layers, config.checkpoint, config.attention) == (2, "alternate", "fused")
    assert example.batch["tokens"].shape == (16, 512)
    assert program.recipe.num_microbatches == 2
    assert (program.method.stage, program.mesh.sizes) == (3, (8,))


def test_only_rows_of_xla_learn_positions_whose_gradient_changes_the_order_of_dims():
    gpt = {"model": "GPT-350M", "ffn": "1024", "kv_heads": "4", "recompute": "full"}
    for source, positions in (("Megatron-LM SC'21 Table 1", None), ("NVIDIA JAX-Toolbox Pax", 512)):
        example = express(row(**gpt, source=source)).build(1)
        assert example.config.positions == positions
        assert ("positions" in example.state["params"]) == (positions is not None)


def test_gradients_kernels_and_messages_are_those_of_the_stack():
    eager = express(row(notes="eager")).software
    compiled = express(row(notes="torch.compile")).software
    assert eager.attention == compiled.attention == "flash2"
    assert eager.separate > 1.2 and compiled.separate == 1
    assert compiled.gradients == 2  # single precision, where the zoo's products give half
    assert compiled.message_bytes == pytest.approx(2 * express(row()).recipe.layer_params)


@pytest.mark.parametrize(
    ("changes", "kind", "sizes"),
    [
        ({"zero_stage": "0"}, DataParallel, (8,)),
        ({"zero_stage": "1"}, Zero, (8,)),
        ({"zero_stage": "3 (HSDP)", "gpus": "16", "dp": "16"}, Zero, (2, 8)),
        ({"gpu_type": "TPU v6e"}, Zero, (8,)),
        ({"zero_stage": "0", "tp": "4", "dp": "2"}, TensorParallel, (2, 4)),
        ({"zero_stage": "0", "tp": "8", "dp": "1"}, TensorParallel, (8,)),
        ({"zero_stage": "2", "tp": "4", "dp": "2"}, TensorParallel, (2, 4)),
    ],
)
def test_the_method_is_the_one_they_used(changes, kind, sizes):
    program = express(row(**changes))
    assert isinstance(program.method, kind) and program.mesh.sizes == sizes
    assert getattr(program.method, "zero", program.recipe.zero) == program.recipe.zero


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"pp": "2", "dp": "4"}, "ZeRO-2 in a pipeline"),
        ({"precision": "fp8 linears"}, "no 8-bit products"),
        ({"cp": "2"}, "context parallelism"),
        ({"tp": "2", "gpus": "32", "zero_stage": "3 (HSDP)"}, "ZeRO within groups"),
        ({"recompute": "custom: offload decoder_layer_input"}, "recomputation (offload)"),
    ],
)
def test_what_no_plan_expresses_is_named(changes, why):
    assert why in express(row(**changes))


def test_a_gpt_has_its_own_feed_forward_and_shared_heads():
    config = express(row(model="GPT-7B GQA", ffn="768", recompute="none")).build(1).config
    assert (config.ffn, config.heads, config.kv_heads) == (768, 4, 2)


def test_some_layers_recompute_in_every_round_that_is_planned():
    program = express(row(source="IBM fms-fsdp", recompute="selective"))
    assert program.build(4).config.checkpoint == "full:1/2" and program.depths == (4, 8)
    two_of_three = replace(program.recipe, recompute=replace(program.recipe.recompute, share=2 / 3))
    assert replace(program, recipe=two_of_three).depths == (6, 12)


def test_layers_are_planned_in_equal_chunks_of_a_pipeline():
    program = express(row(pp="3", dp="2", tp="1", zero_stage="0", gpus="6", layers="12"))
    assert program.method == ThreeD(2, 1, 3, 2, memory_fraction=1.0) and program.mesh is None
    assert program.depths == (6, 12)
    assert program.build(6).batch["tokens"].shape[0] == 2 * 2 * program.recipe.num_microbatches
    assert express(row()).depths == (4, 8)


def test_the_mesh_for_planning_has_more_memory_and_the_same_links():
    program = express(row())
    roomy = program.roomy_cluster
    assert roomy.memory_bytes > 8 * program.mesh.cluster.memory_bytes
    chip = replace(roomy.chip, memory_bytes=program.mesh.cluster.chip.memory_bytes)
    assert replace(roomy, chip=chip) == program.mesh.cluster


def test_rows_that_ship_can_be_expressed():
    rows = read_rows(Path(validation.__file__).with_name("examples.csv"))
    assert sum(not isinstance(express(one), str) for one in rows) >= 2
