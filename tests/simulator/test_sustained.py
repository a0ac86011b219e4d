"""Collectives inside a step: NCCL's rings between hosts, the catalogue's times inside."""

import pytest

from meshwright.cost.sustained import ACROSS, INSIDE, link_of, sustained_s
from meshwright.hardware import cluster


def test_groups_inside_a_host_take_the_meshs_own_time():
    mesh = cluster("4x8 h100").mesh((4, 8))
    assert link_of(mesh, (1,)) == INSIDE
    assert sustained_s(mesh, "all_gather", (1,), 1e8, 0.5) == mesh.collective_s("all_gather", (1,), 1e8)


def test_between_hosts_a_busy_network_is_slower_and_gathers_go_round_in_rings():
    mesh = cluster("4x8 h100").mesh((32,))
    assert link_of(mesh, (0,)) == ACROSS
    assert sustained_s(mesh, "all_gather", (0,), 1e9, 0.8) == pytest.approx(
        sustained_s(mesh, "all_gather", (0,), 1e9, 1.0) / 0.8
    )
    small = 1e3  # trees are quicker for small messages, and NCCL does not gather by them
    assert sustained_s(mesh, "all_gather", (0,), small, 1.0) >= mesh.collective_s("all_gather", (0,), small)
