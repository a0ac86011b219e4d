"""Chips and links as plain data."""

import json

import pytest

from meshwright.hardware import Chip, chips
from meshwright.hardware.link import Link
from meshwright.hardware.storage import to_plain
from meshwright.schema import built


@pytest.mark.parametrize("chip", chips(), ids=lambda chip: chip.name)
def test_chips_and_links_survive_json(chip):
    assert built(Chip, json.loads(json.dumps(to_plain(chip))), "chip") == chip
    assert built(Link, json.loads(json.dumps(to_plain(chip.intra))), "link") == chip.intra


def test_sources_stay_in_the_catalogue():
    assert "figures" not in to_plain(chips()[0])
