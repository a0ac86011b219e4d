"""The words of published tables: what they mean, in all the ways people write them."""

import pytest

from meshwright.errors import ClusterError
from meshwright.simulator.transformer.recompute import ALTERNATE, ATTENTION, DOTS, FULL, MINIMAL, NONE
from meshwright.validation.machines import machines
from meshwright.validation.words import dtype_of, recompute_of, stack_of, zero_of


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", NONE),
        ("none (flash/fused attn)", NONE),
        ("No", NONE),
        ("full (per layer)", FULL),
        ("True", FULL),
        ("uniform, every layer", FULL),
        ("nothing_saveable", FULL),
        ("paxml default", FULL),
        ("selective+sequence parallel", ATTENTION),
        ("selective (op)", ALTERNATE),
        ("core_attn", ATTENTION),
        ("minimal_flash", MINIMAL),
        ("SAVE_DOT_WITH_NO_BATCH_DIM", DOTS),
    ],
)
def test_recomputation(text, expected):
    assert recompute_of(text, "attention") == expected


def test_lists_of_what_is_kept():
    rule = recompute_of("custom: offload decoder_layer_input,q,k,v(,out) proj to host", "attention")
    assert {"query", "key", "value", "out", "input"} == rule.keeps
    assert "gate" in rule.repeats
    assert rule.offloads
    said = recompute_of("custom (recipe)", "attention", "Llama-405B", "8k; (405B: offload decoder_layer_input+mlpwo)")
    assert "down" in said.keeps
    assert not recompute_of("custom (recipe)", "attention", "Llama-70B", "(405B: offload mlpwo)").offloads


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("3 (FSDP2)", 3),
        ("FSDP2", 3),
        ("ZeRO-1", 1),
        ("shard-largest-dim (GSPMD-like)", 3),
        ("2 (FSDP SHARD_GRAD_OP)", 2),
        ("0", 0),
        ("", 0),
        ("HSDP", 3),
        ("distributed optimizer", 1),
    ],
)
def test_zero(text, stage):
    assert zero_of(text) == stage


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("fp16", "bfloat16"),
        ("amp_bf16 DEFAULT", "bfloat16"),
        ("FP8 (TE)", "float8_e4m3fn"),
        ("int8", "int8"),
        ("TF32", "float32"),
    ],
)
def test_precision(text, dtype):
    assert dtype_of(text) == dtype


@pytest.mark.parametrize("read", [lambda: dtype_of("posit"), lambda: recompute_of("perhaps", "attention")])
def test_words_that_mean_nothing_are_named(read):
    with pytest.raises(ValueError, match="known are"):
        read()


@pytest.mark.parametrize(
    ("source", "attention"),
    [
        ("Megatron-LM SC'21 Table 1", "materialised"),
        ("Korthikanti et al. 2022", "materialised"),
        ("Megatron-LM CI golden values", "cudnn"),
        ("torchtitan Dec-2024", "flash2"),
        ("MosaicML llm-foundry", "flash1"),
        ("IBM/PyTorch fms-fsdp README", "flash2"),
        ("a paper of 2021", "materialised"),
        ("a blog of 2026", "cudnn"),
    ],
)
def test_stacks_by_source(source, attention):
    assert stack_of(source, 0, "bf16", "none", "", "", tpu=False)[0].attention == attention


def test_what_a_row_says_itself_counts():
    def stack(**said):
        words = {"precision": "bf16", "recompute": "none", "model": "GPT-126M", "notes": "", "tpu": False} | said
        return stack_of("torchtitan", 3, **words)[0]

    assert stack(notes="FSDP2 eager").fused is False
    assert stack(notes="torch.compile").fused is True
    assert stack(notes="async TP").async_tensor is True
    assert stack(notes="126M without flash attention").attention == "materialised"
    assert stack(tpu=True).attention == "splash"
    assert stack(precision="bf16 PURE").optimizer_bytes == 4
    assert stack_of("Megatron-LM SC'21", 3, "fp16", "full", "", "", tpu=False)[0].messages == 12


@pytest.mark.parametrize(
    ("text", "count", "chip", "hosts", "per_host"),
    [
        ("A100-SXM-80GB", 512, "a100-sxm-80gb", 64, 8),
        ("A100-SXM-40GB (RoCE 1600Gbps/node)", 16, "a100-sxm-40gb", 2, 8),
        ("V100-SXM3-32GB (DGX-2)", 32, "v100-32gb", 2, 16),
        ("V100-SXM2-16GB (single p3.16xlarge node)", 4, "v100-16gb", 1, 4),
        ("GB200", 8, "gb200", 2, 4),
        ("TPU v5p (v5p-1024)", 512, "tpu-v5p", 128, 4),
        ("TPU v7 (Ironwood tpu7x; 2 JAX devices/chip)", 64, "tpu-v7", 16, 8),
        ("H100", 12, "h100-sxm-80gb", 2, 6),
    ],
)
def test_machines(text, count, chip, hosts, per_host):
    found = machines(text, count)
    assert (found.chip.name, found.num_hosts, found.devices_per_host) == (chip, hosts, per_host)


def test_machines_as_the_table_describes_them():
    plain = machines("H100-SXM-80GB", 8)
    special = machines("H100-SXM-96GB-HBM2e-500W (Grand Teton, 2.4TB/s)", 8)
    assert special.chip.memory_bandwidth == 2.4e12
    assert special.memory_bytes == pytest.approx(plain.memory_bytes + 16e9)
    assert 0.85 < special.chip.best_fraction / plain.chip.best_fraction < 0.95
    assert machines("A100-SXM-80GB (400Gbps per node)", 16).inter.bandwidth == pytest.approx(6.25e9)
    assert machines("H200", 16, "400Gb/s CX-7 per GPU").inter.bandwidth == pytest.approx(50e9)


def test_a_device_that_nobody_knows_is_named():
    with pytest.raises(ClusterError, match="'Cerebras WSE' names no device"):
        machines("Cerebras WSE", 1)
