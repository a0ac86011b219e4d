"""Chips and links as plain data."""

import json

import pytest

from meshwright.hardware import chips
from meshwright.hardware.storage import chip_from_json, link_from_json, to_plain


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_chips_and_links_survive_json(chip):
    assert chip_from_json(json.loads(json.dumps(to_plain(chip)))) == chip
    assert link_from_json(json.loads(json.dumps(to_plain(chip.intra)))) == chip.intra


def test_sources_stay_in_the_catalogue():
    assert "figures" not in to_plain(chips()[0])
