"""Meshes as values: axes, caching, copies, and refusals."""

import json
import pickle

import numpy as np
import pytest

from meshwright.errors import ClusterError
from meshwright.hardware import Mesh, cluster
from meshwright.hardware.collectives import KINDS


def meshes():
    return [
        Mesh.abstract((4, 8), alpha=(1, 1), beta=(1, 0.01), memory_bytes=10**9),
        Mesh.abstract((4, 1), alpha=1, beta=2),
        cluster("50x4 a100-40gb").mesh((50, 4)),
        cluster("4x4 tpu-v4").mesh((4, 4)),
    ]


@pytest.mark.parametrize("mesh", meshes(), ids=repr)
def test_meshes_are_values(mesh):
    mesh.collective_s("all_reduce", (0,), 1e6)  # a filled cache changes nothing
    for copy in (pickle.loads(pickle.dumps(mesh)), Mesh.from_json(json.loads(json.dumps(mesh.to_json())))):
        assert copy == mesh
        assert hash(copy) == hash(mesh)
        for kind in KINDS:
            assert copy.alternatives(kind, (0,)) == mesh.alternatives(kind, (0,))


def test_an_abstract_mesh_has_no_chip():
    mesh = Mesh.abstract((4, 8), alpha=(1, 1), beta=(1, 0.01), memory_bytes=10**9)
    assert mesh.is_abstract
    assert mesh.chip is None
    assert mesh.cluster is None
    assert mesh.memory_bytes == 10**9
    assert mesh.shape == {"x": 4, "y": 8}
    assert Mesh.abstract((4,), 1, 1).memory_bytes is None


def test_a_cluster_mesh_knows_its_machines():
    mesh = cluster("2x8 h100").mesh((16,))
    assert not mesh.is_abstract
    assert mesh.chip.name == "h100-sxm-80gb"
    assert mesh.memory_bytes == mesh.cluster.memory_bytes


@pytest.mark.parametrize("mesh", meshes(), ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_arrays_in_arrays_out(mesh, kind):
    sizes = np.array([[0.0, 1.0], [1e5, 1e9]])
    times = mesh.collective_s(kind, (0,), sizes)
    assert times.shape == sizes.shape
    assert times[0, 0] == 0.0
    one_by_one = [[mesh.collective_s(kind, (0,), size) for size in row] for row in sizes.tolist()]
    np.testing.assert_allclose(times, one_by_one)
    assert isinstance(mesh.collective_s(kind, (0,), np.int64(5)), float)


@pytest.mark.parametrize("mesh", meshes(), ids=repr)
def test_the_time_is_the_least_of_the_alternatives(mesh):
    ways = mesh.alternatives("all_reduce", (0,))
    assert all(isinstance(alpha, float) and isinstance(beta, float) for alpha, beta in ways)
    for size in (1e3, 1e6, 1e9):
        assert mesh.collective_s("all_reduce", (0,), size) == min(alpha + beta * size for alpha, beta in ways)


def test_nothing_to_do_is_free():
    mesh = cluster("2x8 h100").mesh((2, 8))
    assert mesh.collective_s("all_reduce", (0,), 0) == 0.0
    assert mesh.collective_s("all_reduce", (), 1e9) == 0.0
    assert cluster("1 h100").mesh((1,)).collective_s("all_gather", (0,), 1e9) == 0.0


@pytest.mark.parametrize("axes", [(2,), (-1,), (0, 0)])
def test_axes_must_exist_and_differ(axes):
    with pytest.raises(ClusterError, match="distinct indices of a mesh of 2 axes"):
        cluster("2x8 h100").mesh((2, 8)).collective_s("all_reduce", axes, 1)


def test_an_unknown_collective_lists_the_known_ones():
    with pytest.raises(ClusterError, match="'allreduce': use one of all_reduce"):
        cluster("8 h100").mesh((8,)).collective_s("allreduce", (0,), 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, 2, 2, 2, 2), "alpha": 1, "beta": 1}, "1 to 4 axes"),
        ({"shape": (0, 2), "alpha": 1, "beta": 1}, "at least 1"),
        ({"shape": (2, 2), "alpha": (1,), "beta": 1}, "alpha has 1 numbers for 2 axes"),
        ({"shape": (2, 2), "alpha": 1, "beta": (1, -1)}, "beta must not be negative"),
        ({"shape": (2, 2), "alpha": 1, "beta": float("nan")}, "beta must not be negative"),
        ({"shape": (2, 2), "alpha": 1, "beta": 1, "memory_bytes": -5}, "memory_bytes must be above 0"),
        ({"shape": (2, 2), "alpha": 1, "beta": 1, "memory_bytes": "1GB"}, "memory_bytes must be above 0, not '1GB'"),
        ({"shape": 4, "alpha": 1, "beta": 1}, "the shape of a mesh is 4: give a size for each axis"),
    ],
)
def test_bad_abstract_meshes_are_refused(arguments, message):
    with pytest.raises(ClusterError, match=message):
        Mesh.abstract(**arguments)


def test_axes_say_which_wires_they_cross():
    found = cluster("2x8 h100")
    assert found.mesh((2, 8)).link_of(0) == "infiniband x 2"
    assert found.mesh((2, 8)).link_of(1) == "nvlink4 x 8"
    assert found.mesh((16,)).link_of(0) == "nvlink4 x 8, then infiniband x 2"
    assert Mesh.abstract((2,), 1, 1).link_of(0) == "abstract"
