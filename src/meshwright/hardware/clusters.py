"""A cluster: hosts full of chips, of one kind or several, and all the logical meshes it can be seen as."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.errors import ClusterError
from meshwright.hardware.chip import Chip
from meshwright.hardware.link import Host, Link
from meshwright.hardware.mesh import AXIS_NAMES, MOST_DEVICES, Mesh, plain_sizes
from meshwright.hardware.storage import chip_from_json, link_from_json, to_plain
from meshwright.hardware.torus import divisors, torus_shape
from meshwright.schema import Count, checked

CATALOGUE = "modelled: catalogue figures"


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal chips, or several groups of them.

    Attributes:
        name: How it was described.
        num_hosts: Number of hosts.
        host: Devices and links of each of them; of the first group where hosts are of several kinds.
        chip: What each device is; likewise.
        torus_sizes: Sizes of the TPU torus; empty for the most cubic one.
        known: How its figures are known, for the provenance of plans.
        mixed: The groups of equal hosts, in the order of their hosts; empty where all are equal.

    Examples:
        >>> import meshwright as mw
        >>> cluster = mw.cluster("50x4 a100-40gb")
        >>> cluster.num_devices, cluster.chip.name, cluster.mesh((50, 4)).shape
        (200, 'a100-sxm-40gb', {'x': 50, 'y': 4})
    """

    name: str
    num_hosts: Count
    host: Host
    chip: Chip
    torus_sizes: tuple[Count, ...] = ()
    known: str = CATALOGUE
    mixed: tuple["Cluster", ...] = ()

    def __post_init__(self) -> None:
        if self.num_devices > MOST_DEVICES:
            raise ClusterError(
                f"cluster {self.name!r:.60} has more than {MOST_DEVICES:,} devices, which is the most that Meshwright "
                "plans for: name fewer hosts, or one pod of them."
            )

    def __repr__(self) -> str:
        if self.mixed:
            return f"Cluster({self.name!r}: {' + '.join(map(_kind, self.mixed))})"
        return f"Cluster({self.name!r}: {_kind(self)})"

    @property
    def devices_per_host(self) -> int:
        return self.host.num_devices

    @property
    def groups(self) -> tuple["Cluster", ...]:
        """The groups of equal hosts: itself where all hosts are equal."""
        return self.mixed or (self,)

    @property
    def num_devices(self) -> int:
        return sum(group.num_hosts * group.host.num_devices for group in self.groups)

    @property
    def memory_bytes(self) -> int:
        """Bytes of one device that programs can use; of the smallest where they differ."""
        return min(group.chip.memory_bytes for group in self.groups)

    def part(self, num_hosts: int, devices_per_host: int) -> "Cluster":
        """Some hosts of a cluster whose hosts are equal, or some devices of one, as a cluster of their own."""
        if (num_hosts, devices_per_host) == (self.num_hosts, self.devices_per_host):
            return self
        host = replace(self.host, num_devices=devices_per_host)
        name = f"{num_hosts}x{devices_per_host} {self.chip.name}"
        return replace(self, name=name, num_hosts=num_hosts, host=host, torus_sizes=())

    @property
    def intra(self) -> Link:
        return self.host.intra

    @property
    def inter(self) -> Link:
        return self.host.inter

    def mesh(self, shape: Sequence[int]) -> Mesh:
        """The logical view with the given sizes, axes named x, y, z in order, the last one innermost.

        Examples:
            >>> from meshwright.hardware import cluster
            >>> cluster("50x4 a100-40gb").mesh((50, 4)).shape
            {'x': 50, 'y': 4}
        """
        sizes = plain_sizes(shape)
        if self.mixed:
            raise ClusterError(
                f"cluster {self.name!r} has hosts of several kinds, which one mesh cannot hold: plan it in stages, "
                "each on hosts of one kind, with method=mw.Auto(pipeline=True), or give one group as the cluster."
            )
        mesh = Mesh(sizes, self)
        if mesh.num_devices != self.num_devices:
            raise ClusterError(
                f"mesh {sizes} has {mesh.num_devices} devices but cluster {self.name!r} has {self.num_devices}: "
                f"choose sizes whose product is {self.num_devices}, e.g. ({self.num_hosts}, {self.devices_per_host})."
            )
        return mesh

    def meshes(self, max_axes: int = len(AXIS_NAMES)) -> list[Mesh]:
        """All logical views with at most that many axes, fewest axes first; every axis is larger than 1."""
        if not 1 <= max_axes <= len(AXIS_NAMES):
            raise ClusterError(f"max_axes must be 1, 2 or 3, not {max_axes!r}.")
        if self.num_devices == 1:
            return [self.mesh((1,))]
        return [self.mesh(shape) for length in range(1, max_axes + 1) for shape in _views(self.num_devices, length)]

    def torus(self, domain: int) -> tuple[int, ...]:
        """Sizes of the torus that one slice of chips forms."""
        return self.torus_sizes or torus_shape(domain, self.intra.torus_dims)

    def to_json(self) -> dict[str, Any]:
        """Plain data that holds every figure, so that the same cluster can be made without the catalogue."""
        data = {
            "name": self.name,
            "hosts": self.num_hosts,
            "devices_per_host": self.devices_per_host,
            "torus": list(self.torus_sizes),
            "chip": to_plain(self.chip),
            "intra": to_plain(self.intra),
            "inter": to_plain(self.inter),
        }
        if self.mixed:
            data = {"name": self.name, "groups": [group.to_json() for group in self.mixed]}
        return data if self.known == CATALOGUE else {**data, "known": self.known}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Cluster":
        """Makes a cluster from what `to_json` gave."""
        if "groups" in data:
            return mixed(checked(data["name"], str, "name"), [cls.from_json(group) for group in data["groups"]])
        links = (link_from_json(data["intra"]), link_from_json(data["inter"]))
        host = Host(data["devices_per_host"], *links)
        chip, known = chip_from_json(data["chip"]), data.get("known", CATALOGUE)
        return checked(cls(data["name"], data["hosts"], host, chip, tuple(data["torus"]), known), cls, "cluster")


def mixed(name: str, groups: Sequence[Cluster]) -> Cluster:
    """Several groups of equal hosts as one cluster."""
    flat = tuple(part for group in groups for part in group.groups)
    if len(flat) == 1:
        return replace(flat[0], name=name)
    return replace(flat[0], name=name, num_hosts=sum(g.num_hosts for g in flat), torus_sizes=(), mixed=flat)


def _kind(cluster: Cluster) -> str:
    return f"{cluster.num_hosts}x{cluster.devices_per_host} {cluster.chip.name}"


def _views(number: int, length: int) -> list[tuple[int, ...]]:
    """Ordered ways to write a number as a product of factors above 1.

    Examples:
        >>> _views(12, 2)
        [(2, 6), (3, 4), (4, 3), (6, 2)]
    """
    if length == 1:
        return [(number,)] if number > 1 else []
    firsts = (first for first in divisors(number) if 1 < first < number)
    return [(first, *rest) for first in firsts for rest in _views(number // first, length - 1)]
