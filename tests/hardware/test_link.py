"""Bandwidth that a group of devices gets from switches, partial meshes and shared buses."""

import pytest

from meshwright.hardware import find_chip
from meshwright.hardware.link import Link, Protocol, Timing

PLAIN = (Protocol("plain", 1e-6, 1e-6, 1.0),)


def test_a_switch_gives_every_group_the_full_rate():
    link = find_chip("h100").intra
    assert link.group_bandwidth((0, 1), 8) == link.group_bandwidth(tuple(range(8)), 8) == 450e9


def test_a_full_mesh_gives_a_pair_one_wire():
    link = find_chip("mi300x").intra
    assert link.group_bandwidth((0, 1), 8) == pytest.approx(64e9)
    assert link.group_bandwidth((0, 1, 2, 3), 8) == pytest.approx(3 * 64e9)
    assert link.group_bandwidth(tuple(range(8)), 8) == pytest.approx(448e9)
    assert link.pair_bandwidth(tuple(range(8)), 8) == pytest.approx(64e9)


@pytest.mark.parametrize(
    ("members", "num_wires"), [((0, 1), 1), ((0, 3), 2), ((0, 4), 2), ((0, 1, 2, 3), 4), (tuple(range(8)), 6)]
)
def test_the_v100_cube_mesh(members, num_wires):
    assert find_chip("v100").intra.group_bandwidth(members, 8) == pytest.approx(num_wires * 25e9)


def test_devices_that_no_wire_joins_share_the_bus():
    link = find_chip("v100").intra
    assert link.group_bandwidth((0, 5), 8) == pytest.approx(link.shared_bandwidth / 8)
    assert link.pair_bandwidth((0, 5), 8) == pytest.approx(link.shared_bandwidth / 8)
    assert link.group_bandwidth((0, 1, 6, 7), 8) < 25e9  # two joined pairs, but nothing between them


def test_a_host_larger_than_the_known_graph_has_a_switch():
    link = find_chip("v100-32gb").intra
    assert link.group_bandwidth(tuple(range(16)), 16) == link.bandwidth
    assert link.pair_bandwidth((14, 15), 16) == link.bandwidth


def test_a_shared_bus_is_divided_among_all_active_devices():
    link = Link("bus", 32e9, PLAIN, topology="shared", shared_bandwidth=64e9)
    assert link.group_bandwidth((0, 1), 2) == 32e9
    assert link.group_bandwidth((0, 1), 8) == 8e9


def test_protocols_serve_some_collectives_and_sizes():
    protocol = Protocol("nvls", 1e-6, 0, 1.0, kinds=("all_reduce",), min_size=8)
    assert protocol.serves("all_reduce", 8)
    assert not protocol.serves("all_reduce", 4)
    assert not protocol.serves("all_gather", 8)


def test_a_measured_collective_costs_what_was_measured():
    link = Link("bus", 1e9, PLAIN, timings=(Timing("all_to_all", 2, 1e-5, 8e-9), Timing("all_to_all", 8, 4e-5, 2e-9)))
    assert link.measured("all_to_all", 2) == (1e-5, 8e-9)
    assert link.measured("all_to_all", 8) == (4e-5, 2e-9)
    assert link.measured("all_to_all", 4) == pytest.approx((2e-5, 4e-9))
    assert link.measured("all_to_all", 16) == (4e-5, 2e-9)
    assert link.measured("all_to_all", 1) == (1e-5, 8e-9)
    assert link.measured("all_reduce", 4) is None
