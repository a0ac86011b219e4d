"""Shapes of meshes with and without names."""

import pytest

import meshwright as mw
from meshwright.hardware import Mesh


def test_names_survive_a_file():
    mesh = mw.cluster("2x4 h100").mesh({"data": 2, "model": 4})
    assert Mesh.from_json(mesh.to_json()) == mesh and "data=2" in repr(mesh)
    abstract = Mesh.abstract({"data": 2}, 1, 1)
    assert Mesh.from_json(abstract.to_json()) == abstract


def test_files_of_unnamed_meshes_are_as_they_were():
    assert set(mw.cluster("2x4 h100").mesh((2, 4)).to_json()) == {"shape", "cluster"}


@pytest.mark.parametrize("shape", ["ab", {"": 2, "b": 4}, {1: 2, "b": 4}])
def test_shapes_that_have_no_meaning_are_refused(shape):
    with pytest.raises(mw.ClusterError, match=r"give (a size for each axis|each axis a name)"):
        mw.cluster("2x4 h100").mesh(shape)
