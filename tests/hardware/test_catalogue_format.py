"""Catalogue files: what a chip's or link's file must and must not say."""

import copy
from importlib.resources import files

import pytest

from meshwright.errors import ClusterError
from meshwright.hardware.catalogue_format import read_chip, read_link
from meshwright.hardware.lookup import find_link
from meshwright.hardware.tables import read_toml

CATALOGUE = files("meshwright.hardware").joinpath("catalogue")


@pytest.fixture
def chip_data():
    return copy.deepcopy(read_toml(CATALOGUE / "h100-sxm-80gb.toml"))


@pytest.fixture
def link_data():
    return copy.deepcopy(read_toml(CATALOGUE / "links" / "nvlink4.toml"))


def test_a_chip_keeps_the_source_of_its_links_figures(chip_data):
    chip = read_chip(chip_data, "mine.toml", find_link)
    by_name = {figure.name: figure for figure in chip.figures}
    assert by_name["intra.bandwidth"].value == chip.intra.bandwidth
    assert by_name["intra.simple.efficiency"].sure == "measured"
    assert by_name["inter.simple.hop_s"].value == pytest.approx(14e-6)


@pytest.mark.parametrize("key", ["memory", "memory_bandwidth", "vector_flops"])
def test_a_chip_needs_its_main_figures(chip_data, key):
    del chip_data["figures"][key]
    with pytest.raises(ClusterError, match=rf"mine\.toml \[figures\]: the key '{key}' is missing"):
        read_chip(chip_data, "mine.toml", find_link)


@pytest.mark.parametrize("key", ["name", "vendor"])
def test_a_chip_needs_a_name_and_a_vendor(chip_data, key):
    del chip_data[key]
    with pytest.raises(ClusterError, match=f"'{key}' is missing"):
        read_chip(chip_data, "mine.toml", find_link)


@pytest.mark.parametrize(
    ("figure", "message"),
    [
        (3e12, "must say where it comes from"),
        ({"value": 3e12, "sure": "vendor"}, r"source None is not in \[sources\]"),
        ({"value": 3e12, "source": "hearsay", "sure": "vendor"}, "source 'hearsay'"),
        ({"value": 3e12, "source": "stas", "sure": "certain"}, "must be one of measured, vendor, assumed"),
        ({"value": -1, "source": "stas", "sure": "vendor"}, "must be at least 0"),
        ({"source": "stas", "sure": "vendor"}, "'value' is missing"),
        ({"value": 1, "source": "stas", "sure": "vendor", "date": "now"}, "unknown key 'date'"),
    ],
)
def test_every_figure_must_be_sourced(chip_data, figure, message):
    chip_data["figures"]["memory_bandwidth"] = figure
    with pytest.raises(ClusterError, match=message):
        read_chip(chip_data, "mine.toml", find_link)


def test_fractions_are_at_most_one(chip_data):
    chip_data["figures"]["best_fraction"]["value"] = 1.2
    with pytest.raises(ClusterError, match=r"best_fraction is 1\.2 but must be at most 1"):
        read_chip(chip_data, "mine.toml", find_link)


def test_a_link_needs_protocols(link_data):
    del link_data["protocols"]
    with pytest.raises(ClusterError, match="'protocols' is missing"):
        read_link(link_data, "wire.toml")


def test_a_protocol_needs_its_figures(link_data):
    del link_data["protocols"][0]["hop_s"]
    with pytest.raises(ClusterError, match=r"wire\.toml \[\[protocols\]\]: the key 'hop_s' is missing"):
        read_link(link_data, "wire.toml")


def test_a_link_may_lack_nothing_it_is_asked_for(link_data):
    link, figures = read_link(link_data, "wire.toml")
    assert link.bandwidth == 1.0
    assert {figure.name for figure in figures} >= {"copy_bandwidth", "ll.base_s", "nvls.efficiency"}
