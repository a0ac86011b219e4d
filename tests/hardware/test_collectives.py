"""Properties that times of collectives have on every cluster."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.hardware import chips, cluster
from meshwright.hardware.collectives import KINDS, hierarchical_ways, prune, ring_ways
from meshwright.hardware.groups import group_of

SIZES = np.array([1.0, 1e3, 1e5, 1e7, 1e9])


@st.composite
def some_mesh(draw):
    chip = draw(st.sampled_from(chips()))
    found = cluster(f"{draw(st.integers(1, 6))}x{draw(st.integers(1, 8))} {chip.name}")
    return draw(st.sampled_from(found.meshes()))


def axis_sets(mesh):
    indices = range(len(mesh.sizes))
    return [axes for length in (1, 2, 3) for axes in itertools.combinations(indices, length)]


@settings(deadline=None, max_examples=60)
@given(mesh=some_mesh(), kind=st.sampled_from(KINDS))
def test_more_bytes_never_take_less_time(mesh, kind):
    for axes in axis_sets(mesh):
        times = mesh.collective_s(kind, axes, SIZES)
        assert np.isfinite(times).all()
        assert (np.diff(times) >= 0).all()
        assert (times > 0).all() or mesh.num_devices == 1


@settings(deadline=None, max_examples=60)
@given(mesh=some_mesh())
def test_an_all_reduce_is_at_least_a_gather_or_a_scatter(mesh):
    """Across hosts only of large buffers: small ones are reduced by trees, and gathered by rings, which take longer."""
    for axes in axis_sets(mesh):
        group = group_of(mesh.cluster, mesh.sizes, axes)
        sizes = SIZES if group.num_domains == 1 else np.array([1e10])
        reduce = mesh.collective_s("all_reduce", axes, sizes) * (1 + 1e-12)  # but for rounding
        assert (reduce >= mesh.collective_s("all_gather", axes, sizes)).all()
        assert (reduce >= mesh.collective_s("reduce_scatter", axes, sizes)).all()


@settings(deadline=None, max_examples=60)
@given(mesh=some_mesh(), kind=st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_the_chosen_way_is_never_worse_than_a_ring_or_the_hierarchy(mesh, kind):
    found = mesh.cluster
    for axis, size in enumerate(mesh.sizes):
        if size == 1:
            continue
        group = group_of(found, mesh.sizes, (axis,))
        ways = ring_ways(group, found.intra, found.inter, kind)
        ways += hierarchical_ways(group, found.intra, found.inter) if kind == "all_reduce" else []
        for alpha, beta in ways:
            assert (mesh.collective_s(kind, (axis,), SIZES) <= (alpha + beta * SIZES) * (1 + 1e-12)).all()


def test_a_gather_over_many_hosts_waits_for_every_hop_of_a_ring():
    """NCCL has no tree for gathers of several devices on each host, and XLA does not pad them to all-reduces."""
    mesh = cluster("32x8 h100").mesh((256,))
    for kind in ("all_gather", "reduce_scatter"):
        assert mesh.collective_s(kind, (0,), 1e4) > 2 * mesh.collective_s("all_reduce", (0,), 1e4)


def test_the_hierarchy_starts_sooner_than_a_ring_over_many_hosts():
    found = cluster("32x8 h100")
    group = group_of(found, (256,), (0,))
    ring = min(alpha for alpha, _ in ring_ways(group, found.intra, found.inter, "all_reduce"))
    assert min(alpha for alpha, _ in hierarchical_ways(group, found.intra, found.inter)) < ring


# Not the L40S, whose measured host is slower than its network, nor where the fast link leaves hosts.
GPUS = [c.name for c in chips() if c.vendor in ("NVIDIA", "AMD") and c.name != "l40s" and not c.intra.domain]


@pytest.mark.parametrize("chip", GPUS)
@pytest.mark.parametrize("kind", KINDS)
def test_axes_inside_a_host_are_faster_than_axes_between_hosts(chip, kind):
    mesh = cluster(f"8x8 {chip}").mesh((8, 8))
    sizes = SIZES[:-2] if (chip, kind) == ("mi300x", "permute") else SIZES  # one wire equals one adapter there
    assert (mesh.collective_s(kind, (1,), sizes) < mesh.collective_s(kind, (0,), sizes)).all()


def test_a_group_with_more_members_in_a_host_has_more_adapters():
    found = cluster("2x8 h100")
    one, eight = found.mesh((2, 8)), found.mesh((16,))
    assert eight.collective_s("all_reduce", (0,), 1e9) < one.collective_s("all_reduce", (0,), 1e9) / 3


def test_a_pair_of_mi300x_has_one_wire():
    found = cluster("8 mi300x")
    pair, all_eight = found.mesh((4, 2)), found.mesh((8,))
    assert pair.collective_s("all_gather", (1,), 1e9) > 2 * all_eight.collective_s("all_gather", (0,), 1e9)


def test_devices_of_a_host_without_peer_to_peer_share_it():
    two, eight = cluster("2 rtx-4090").mesh((2,)), cluster("8 rtx-4090").mesh((4, 2))
    assert eight.collective_s("all_gather", (1,), 1e9) > 2 * two.collective_s("all_gather", (0,), 1e9)


def test_an_all_to_all_moves_less_than_a_gather():
    mesh = cluster("8 h100").mesh((8,))
    assert mesh.collective_s("all_to_all", (0,), 1e9) < mesh.collective_s("all_gather", (0,), 1e9) / 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_dropped_ways_are_never_the_fastest(found):
    kept = prune(found)
    for size in (0.0, 0.3, 1.0, 3.0, 100.0):
        fastest = min(alpha + beta * size for alpha, beta in found)
        assert min(alpha + beta * size for alpha, beta in kept) == pytest.approx(fastest, abs=1e-12)


def test_only_the_lower_envelope_is_kept():
    assert prune([(2.0, 1.0), (1.0, 2.0), (3.0, 1.5), (1.0, 3.0)]) == ((1.0, 2.0), (2.0, 1.0))
    assert prune([(0.0, 2.0), (1.9, 1.0), (2.0, 0.0)]) == ((0.0, 2.0), (2.0, 0.0))
