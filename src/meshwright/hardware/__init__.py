"""Chips, links, hosts, clusters, logical meshes, and the time of a collective on them."""

from meshwright.hardware.chip import Chip
from meshwright.hardware.clusters import Cluster
from meshwright.hardware.link import Host, Link
from meshwright.hardware.load import cluster
from meshwright.hardware.lookup import chips, find_chip
from meshwright.hardware.mesh import Mesh

__all__ = ["Chip", "Cluster", "Host", "Link", "Mesh", "chips", "cluster", "find_chip"]
