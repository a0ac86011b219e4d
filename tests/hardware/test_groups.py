"""What an axis crosses follows from its stride and size."""

import pytest

from meshwright.hardware import cluster
from meshwright.hardware.groups import domain_size, group_of


@pytest.mark.parametrize(
    ("spec", "shape", "axis", "hosts", "inside"),
    [
        ("50x4 a100", (50, 4), 0, 50, 1),
        ("50x4 a100", (50, 4), 1, 1, 4),
        ("50x4 a100", (25, 8), 1, 2, 4),
        ("50x4 a100", (25, 8), 0, 25, 1),
        ("50x4 a100", (100, 2), 0, 50, 2),
        ("50x4 a100", (2, 100), 1, 25, 4),
        ("50x4 a100", (200,), 0, 50, 4),
        ("2x8 h100", (2, 2, 4), 1, 1, 2),
        ("2x8 h100", (8, 2), 0, 2, 4),
        ("3 h100", (3,), 0, 1, 3),
        ("2x6 h100", (3, 4), 1, 2, 2),  # devices 4-7 lie half in each host
        ("2x6 h100", (4, 3), 1, 1, 3),
    ],
)
def test_hosts_and_members_of_an_axis(spec, shape, axis, hosts, inside):
    group = group_of(cluster(spec), shape, (axis,))
    assert (group.num_domains, group.inner.size) == (hosts, inside)


def test_several_axes_form_one_group():
    group = group_of(cluster("4x8 h100"), (4, 2, 4), (0, 2))
    assert (group.size, group.num_domains, group.inner.size) == (16, 4, 4)


def test_adapters_are_shared_by_the_groups_that_leave_a_host():
    found = cluster("4x8 h100")
    nic = found.inter.bandwidth
    assert group_of(found, (4, 8), (0,)).outer_bandwidth == nic  # eight groups, one adapter each
    assert group_of(found, (32,), (0,)).outer_bandwidth == 8 * nic  # one group has all of them
    assert group_of(found, (8, 4), (0,)).outer_bandwidth == 2 * nic
    assert group_of(found, (8, 4), (0,)).device_bandwidth == nic


def test_a_tpu_slice_is_one_domain():
    assert domain_size(cluster("16x4 tpu-v4")) == 64
    assert domain_size(cluster("64x8 tpu-v5e")) == 256  # two slices
    assert domain_size(cluster("16x8 h100")) == 8


def test_tpu_slices_are_joined_by_the_data_centre_network():
    found = cluster("64x8 tpu-v5e")
    assert group_of(found, (2, 256), (0,)).num_domains == 2
    assert group_of(found, (2, 256), (1,)).num_domains == 1
