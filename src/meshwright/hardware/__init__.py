"""Chips, links, hosts, clusters, logical meshes, and the time of a collective on them.

The readers of descriptions and of the catalogue are loaded on first use: a saved plan contains its machines.
"""

from typing import TYPE_CHECKING, Any

from meshwright import lazy
from meshwright.hardware.chip import Chip
from meshwright.hardware.clusters import Cluster, Mesh
from meshwright.hardware.link import Host, Link

if TYPE_CHECKING:
    from meshwright.hardware.load import cluster
    from meshwright.hardware.lookup import chips, find_chip

_LATE = {"chips": "lookup", "cluster": "load", "find_chip": "lookup"}

__all__ = ["Chip", "Cluster", "Host", "Link", "Mesh", "chips", "cluster", "find_chip"]


def __getattr__(name: str) -> Any:
    return lazy.load(__name__, _LATE, name)
