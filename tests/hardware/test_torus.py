"""Mesh axes on the dims of a TPU torus."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hardware import cluster, find_chip
from meshwright.hardware.torus import TorusPiece, place_axes, torus_inner, torus_shape

V4 = find_chip("tpu-v4").intra
V5E = find_chip("tpu-v5e").intra


@pytest.mark.parametrize(
    ("num_devices", "num_dims", "shape"),
    [(8, 2, (2, 4)), (16, 2, (4, 4)), (256, 2, (16, 16)), (64, 3, (4, 4, 4)), (128, 3, (4, 4, 8)), (7, 2, (1, 7))],
)
def test_slices_are_as_cubic_as_can_be(num_devices, num_dims, shape):
    assert torus_shape(num_devices, num_dims) == shape


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(2, 3))
def test_a_torus_holds_all_chips(num_devices, num_dims):
    assert math.prod(torus_shape(num_devices, num_dims)) == num_devices


def test_axes_get_whole_dims_where_sizes_allow():
    assert place_axes((4, 4, 8), V4, (8, 16), 128) == (
        (TorusPiece(8, 1, True),),
        (TorusPiece(4, 1, True), TorusPiece(4, 1, True)),
    )


def test_axes_get_pieces_of_dims_otherwise():
    runs = place_axes((4, 4), V5E, (2, 8), 16)
    assert math.prod(run.size for run in runs[0]) == 2
    assert math.prod(run.size for run in runs[1]) == 8
    assert runs[0] == (TorusPiece(2, 2, False),)


def test_only_catalogued_sides_wrap_around():
    assert place_axes((16, 16), V5E, (16, 16), 256)[0] == (TorusPiece(16, 1, True),)
    assert place_axes((8, 8), V5E, (8, 8), 64)[0] == (TorusPiece(8, 1, False),)
    assert place_axes((4, 4, 4), V4, (4, 4, 4), 64)[0] == (TorusPiece(4, 1, True),)
    assert place_axes((2, 2, 4), V4, (2, 2, 4), 16)[0] == (TorusPiece(2, 1, False),)


def test_a_ring_sends_both_ways_and_a_line_one_way():
    ring = torus_inner(V4, ((TorusPiece(8, 1, True),),), (0,))
    line = torus_inner(V4, ((TorusPiece(8, 1, False),),), (0,))
    assert ring[0] == pytest.approx(2 * 45e9)
    assert line[0] == pytest.approx(45e9)
    assert ring[3] == 4
    assert line[3] == 7


def test_more_dims_carry_more():
    one = torus_inner(V4, ((TorusPiece(4, 1, True),), (TorusPiece(4, 1, True),)), (0,))
    both = torus_inner(V4, ((TorusPiece(4, 1, True),), (TorusPiece(4, 1, True),)), (0, 1))
    assert both[0] == pytest.approx(2 * one[0])


def test_an_all_to_all_on_a_ring_takes_a_quarter_of_an_all_gather():
    """The scaling book's rule, for large rings."""
    mesh = cluster("32x8 tpu-v5e").mesh((16, 16))
    gather = mesh.alternatives("all_gather", (0,))[-1][1]
    exchange = mesh.alternatives("all_to_all", (0,))[-1][1]
    assert exchange == pytest.approx(gather / 4, rel=0.1)


def test_every_view_of_a_slice_has_finite_times():
    for spec in ("2x8 tpu-v5e", "6x4 tpu-v4", "64x8 tpu-v5e"):
        for mesh in cluster(spec).meshes():
            for axis in range(len(mesh.sizes)):
                assert 0 < mesh.collective_s("all_to_all", (axis,), 1e6) < 1
