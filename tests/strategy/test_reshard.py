"""Resharding, carried out: every hop is done on arrays, device by device, and must give the layout it claims."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import meshwright as mw
from meshwright.strategy.reshard import SLICE, Resharding
from meshwright.strategy.sharding import Axes
from tests.strategy.layouts import devices, numbered, shard

SETTINGS = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
ITEMSIZE = 4

meshes = st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=1, max_size=3).map(tuple)
shapes = st.lists(st.sampled_from([1, 2, 4, 6, 8, 12]), min_size=1, max_size=3).map(tuple)


def resharding_on(sizes, alpha=1.0, beta=1.0):
    mesh = mw.Mesh.abstract(sizes, alpha=alpha, beta=beta)
    axes = Axes(sizes)
    return mesh, axes, Resharding(mesh, axes)


def moved(device, axis, to):
    return (*device[:axis], to, *device[axis + 1 :])


def held_by(dims, axis):
    return next((d for d, axes in enumerate(dims) if axis in axes), None)


def carry_out(kind, hop_axes, before, after, sizes, local):
    """Does one collective within the groups of its axes; gives every device's new part."""
    axis = hop_axes[0]
    n = sizes[axis]
    if kind == "permute":
        first, second = hop_axes
        return {d: local[moved(moved(d, first, d[second]), second, d[first])] for d in local}
    gone, come = held_by(before, axis), held_by(after, axis)
    if kind == "all_gather" and len(hop_axes) > 1:  # the minor-most axis is gathered first: the major ones hold more
        dim = held_by(before, axis)
        between = (*before[:dim], tuple(a for a in before[dim] if a != hop_axes[-1]), *before[dim + 1 :])
        local = carry_out(kind, hop_axes[-1:], before, between, sizes, local)
        return carry_out(kind, hop_axes[:-1], between, after, sizes, local)
    new = {}
    for device, part in local.items():
        group = [local[moved(device, axis, i)] for i in range(n)]
        if kind == "slice":
            assert gone is None
            new[device] = np.split(part, n, axis=come)[device[axis]]
        elif kind == "all_gather":
            assert come is None
            new[device] = np.concatenate(group, axis=gone)
        else:
            assert kind == "all_to_all"
            new[device] = np.concatenate([np.split(p, n, axis=come)[device[axis]] for p in group], axis=gone)
    return new


def bytes_by_convention(kind, before_part, after_part, n):
    """What `Mesh.collective_s` is to be asked for, counted from the parts themselves."""
    sizes = {
        "slice": 0,
        "all_gather": after_part.size,
        "all_to_all": before_part.size * n,
        "permute": before_part.size,
    }
    return sizes[kind] * ITEMSIZE


@SETTINGS
@given(meshes, shapes, st.data())
def test_every_path_turns_one_layout_into_the_other(sizes, shape, data):
    alpha = data.draw(st.sampled_from([0.0, 1.0, 100.0]))
    beta = tuple(data.draw(st.sampled_from([0.01, 1.0])) for _ in sizes)
    mesh, axes, resharding = resharding_on(sizes, alpha, beta)
    codes = axes.legal_codes(shape).tolist()
    source, target = data.draw(st.sampled_from(codes)), data.draw(st.sampled_from(codes))
    whole, rank = numbered(shape), len(shape)
    dims = axes.dims(source, rank)
    local = {d: shard(whole, dims, sizes, d) for d in devices(sizes)}
    seconds = 0.0
    for hop in resharding.path(shape, ITEMSIZE, source, target):
        after = axes.dims(hop.code, rank)
        new = carry_out(hop.kind, hop.axes, dims, after, sizes, local)
        for device in devices(sizes):
            np.testing.assert_array_equal(new[device], shard(whole, after, sizes, device))
        first = devices(sizes)[0]
        expected_bytes = bytes_by_convention(hop.kind, local[first], new[first], sizes[hop.axes[0]])
        assert hop.num_bytes == pytest.approx(expected_bytes)
        if hop.kind != "slice":
            price = mesh.collective_s(hop.kind, hop.axes, expected_bytes)
            assert hop.seconds == pytest.approx(price, abs=1e-12)
            seconds += price
        local, dims = new, after
    assert dims == axes.dims(target, rank)
    cost = resharding.cost(shape, ITEMSIZE, np.array([source]), np.array([target]))
    assert cost[0, 0] == pytest.approx(seconds, abs=1e-11)


@SETTINGS
@given(meshes, shapes)
def test_a_detour_never_pays(sizes, shape):
    _, axes, resharding = resharding_on(sizes, alpha=1.0, beta=tuple(1.0 / (1 + i) for i in range(len(sizes))))
    codes = axes.legal_codes(shape)
    cost = resharding.cost(shape, ITEMSIZE, codes, codes)
    assert np.isfinite(cost).all()
    assert np.diagonal(cost).max() == 0
    through = (cost[:, :, None] + cost[None, :, :]).min(axis=1)
    assert (cost <= through + 1e-9).all()


@pytest.mark.slow
@SETTINGS
@given(meshes, shapes)
def test_a_resharding_is_free_exactly_where_every_device_has_its_part_already(sizes, shape):
    _, axes, resharding = resharding_on(sizes)
    codes = axes.legal_codes(shape).tolist()[:12]
    whole, rank = numbered(shape), len(shape)
    cost = resharding.cost(shape, ITEMSIZE, np.array(codes), np.array(codes))
    for i, source in enumerate(codes):
        for j, target in enumerate(codes):
            has = all(
                np.isin(
                    shard(whole, axes.dims(target, rank), sizes, d), shard(whole, axes.dims(source, rank), sizes, d)
                ).all()
                for d in devices(sizes)
            )
            assert (cost[i, j] < 1e-9) <= has  # never free without the data
            if has and len(sizes) == 1:
                assert cost[i, j] < 1e-9


