"""Figures as people write them."""

import pytest

from meshwright.errors import ClusterError
from meshwright.hardware.tables import check_keys, quantity, read_toml, whole


@pytest.mark.parametrize(
    ("written", "number"),
    [
        (25e9, 25e9),
        (3, 3.0),
        ("25GB/s", 25e9),
        ("200Gbit/s", 25e9),
        ("1.5 Tbit/s", 187.5e9),
        ("79.6GiB", 79.6 * 2**30),
        ("900 GB/s", 900e9),
    ],
)
def test_quantities(written, number):
    assert quantity(written, "here") == pytest.approx(number)


@pytest.mark.parametrize(
    "written", ["", "fast", "-3GB", "3 furlongs", None, [], True, float("nan"), float("inf"), -1, 0]
)
def test_bad_quantities_name_their_place(written):
    with pytest.raises(ClusterError, match="here"):
        quantity(written, "here")


def test_zero_is_legal_only_where_it_means_something():
    assert quantity(0, "here", zero=True) == 0.0


@pytest.mark.parametrize("written", [0, -1, 1.0, "1", True, None])
def test_counts_are_whole_numbers(written):
    with pytest.raises(ClusterError, match="whole number of at least 1"):
        whole(written, "here")


def test_unknown_keys_are_refused_with_the_legal_ones():
    with pytest.raises(ClusterError, match=r"here: unknown key 'q'; legal keys are hosts, name\."):
        check_keys({"q": 1}, ("name", "hosts"), "here")


def test_malformed_toml_names_the_line(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text("a = 1\nb = ]\n", encoding="utf-8")
    with pytest.raises(ClusterError, match="line 2"):
        read_toml(path)
