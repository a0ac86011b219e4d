"""Whatever is wrong with a checkpoint is said in one sentence, and nothing half-written is left."""

import json
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("safetensors", reason="meshwright.hf needs the extra [hf]")
pytest.importorskip("tokenizers", reason="meshwright.hf needs the extra [hf]")

from safetensors.numpy import load_file, save_file

import meshwright as mw
from meshwright import zoo
from tests.hf.test_references import REFERENCES


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint, to be damaged."""
    return shutil.copytree(REFERENCES / "llama", tmp_path / "llama")


def change_config(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def in_two_files(folder):
    """The same checkpoint in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for number, some in enumerate((names[:9], names[9:])):
        save_file({name: tensors[name] for name in some}, folder / f"part{number}.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {name: f"part{names.index(name) // 9 and 1}.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def refused(path, match, **options):
    with pytest.raises(mw.CheckpointError, match=match) as caught:
        mw.hf.load(path, **options)
    assert "\n" not in str(caught.value)


def test_a_path_that_is_no_folder(tmp_path):
    refused(tmp_path / "nowhere", "nowhere does not exist; give the folder")
    refused(REFERENCES / "llama/config.json", "is a file; give the folder")
    refused(tmp_path, "has no config.json")


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"model_type": "lama"}, r"model_type is 'lama' \(did you mean 'llama'\?\), and the zoo has llama, qwen2, "),
        ({"hiden_size": 3}, r"the key 'hiden_size' is none of llama \(did you mean 'hidden_size'\?\); remove it"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", and the zoo\'s llama has "silu"'),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_type is 'longrope', and the zoo knows default, linear"),
        ({"rope_parameters": {"rope_type": "linear", "speed": 2}}, "of type 'linear' cannot be understood: .*speed"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, r"the weights are quantised \(mxfp4\)"),
        ({"quantization_config": "fp8"}, r"the weights are quantised \(fp8\)"),
        ({"dtype": "float8"}, "dtype is 'float8', and the zoo computes in bfloat16"),
        ({"num_hidden_layers": 3}, r"has no tensor model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, r"has model.layers.1.input_layernorm.weight, which the model .* and 8 more"),
        ({"intermediate_size": 20}, r"down_proj.weight has shape \(16, 24\), and config.json makes it \(16, 20\)"),
    ],
)
def test_a_configuration_that_the_zoo_does_not_have(folder, keys, match):
    change_config(folder, **keys)
    refused(folder, match)


def test_a_cap_that_transformers_does_not_apply_is_refused(tmp_path):
    """Its Gemma 3 reads the key and leaves the scores as they are."""
    folder = shutil.copytree(REFERENCES / "gemma3", tmp_path / "gemma3")
    change_config(folder, attn_logit_softcapping=50.0)
    refused(folder, "attn_logit_softcapping is 50.0, and the zoo's gemma has null")


def test_a_configuration_without_a_key_or_that_is_no_json(folder):
    keys = json.loads((folder / "config.json").read_text())
    del keys["hidden_size"]
    (folder / "config.json").write_text(json.dumps(keys))
    refused(folder, "the key 'hidden_size' is missing")
    (folder / "config.json").write_text("{")
    refused(folder, "config.json is no JSON")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"chekpoint": "full"}, r"llama has no option 'chekpoint' \(did you mean 'checkpoint'\?\)"),
        ({"layers": 1}, "llama has no option 'layers'"),
        ({"checkpoint": "some"}, "checkpoint='some' is none of 'none', 'selective'"),
        ({"dtype": "int8"}, "dtype='int8' of 'llama' is none of bfloat16"),
        ({"param_dtype": "int8"}, "param_dtype is 'int8', which is none of bfloat16"),
        ({"like": mw.parallelize(lambda state, x: (state, x))}, "has no plan yet"),
        ({"like": {"embed": np.zeros((64, 16))}}, "the tree has no parameter head of the model"),
    ],
)
def test_options_that_are_wrong(options, match):
    refused(REFERENCES / "llama", match, **options)


