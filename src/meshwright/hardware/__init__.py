"""Chips, links, hosts, clusters, logical meshes, and the time of a collective on them.

What reads descriptions and the catalogue is loaded when it is first used: a saved plan has its machines with it.
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
