"""Descriptions of clusters that users write, good and bad."""

import subprocess
import sys

import pytest

from meshwright.errors import ClusterError
from meshwright.hardware import cluster


@pytest.mark.parametrize(
    ("spec", "hosts", "devices", "chip"),
    [
        ("50x4 a100-40gb", 50, 4, "a100-sxm-40gb"),
        ("8 h100", 1, 8, "h100-sxm-80gb"),
        (" 2 x 8  H100 ", 2, 8, "h100-sxm-80gb"),
        ("4×8 tpu-v5e", 4, 8, "tpu-v5e"),
        ("1x1 cpu", 1, 1, "cpu"),
    ],
)
def test_short_descriptions(spec, hosts, devices, chip):
    found = cluster(spec)
    assert (found.num_hosts, found.devices_per_host, found.chip.name) == (hosts, devices, chip)


def test_a_cluster_describes_itself():
    found = cluster("8 h100")
    assert cluster(found) is found


@pytest.mark.parametrize(
    "spec", ["50x a100", "a100", "", "x4 a100", "50x4", "4x8x2 h100", "-2x4 h100", "2x4 h100 fast"]
)
def test_bad_descriptions_show_the_legal_form(spec):
    with pytest.raises(ClusterError, match=r"cannot read cluster .*HOSTSxDEVICES CHIP.*50x4 a100-40gb"):
        cluster(spec)


@pytest.mark.parametrize("spec", ["0x4 a100", "4x0 a100", "0 h100"])
def test_a_cluster_needs_devices(spec):
    with pytest.raises(ClusterError, match="at least 1"):
        cluster(spec)


def test_an_unknown_chip_is_named():
    with pytest.raises(ClusterError, match="unknown chip 'b100'"):
        cluster("2x8 b100")


@pytest.mark.parametrize("spec", [None, 8, ["8 h100"]])
def test_only_text_describes_a_cluster(spec):
    with pytest.raises(ClusterError, match="described by text"):
        cluster(spec)


def test_a_missing_file_is_one_sentence():
    with pytest.raises(ClusterError, match=r"no file .*nowhere\.toml") as caught:
        cluster("nowhere.toml")
    assert caught.value.__suppress_context__


def test_local_sees_the_devices_of_this_process():
    found = cluster("local")
    import jax

    assert found.num_devices == jax.device_count()
    assert found.num_hosts == 1


def test_describing_a_cluster_loads_no_jax():
    code = "import sys, meshwright as mw; mw.cluster('50x4 a100-40gb').meshes(); assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
