"""The time of collectives inside a training step, for plans, stages, simulated steps and recipes alike."""

from collections.abc import Sequence

from meshwright.cost.rates import cluster_rates
from meshwright.hardware import Mesh
from meshwright.hardware.collectives import Way, least_s, ring_ways
from meshwright.hardware.groups import group_of
from meshwright.units import Numeric

INSIDE, ACROSS = "inside hosts", "between hosts"

#: A kind of link that all devices of a host share.
SHARED_ADAPTER = "ethernet"


def link_of(mesh: Mesh, axes: Sequence[int]) -> str:
    """The slowest wires that groups over some axes of a mesh cross."""
    assert mesh.cluster is not None
    return ACROSS if group_of(mesh.cluster, mesh.sizes, tuple(sorted(axes))).num_domains > 1 else INSIDE


def sustained_ways(mesh: Mesh, kind: str, axes: Sequence[int], network: float | None = None) -> Sequence[Way]:
    """The ways of a collective over some axes of a mesh, all groups at once.

    Args:
        mesh: The mesh; on an abstract one a step keeps the whole of the user's own rates.
        kind: The kind of collective.
        axes: The axes, by number.
        network: Part of a network's collective rate that a busy cluster keeps; by default what its machines are known
            to keep.
    """
    if mesh.cluster is None or link_of(mesh, axes) == INSIDE:
        return mesh.alternatives(kind, axes)
    kept = cluster_rates(mesh.cluster).constants.network if network is None else network
    return [(alpha / kept, beta / kept) for alpha, beta in _across(kind, mesh, axes)]


def sustained_s(
    mesh: Mesh, kind: str, axes: Sequence[int], num_bytes: Numeric, network: float | None = None
) -> Numeric:
    """Seconds of a collective of so many bytes, by the convention of `Mesh.collective_s`; see `sustained_ways`."""
    return least_s(sustained_ways(mesh, kind, axes, network), num_bytes)


def _across(kind: str, mesh: Mesh, axes: Sequence[int]) -> Sequence[Way]:
    """The ways between hosts: NCCL gathers and scatters in rings only, whatever the number of hosts."""
    assert mesh.cluster is not None
    intra, inter = mesh.cluster.intra, mesh.cluster.inter
    if kind not in ("all_gather", "reduce_scatter") or intra.topology == "torus" or inter.timings:
        return mesh.alternatives(kind, axes)
    return list(ring_ways(group_of(mesh.cluster, mesh.sizes, tuple(sorted(axes))), intra, inter, kind))
