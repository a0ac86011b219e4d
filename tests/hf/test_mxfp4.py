"""Experts in MXFP4, as the released GPT-OSS has them, are the numbers that transformers makes of them."""

import shutil
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

from safetensors.numpy import load_file, save_file

import meshwright as mw
from meshwright.hf.mxfp4 import decoded
from tests.compiling import QUICK
from tests.hf.test_bad_input import refused
from tests.hf.test_references import REFERENCES

PACKED = REFERENCES.with_name("packed_reference")
BLOCKS = "model.layers.1.mlp.experts.down_proj_blocks"


def test_a_byte_has_two_numbers_and_a_block_has_one_scale():
    """All 256 bytes, by the definition: a sign, two bits of exponent of bias 1, one bit of mantissa."""

    def number(bits):
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
        return -size if bits & 8 else size

    exponents = np.arange(120, 136, dtype=np.uint8)
    found = decoded(np.arange(256, dtype=np.uint8).reshape(16, 16), exponents)
    bits = [(byte >> shift & 15, byte // 16) for byte in range(256) for shift in (0, 4)]
    assert found.tolist() == [number(one) * 2.0 ** (int(exponents[block]) - 127) for one, block in bits]


@pytest.mark.slow
@pytest.mark.devices
def test_the_experts_and_logits_are_those_of_transformers(tmp_path):
    model = mw.hf.load(PACKED)
    reference = load_file(PACKED / "reference.safetensors")
    layer = model.params["layers"][1]
    assert layer["gate"].dtype == layer["down"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(layer["gate"], np.float32), reference["gate_up"][..., ::2])
    np.testing.assert_array_equal(np.asarray(layer["up"], np.float32), reference["gate_up"][..., 1::2])
    np.testing.assert_array_equal(np.asarray(layer["down"], np.float32), reference["down"])
    forward = jax.jit(model.forward).lower(model.params, reference["ids"]).compile(compiler_options=QUICK)
    np.testing.assert_allclose(forward(model.params, reference["ids"]), reference["logits"], rtol=0, atol=1e-5)
    mw.hf.save(tmp_path / "saved", model.params, model.config, source=PACKED)
    again = mw.hf.load(tmp_path / "saved")
    assert again.config == model.config and not again.tensors.are_packed
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)


@pytest.mark.slow
@pytest.mark.devices
def test_each_device_reads_its_own_parts_of_blocks():
    """Also parts that begin within a block, which the heads and columns of 8 devices do."""
    whole = mw.hf.load(PACKED).params
    mesh = jax.sharding.Mesh(np.array(jax.devices()), "x")

    def split(dim, leaf):
        axes = [None] * leaf.ndim
        if leaf.ndim == 3 and leaf.shape[dim] % 8 == 0:
            axes[dim] = "x"
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    for dim in (1, 2):
        like = jax.tree.map(partial(split, dim), whole)
        found = mw.hf.load(PACKED, like=like).params
        assert found["layers"][0]["down"].addressable_shards[0].data.shape == ((4, 8, 32), (4, 64, 4))[dim - 1]
        jax.tree.map(np.testing.assert_array_equal, found, whole)


def test_what_is_no_such_checkpoint_is_refused(tmp_path):
    folder = shutil.copytree(PACKED, tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {BLOCKS: tensors[BLOCKS][:, :3]}, folder / "model.safetensors")
    refused(folder, r"down_proj_blocks has shape \(4, 3, 2, 16\), and that of its scales makes it \(4, 32, 2, 16\)")
    del tensors[BLOCKS]
    save_file(tensors, folder / "model.safetensors")
    refused(folder, "has no tensor model.layers.1.mlp.experts.down_proj ")
