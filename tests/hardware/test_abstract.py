"""The research view's formulas, as the issue states them."""

import math

import pytest

from meshwright.hardware import Mesh


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("all_gather", 3 + 0.5 * 7 / 8 * 1000),
        ("reduce_scatter", 3 + 0.5 * 7 / 8 * 1000),
        ("all_reduce", 3 + 2 * 0.5 * 7 / 8 * 1000),
        ("all_to_all", 3 + 0.5 * 7 / 64 * 1000),
        ("permute", 3 + 0.5 * 1000),
    ],
)
def test_one_axis_costs_what_the_formula_says(kind, expected):
    mesh = Mesh.abstract((4, 8), alpha=(1, 3), beta=(1, 0.5))
    assert mesh.collective_s(kind, (1,), 1000) == pytest.approx(expected)


def test_all_reduce_over_two_axes_is_the_sum_on_the_whole_buffer():
    mesh = Mesh.abstract((4, 8), alpha=(1, 3), beta=(1, 0.5))
    whole = mesh.collective_s("all_reduce", (0, 1), 1000)
    assert whole == pytest.approx(sum(mesh.collective_s("all_reduce", (i,), 1000) for i in (0, 1)))


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gather_over_two_axes_works_on_what_is_there_at_each_step(kind):
    mesh = Mesh.abstract((4, 8), alpha=(1, 3), beta=(1, 0.5))
    expected = mesh.collective_s(kind, (1,), 1000) + mesh.collective_s(kind, (0,), 1000 / 8)
    assert mesh.collective_s(kind, (0, 1), 1000) == pytest.approx(expected)


def test_axis_order_in_the_call_does_not_matter():
    mesh = Mesh.abstract((2, 3, 4), alpha=(1, 2, 3), beta=(1, 2, 3))
    assert mesh.collective_s("all_gather", (2, 0), 99) == mesh.collective_s("all_gather", (0, 2), 99)


def test_axes_of_one_device_are_free():
    mesh = Mesh.abstract((4, 1), alpha=(1, 1), beta=(1, 1))
    assert mesh.collective_s("all_reduce", (1,), 1e9) == 0.0
    assert mesh.collective_s("all_reduce", (0, 1), 8) == mesh.collective_s("all_reduce", (0,), 8)


def test_the_mlp_optimum_of_the_issue_is_expressible():
    """AR(b, axis) = α + 2β(n-1)/n·b on mesh (2, 2) with β (1, 0.1)."""
    mesh = Mesh.abstract((2, 2), alpha=(1, 1), beta=(1, 0.1))
    hidden, batch = 32, 256
    total = 6 * (
        mesh.collective_s("all_reduce", (0,), hidden**2 * 4 / 2) + mesh.collective_s("all_reduce", (0,), hidden * 4)
    ) + 5 * mesh.collective_s("all_reduce", (1,), batch * hidden * 4 / 2)
    by_hand = 6 * ((1 + 2048) + (1 + 128)) + 5 * (1 + 0.1 * 16384)
    assert math.isclose(total, by_hand)
