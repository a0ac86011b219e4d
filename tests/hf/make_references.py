"""Makes the checkpoints of `tests/hf/references` and what transformers computes with them.

It needs PyTorch and transformers, which the tests do not:

    python tests/hf/make_references.py          writes tests/hf/references
    python tests/hf/make_references.py FOLDER   checks that transformers loads what `mw.hf.save` wrote into FOLDER/NAME
"""

import itertools
import json
import shutil
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = Path(__file__).parent / "references"
PACKED = Path(__file__).parent / "packed_reference"
LENGTH = 20  # longer than the windows, and than the original length of the scalings
PROMPTS = (LENGTH, 7)  # the lengths of the beginnings that are continued
NEW = 64  # tokens of each
CLEAR = 1e-4  # how much the likeliest token is ahead, of the largest score: a hundred times what rounding does
DECODER = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA3_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    FULL: {"rope_type": "linear", "rope_theta": 1_000.0, "factor": 8.0},
}
CASES = {
    "llama": ("Llama", {**DECODER, "rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}),
    "llama-tied": (
        "Llama",
        {
            **DECODER,
            "rope_parameters": LINEAR,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 8,
        },
    ),
    "mistral": ("Mistral", {**DECODER, "sliding_window": 5}),
    "qwen2": ("Qwen2", DECODER),
    "qwen3": ("Qwen3", {**DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            **DECODER,
            "head_dim": 8,
            "moe_intermediate_size": 12,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
        },
    ),
    "gemma": ("Gemma", {**DECODER, "head_dim": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "gemma2": (
        "Gemma2",
        {
            **DECODER,
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 0.3,
            "num_hidden_layers": 3,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            **DECODER,
            "head_dim": 8,
            "sliding_window": 5,
            "query_pre_attn_scalar": 6,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, SLIDING, FULL, SLIDING],
            "rope_parameters": GEMMA3_ROPE,
        },
    ),
    "mixtral": ("Mixtral", {**DECODER, "num_local_experts": 4}),
    "gpt-oss": (
        "GptOss",
        {
            **DECODER,
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "rope_parameters": YARN,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
        },
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 96, "n_inner": 40},
    ),
    "opt": (
        "OPT",
        {
            "vocab_size": 64,
            "hidden_size": 16,
            "ffn_dim": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 96,
        },
    ),
}
_CONFIGS = {"Gemma3": "Gemma3TextConfig"}
_MODELS = {"GPT2": "GPT2LMHeadModel"}


def _model(family: str, keys: dict) -> torch.nn.Module:
    """A model whose weights are all random, so that no mistake in any of them goes unseen."""
    config_class = getattr(transformers, _CONFIGS.get(family, f"{family}Config"))
    model_class = getattr(transformers, _MODELS.get(family, f"{family}ForCausalLM"))
    model = model_class(config_class(attn_implementation="eager", **keys)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            draw = torch.randn(weight.shape, generator=generator) * 0.2
            weight.copy_(weight + draw if weight.ndim == 1 else draw)
    return model


def _logits(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits.contiguous()


def _continued(model: torch.nn.Module, length: int) -> torch.Tensor:
    """A prompt and its likeliest continuation, each token from all before it: no cache is trusted.

    Prompts are drawn until no two tokens are about as likely anywhere, so that rounding decides nothing.
    """
    for seed in itertools.count():
        ids = torch.randint(0, 64, (1, length), generator=torch.Generator().manual_seed(seed))
        for _ in range(NEW):
            scores = _logits(model, ids)[0, -1]
            best = scores.topk(2).values
            if best[0] - best[1] < CLEAR * scores.abs().max():
                break
            ids = torch.cat([ids, scores.argmax()[None, None]], dim=1)
        else:
            return ids[0]


def make() -> None:
    """Writes all checkpoints and logits."""
    shutil.rmtree(HERE, ignore_errors=True)
    for name, (family, keys) in CASES.items():
        model = _model(family, keys)
        ids = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
        model.save_pretrained(HERE / name)
        texts = {f"text{length}": _continued(model, length) for length in PROMPTS}
        save_file({"ids": ids, "logits": _logits(model, ids), **texts}, HERE / name / "reference.safetensors")
        (HERE / name / "generation_config.json").unlink(missing_ok=True)
        print(name, sum(weight.numel() for weight in model.parameters()))
    make_packed()


def make_packed() -> None:
    """Writes a GPT-OSS whose experts are in MXFP4 as the released ones are, and what it computes with them."""
    keys = {**CASES["gpt-oss"][1], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    del keys["layer_types"]
    model = _model("GptOss", keys)
    model.save_pretrained(PACKED)
    generator = torch.Generator().manual_seed(2)
    tensors = load_file(PACKED / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, summed, others = tensors.pop(name).shape
        size = (experts, others, summed // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*size, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 126, size, generator=generator, dtype=torch.uint8)
        numbers = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        model.get_parameter(name).data = numbers.float()
    save_file(tensors, PACKED / "model.safetensors")
    config = json.loads((PACKED / "config.json").read_text())
    (PACKED / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    ids = torch.randint(0, 64, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    layer = model.model.layers[1].mlp.experts
    experts = {"gate_up": layer.gate_up_proj.half().contiguous(), "down": layer.down_proj.half().contiguous()}
    save_file({"ids": ids, "logits": _logits(model, ids), **experts}, PACKED / "reference.safetensors")
    (PACKED / "generation_config.json").unlink(missing_ok=True)


def check(folder: Path) -> None:
    """Prints how far logits of what `mw.hf.save` wrote are from those of the references."""
    for name in CASES:
        reference = load_file(HERE / name / "reference.safetensors")
        found, missing = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, attn_implementation="eager", output_loading_info=True
        )
        loaded = {key: sorted(names) for key, names in missing.items() if names}
        print(name, float((_logits(found, reference["ids"]) - reference["logits"]).abs().max()), loaded)


if __name__ == "__main__":
    check(Path(sys.argv[1])) if sys.argv[1:] else make()
