"""Clusters and their logical views."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ClusterError
from meshwright.hardware import Cluster, cluster
from meshwright.hardware.link import Timing


def test_a_cluster_knows_its_size_and_memory():
    found = cluster("50x4 a100-40gb")
    assert (found.num_hosts, found.devices_per_host, found.num_devices) == (50, 4, 200)
    assert found.memory_bytes == found.chip.memory_bytes == int(39.5 * 2**30)
    assert "50x4" in repr(found)


def test_mesh_axes_are_named_in_order():
    mesh = cluster("2x8 h100").mesh((2, 2, 4))
    assert mesh.names == ("x", "y", "z")
    assert mesh.shape == {"x": 2, "y": 2, "z": 4}
    assert mesh.num_devices == 16


@pytest.mark.parametrize("shape", [(3, 5), (16, 2), (1,), (4, 4, 4)])
def test_a_mesh_must_use_all_devices(shape):
    with pytest.raises(ClusterError, match=r"product is 16.*\(2, 8\)"):
        cluster("2x8 h100").mesh(shape)


@pytest.mark.parametrize("shape", [(), (2, 2, 2, 2, 1)])
def test_a_mesh_has_one_to_four_axes(shape):
    with pytest.raises(ClusterError, match=r"1 to 4 axes, .* merge neighbouring ones"):
        cluster("2x8 h100").mesh(shape)


def test_views_that_are_searched_have_at_most_three_axes():
    machine = cluster("2x8 h100")
    assert max(len(mesh.sizes) for mesh in machine.meshes()) == 3
    assert (2, 2, 2, 2) in [mesh.sizes for mesh in machine.meshes(max_axes=4)]


@pytest.mark.parametrize("shape", [(-2, -8), (0,), (1.5, 2), (True, 16)])
def test_mesh_sizes_are_whole_numbers(shape):
    with pytest.raises(ClusterError, match="whole numbers"):
        cluster("2x8 h100").mesh(shape)


@pytest.mark.parametrize(("spec", "num_devices"), [("3 h100", 3), ("6 h100", 6), ("3x4 h100", 12), ("50x4 a100", 200)])
def test_views_are_complete(spec, num_devices):
    shapes = [mesh.sizes for mesh in cluster(spec).meshes()]
    sizes = [size for size in range(2, num_devices + 1) if num_devices % size == 0]
    by_hand = {
        shape
        for length in (1, 2, 3)
        for shape in itertools.product(sizes, repeat=length)
        if math.prod(shape) == num_devices
    }
    assert set(shapes) == by_hand
    assert len(shapes) == len(by_hand)


@settings(deadline=None, max_examples=25)
@given(hosts=st.integers(1, 12), devices=st.integers(1, 8), max_axes=st.integers(1, 3))
def test_every_view_uses_every_device(hosts, devices, max_axes):
    found = cluster(f"{hosts}x{devices} a100")
    for mesh in found.meshes(max_axes):
        assert mesh.num_devices == found.num_devices
        assert len(mesh.sizes) <= max_axes


def test_one_device_has_one_view():
    assert [mesh.sizes for mesh in cluster("1 h100").meshes()] == [(1,)]


@pytest.mark.parametrize("max_axes", [0, 5])
def test_views_have_at_most_four_axes(max_axes):
    with pytest.raises(ClusterError, match="1 to 4, not"):
        cluster("8 h100").meshes(max_axes)


@pytest.mark.parametrize("spec", ["50x4 a100-40gb", "2x8 v100", "8 mi300x", "4x4 tpu-v4", "2 cpu"])
def test_clusters_survive_json(spec):
    import json

    found = cluster(spec)
    assert Cluster.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_a_measured_cluster_survives_json():
    import json

    plain = cluster("2x4 cpu")
    timing = Timing("all_reduce", 4, 1e-5, 1e-9)
    intra = replace(plain.intra, timings=(timing,))
    found = replace(plain, host=replace(plain.host, intra=intra), known="measured on vm, 2026-01-02")
    assert Cluster.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert not {"known", "timings"} & {*plain.to_json(), *plain.to_json()["intra"], *plain.to_json()["chip"]["intra"]}
    assert found.mesh((2, 4)).alternatives("all_reduce", (1,)) == ((1e-5, 1e-9),)
    for axes in ((0,), (0, 1)):  # what crosses hosts was not measured
        mesh = found.mesh((2, 4))
        assert mesh.alternatives("all_reduce", axes) == plain.mesh((2, 4)).alternatives("all_reduce", axes)
