"""The time of collectives inside a training step, for plans and recipes alike."""

from meshwright.hardware import Mesh
from meshwright.hardware.collectives import Way, ring_ways
from meshwright.hardware.groups import group_of

INSIDE, ACROSS = "inside hosts", "between hosts"

#: A kind of link that all devices of a host share.
SHARED_ADAPTER = "ethernet"


def link_of(mesh: Mesh, axes: tuple[int, ...]) -> str:
    """The slowest wires that groups over some axes of a mesh cross."""
    assert mesh.cluster is not None
    return ACROSS if group_of(mesh.cluster, mesh.sizes, tuple(sorted(axes))).num_domains > 1 else INSIDE


def sustained_s(mesh: Mesh, kind: str, axes: tuple[int, ...], num_bytes: float, network: float) -> float:
    """Seconds of a collective over some axes of a mesh, all groups at once.

    Args:
        mesh: The mesh, on a cluster.
        kind: The kind of collective.
        axes: The axes, by number.
        num_bytes: Bytes by the convention of `Mesh.collective_s`.
        network: Part of a network's collective rate that a busy cluster keeps.
    """
    if link_of(mesh, axes) == INSIDE:
        return float(mesh.collective_s(kind, axes, num_bytes))
    return min(alpha + beta * num_bytes for alpha, beta in _across(kind, mesh, axes)) / network


def _across(kind: str, mesh: Mesh, axes: tuple[int, ...]) -> tuple[Way, ...]:
    """The ways between hosts: NCCL gathers and scatters in rings only, whatever the number of hosts."""
    assert mesh.cluster is not None
    intra, inter = mesh.cluster.intra, mesh.cluster.inter
    if kind not in ("all_gather", "reduce_scatter") or intra.topology == "torus" or inter.timings:
        return mesh.alternatives(kind, axes)
    return tuple(ring_ways(group_of(mesh.cluster, mesh.sizes, tuple(sorted(axes))), intra, inter, kind))
