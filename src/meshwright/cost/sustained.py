"""The time of collectives inside a training step, for plans, simulated steps and recipes alike."""

from collections.abc import Sequence

from meshwright.hardware import Mesh
from meshwright.hardware.collectives import Way, least_s
from meshwright.hardware.groups import group_of

INSIDE, ACROSS = "inside hosts", "between hosts"

#: A kind of link that all devices of a host share.
SHARED_ADAPTER = "ethernet"


def link_of(mesh: Mesh, axes: Sequence[int]) -> str:
    """The slowest wires that groups over some axes of a mesh cross."""
    assert mesh.cluster is not None
    return ACROSS if group_of(mesh.cluster, mesh.sizes, tuple(sorted(axes))).num_domains > 1 else INSIDE


def sustained_ways(mesh: Mesh, kind: str, axes: Sequence[int], network: float) -> Sequence[Way]:
    """The ways of a collective over some axes of a mesh, all groups at once.

    Args:
        mesh: The mesh.
        kind: The kind of collective.
        axes: The axes, by number.
        network: Part of a network's collective rate that a busy cluster keeps.
    """
    ways = mesh.alternatives(kind, axes)
    if network == 1.0 or mesh.cluster is None or link_of(mesh, axes) == INSIDE:
        return ways
    return [(alpha / network, beta / network) for alpha, beta in ways]


def sustained_s(mesh: Mesh, kind: str, axes: Sequence[int], num_bytes: float, network: float) -> float:
    """Seconds of a collective of so many bytes, by the convention of `Mesh.collective_s`."""
    return float(least_s(sustained_ways(mesh, kind, axes, network), num_bytes))
