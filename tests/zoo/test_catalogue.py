"""The catalogue: names, sources, and what a wrong name says."""

import subprocess
import sys

import pytest

from meshwright import MeshwrightError, zoo

PROMISED = [
    *("mlp", "gpt2-125m", "gpt3-175b", "bert-base", "bert-large", "llama2-7b", "llama2-13b", "llama2-70b"),
    *("llama3-8b", "llama3-70b", "llama3-405b", "gshard-moe-380m", "gshard-moe-70b", "mixtral-8x7b"),
    *("wide-resnet-50-2", "wide-resnet-250m", "wide-resnet-13b", "vit-b16", "vit-l16", "vit-h14", "unet-cifar10"),
]


def test_promised_models_are_listed():
    assert set(PROMISED) <= set(zoo.names())


def test_names_are_unique_and_every_family_has_a_tiny_member():
    assert len(zoo.names()) == len(set(zoo.names()))
    families = {zoo.entry(name).family for name in zoo.names()}
    with_tiny = {zoo.entry(name).family for name in zoo.names() if name.endswith("-tiny")}
    assert families - with_tiny == {"mlp"}  # which is tiny itself


@pytest.mark.parametrize("name", zoo.names())
def test_entry_is_described_and_sourced(name):
    entry = zoo.entry(name)
    assert entry.description and entry.source and entry.batch > 0
    assert entry.num_params or name.endswith("-tiny") or name in ("mlp", "gshard-moe-cfp")  # published without one


def test_unknown_name_suggests_near_ones():
    with pytest.raises(MeshwrightError, match=r"Unknown model 'lama2-13b'\. Did you mean 'llama2-13b'"):
        zoo.entry("lama2-13b")


def test_hopeless_name_points_to_the_list():
    with pytest.raises(zoo.ZooError, match=r"Unknown model 'zzz'\. `meshwright models` lists all"):
        zoo.build("zzz")


def test_listing_the_zoo_loads_no_jax():
    script = "import sys; from meshwright import zoo; zoo.names(); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