def test_a_missing_or_truncated_shard(folder):
    in_two_files(folder)
    assert mw.hf.load(folder).config.layers == 2
    whole = (folder / "part1.safetensors").read_bytes()
    (folder / "part1.safetensors").write_bytes(whole[:-100])
    refused(folder, r"part1.safetensors is damaged or truncated .*; download it again")
    (folder / "part1.safetensors").write_bytes(struct.pack("<Q", 2**40) + whole[8:])
    refused(folder, "part1.safetensors is damaged or truncated")
    (folder / "part1.safetensors").unlink()
    refused(folder, "names part1.safetensors, which is missing; download it")


def test_an_index_that_names_another_file(folder):
    in_two_files(folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["lm_head.weight"] = "part1.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "says that lm_head.weight is in part1.safetensors, and it is not")


def test_weights_that_are_only_there_as_a_pickle(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "has neither model.safetensors nor .* pickles, are not read")


def test_tensors_of_other_dtypes(folder):
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": np.ones(16, np.int8)}))
    refused(folder, "holds tensors of I8, and models of the zoo take F64, F32, F16, BF16")


def test_experts_of_different_dtypes(tmp_path):
    folder = shutil.copytree(REFERENCES / "mixtral", tmp_path / "mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: tensors[name].astype(np.float16)}))
    refused(folder, "the tensors of layers/1/gate have dtypes float16 and float32")


def test_a_state_of_another_model(folder):
    wrong = {"embed": np.zeros((3, 3))}
    full = mw.hf.load(folder).params | wrong
    refused(folder, "^like is of type int; give arrays", like=3)
    refused(folder, "^like: embed is of type str; give arrays", like={"embed": "x"})
    refused(folder, r"like: embed has shape \(3, 3\), and the model's has \(64, 16\)", like=full)


def test_what_transformers_does_not_have_is_not_saved(tmp_path):
    tiny = zoo.build("bert-tiny", layers=1)
    with pytest.raises(mw.CheckpointError, match="the zoo's bert is no architecture of transformers; gemma, gpt, "):
        mw.hf.save(tmp_path / "saved", tiny.init(0)["params"], tiny.config)
    model = mw.hf.load(REFERENCES / "llama")
    with pytest.raises(mw.CheckpointError, match="'extra' has no place in llama"):
        mw.hf.save(tmp_path / "saved", model.params | {"extra": np.zeros(3)}, model.config)
    assert list(tmp_path.iterdir()) == []


def test_experts_with_buffers_are_saved_as_the_model_that_they_are_of(tmp_path):
    """How tokens are grouped is a choice of who trains; it is in no configuration."""
    model = mw.hf.load(REFERENCES / "mixtral", group_size=4, capacity_factor=2.0)
    mw.hf.save(tmp_path / "saved", model.params, model.config)
    assert mw.hf.load(tmp_path / "saved").config == mw.hf.load(REFERENCES / "mixtral").config


def test_places_where_nothing_can_be_written(tmp_path):
    model = mw.hf.load(REFERENCES / "llama")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("kept")
    with pytest.raises(mw.OutputError, match="full: it is there already; choose another place"):
        mw.hf.save(tmp_path / "full", model.params, model.config)
    with pytest.raises(mw.OutputError, match=r"there is no folder .*nowhere; make it first"):
        mw.hf.save(tmp_path / "nowhere" / "saved", model.params, model.config)
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "note"]


FULL_DISK = """
import resource, signal, sys
import meshwright as mw
model = mw.hf.load(sys.argv[1])
model.params
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    mw.hf.save(sys.argv[2], model.params, model.config)
except mw.OutputError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_disk_that_is_full_leaves_nothing(tmp_path):
    """The limit on the size of files stands for the full disk: a write fails midway."""
    arguments = [sys.executable, "-c", FULL_DISK, str(REFERENCES / "llama"), str(tmp_path / "saved")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"cannot write {tmp_path / 'saved'}: " in done.stdout
    assert list(tmp_path.iterdir()) == []
