"""Mesh views: aligned with the machines, few, and never without the plain ones."""

from math import prod

import pytest

import meshwright as mw
from meshwright.planner.mesh_views import auto_meshes, worth_refining

CLUSTERS = ["1x1 cpu", "1x3 l40s", "1x8 h100", "7x1 l40s", "2x4 v100-32gb", "50x4 a100-40gb", "64x8 h100", "97x8 h100"]


def shapes(spec):
    return [mesh.sizes for mesh in auto_meshes(mw.cluster(spec))]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("1x1 cpu", [(1,)]),
        ("1x3 l40s", [(3,)]),
        ("7x1 l40s", [(7,)]),
        ("1x4 a100-40gb", [(4,), (2, 2)]),
        ("2x4 v100-32gb", [(8,), (2, 4), (4, 2)]),
        ("1x8 h100", [(8,), (2, 4), (4, 2)]),
    ],
)
def test_a_small_cluster_has_these_views(spec, expected):
    assert shapes(spec) == expected


@pytest.mark.parametrize("spec", CLUSTERS)
def test_views_use_every_device_once_and_none_twice(spec):
    found = shapes(spec)
    assert all(prod(shape) == mw.cluster(spec).num_devices for shape in found)
    assert len(set(found)) == len(found)
    assert all(1 <= len(shape) <= 3 for shape in found)
    assert all(size > 1 for shape in found for size in shape) or found == [(1,)]


@pytest.mark.parametrize("spec", CLUSTERS)
def test_no_axis_lies_across_the_border_of_hosts(spec):
    """Counted from the last axis: where the devices of a host end, an axis ends, or one runs over whole hosts."""
    machine = mw.cluster(spec)
    for shape in shapes(spec):
        inner = 1
        for size in reversed(shape):
            inside, over = machine.devices_per_host % (inner * size) == 0, inner * size % machine.devices_per_host == 0
            assert inside or over, shape
            inner *= size


@pytest.mark.parametrize("spec", [c for c in CLUSTERS if not c.startswith("1x1")])
def test_the_plain_views_are_always_there(spec):
    machine = mw.cluster(spec)
    assert (machine.num_devices,) in shapes(spec)
    if machine.num_hosts > 1 and machine.devices_per_host > 1:
        assert (machine.num_hosts, machine.devices_per_host) in shapes(spec)


@pytest.mark.parametrize("spec", ["64x8 h100", "50x4 a100-40gb", "720x8 h100"])
def test_a_large_cluster_has_few_views_spread_over_its_divisors(spec):
    hosts = mw.cluster(spec).num_hosts
    found = shapes(spec)
    assert len(found) <= 16
    outer = {shape[0] for shape in found if len(shape) == 3 and shape[0] < hosts}
    assert {
        min(d for d in range(2, hosts) if hosts % d == 0),
        max(d for d in range(2, hosts) if hosts % d == 0),
    } <= outer


def test_of_views_of_three_axes_those_are_solved_whose_merged_views_promise_most():
    machine = mw.cluster("32x8 h100")
    fine = [mesh for mesh in auto_meshes(machine) if len(mesh.sizes) == 3]
    floors = {mesh.sizes: 1.0 for mesh in auto_meshes(machine) if len(mesh.sizes) < 3} | {(4, 64): 0.8, (2, 128): 0.9}
    assert [mesh.sizes for mesh in worth_refining(fine, floors)] == [(2, 16, 8), (4, 8, 8)]
    assert worth_refining(fine, {}) == fine  # nothing is known of what they refine