@pytest.mark.slow
@SETTINGS
@given(meshes, shapes)
def test_slices_alone_lead_where_nothing_is_sent(sizes, shape):
    _, axes, resharding = resharding_on(sizes)
    codes = axes.legal_codes(shape).tolist()[:24]
    for source in codes:
        for target in codes:
            hops = resharding.path(shape, ITEMSIZE, source, target)
            assert axes.only_cuts(source, target) == all(hop.kind == SLICE for hop in hops)


def test_a_single_collective_is_never_dearer_than_its_own_price():
    mesh, axes, resharding = resharding_on((2, 4), alpha=(1, 2), beta=(1, 0.1))
    shape, total = (8, 8), 8 * 8 * ITEMSIZE
    split_x, split_y, both = (axes.code(d) for d in (((0,), ()), ((1,), ()), ((0, 1), ())))
    other = axes.code(((), (1,)))
    for source, target, kind, axis, size in (
        (split_x, 0, "all_gather", 0, total),
        (split_y, 0, "all_gather", 1, total),
        (both, split_x, "all_gather", 1, total / 2),
        (split_y, other, "all_to_all", 1, total),
    ):
        cost = resharding.cost(shape, ITEMSIZE, np.array([source]), np.array([target]))[0, 0]
        assert cost <= mesh.collective_s(kind, (axis,), size) + 1e-9


def test_a_slow_axis_gathers_what_a_fast_one_has_sliced():
    mesh, axes, resharding = resharding_on((2, 4), alpha=(1, 2), beta=(1, 0.1))
    total = 8 * 8 * ITEMSIZE
    path = resharding.path((8, 8), ITEMSIZE, axes.code(((0,), ())), 0)
    assert [(hop.kind, hop.axes) for hop in path] == [("slice", (1,)), ("all_gather", (0, 1))]
    price = mesh.collective_s("all_gather", (0,), total / 4) + mesh.collective_s("all_gather", (1,), total)
    assert sum(hop.seconds for hop in path) == pytest.approx(price)


def test_axes_of_one_dim_are_gathered_at_once():
    mesh, axes, resharding = resharding_on((2, 2, 2), alpha=100.0, beta=(1, 0.5, 0.25))
    total = 8 * 8 * ITEMSIZE
    for held, left, gathered in (((0, 1), (), (0, 1)), ((0, 1, 2), (0,), (1, 2)), ((0, 2), (), (0, 2))):
        [hop] = resharding.path((8, 8), ITEMSIZE, axes.code((held, ())), axes.code((left, ())))
        assert (hop.kind, hop.axes, hop.num_bytes) == ("all_gather", gathered, total / 2 ** len(left))
        assert hop.seconds == pytest.approx(mesh.collective_s("all_gather", gathered, hop.num_bytes))


def test_giving_a_major_axis_to_a_split_dim_is_not_free():
    _, axes, resharding = resharding_on((2, 2))
    split_x, split_y, both = (axes.code(d) for d in (((0,),), ((1,),), ((0, 1),)))
    cost = resharding.cost((8,), ITEMSIZE, np.array([split_x, split_y]), np.array([both]))[:, 0]
    assert cost[0] < 1e-9  # x is major: each device keeps half of its own part
    assert cost[1] > 1.0


def test_taking_the_major_axis_away_first_needs_the_minor_one():
    mesh, axes, resharding = resharding_on((2, 2))
    both, split_y = axes.code(((0, 1),)), axes.code(((1,),))
    kinds = [(hop.kind, hop.axes) for hop in resharding.path((8,), ITEMSIZE, both, split_y)]
    assert ("all_gather", (0,)) not in kinds[:1]
    total = 8 * ITEMSIZE
    cheapest = mesh.collective_s("all_gather", (1,), total / 2) + min(
        mesh.collective_s("all_gather", (0,), total), mesh.collective_s("permute", (0, 1), total / 2)
    )
    cost = resharding.cost((8,), ITEMSIZE, np.array([both]), np.array([split_y]))[0, 0]
    assert cost == pytest.approx(cheapest)


def test_equal_axes_may_be_swapped_by_a_permute():
    mesh, axes, resharding = resharding_on((4, 4), alpha=1.0, beta=1.0)
    (hop,) = resharding.path((16,), ITEMSIZE, axes.code(((0,),)), axes.code(((1,),)))
    assert (hop.kind, hop.axes) == ("permute", (0, 1))
    assert hop.seconds == pytest.approx(mesh.collective_s("permute", (0, 1), 16 * ITEMSIZE / 4))


def test_pairwise_agrees_with_the_matrix():
    _, axes, resharding = resharding_on((2, 3))
    codes = axes.legal_codes((6, 12))
    matrix = resharding.cost((6, 12), 2, codes, codes)
    rolled = np.roll(codes, 1)
    pairs = resharding.pairwise((6, 12), 2, codes, rolled)
    np.testing.assert_array_equal(pairs, matrix[np.arange(len(codes)), np.roll(np.arange(len(codes)), 1)])


def test_real_meshes_price_hops_by_their_own_links():
    mesh = mw.cluster("2x4 a100-40gb").mesh((2, 4))
    axes = Axes(mesh.sizes)
    resharding = Resharding(mesh, axes)
    between, within = axes.code(((0,),)), axes.code(((1,),))
    cost = resharding.cost((2**20,), 4, np.array([between, within]), np.array([0]))[:, 0]
    assert cost[0] > cost[1]
    assert cost[1] == pytest.approx(mesh.collective_s("all_gather", (1,), 2**22))
