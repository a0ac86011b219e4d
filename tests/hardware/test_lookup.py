"""The catalogue: every asked-for chip, exact names, sources, and helpful refusals."""

import pytest

from meshwright.errors import ClusterError
from meshwright.hardware import chips, find_chip
from meshwright.hardware.chip import SURENESS
from meshwright.hardware.lookup import find_device_kind, find_link

WANTED = [
    "v100-16gb",
    "v100-32gb",
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "a100-pcie-40gb",
    "a100-pcie-80gb",
    "h100-sxm-80gb",
    "h100-pcie-80gb",
    "h200-sxm-141gb",
    "b200-sxm-180gb",
    "mi250x",
    "mi300x",
    "l40s",
    "rtx-4090",
    "rtx-3090",
    "a10g",
    "l4",
    "t4",
    "tpu-v3",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
    "tpu-v6e",
    "cpu",
]


def test_the_catalogue_holds_every_promised_chip():
    assert {chip.name for chip in chips()} >= set(WANTED)


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("a100-40gb", "a100-sxm-40gb"),
        ("a100-80gb", "a100-sxm-80gb"),
        ("h100", "h100-sxm-80gb"),
        ("H100", "h100-sxm-80gb"),
        ("v100", "v100-16gb"),
        ("h200", "h200-sxm-141gb"),
        ("b200", "b200-sxm-180gb"),
        ("rtx4090", "rtx-4090"),
        ("v5e", "tpu-v5e"),
    ],
)
def test_aliases(alias, name):
    assert find_chip(alias).name == name


@pytest.mark.parametrize("name", ["a10", "100", "h10", "h100-sxm-80", "tpu", ""])
def test_names_are_never_matched_by_part(name):
    with pytest.raises(ClusterError, match="unknown chip"):
        find_chip(name)


def test_an_unknown_chip_names_its_neighbours_and_the_remedy():
    with pytest.raises(ClusterError) as caught:
        find_chip("h1000")
    message = str(caught.value)
    assert "'h1000'" in message
    assert "h100" in message
    assert "docs/inside/add-a-chip.md" in message


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_every_figure_has_a_source_a_date_and_how_sure_it_is(chip):
    names = {figure.name for figure in chip.figures}
    assert {"memory", "memory_bandwidth", "vector_flops", "intra.bandwidth", "inter.bandwidth"} <= names
    assert {f"flops.{dtype}" for dtype, _ in chip.flops} <= names
    for figure in chip.figures:
        assert figure.source
        assert figure.date.startswith("20")
        assert figure.sure in SURENESS


def test_devices_are_recognised_by_the_kind_that_jax_reports():
    chip = find_device_kind("NVIDIA H200")
    assert chip is not None
    assert chip.name == "h200-sxm-141gb"
    assert find_device_kind("NVIDIA") is None


def test_an_unknown_link_names_its_neighbour():
    with pytest.raises(ClusterError, match="did you mean 'nvlink4'"):
        find_link("nvlink-4")


def test_a_vendors_own_model_is_not_a_measurement():
    figures = {f for chip in chips() for f in chip.figures if "tuning tables" in f.source}
    assert {f.name.split(".")[0] for f in figures} >= {"inter"}
    assert {f.sure for f in figures} == {"vendor"}
