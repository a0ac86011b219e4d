"""Clusters and meshes: hosts full of chips, of one kind or several, and the logical views of them with named axes.

They are one file because each makes the other: a cluster its meshes, and a saved mesh its cluster.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from meshwright.errors import ClusterError
from meshwright.hardware.axes import AXIS_NAMES as AXIS_NAMES
from meshwright.hardware.axes import Shape, check_names, read_shape
from meshwright.hardware.chip import Chip
from meshwright.hardware.collectives import KINDS, Way, abstract_ways, least_s, ways
from meshwright.hardware.groups import group_of
from meshwright.hardware.link import Host, Link, complete
from meshwright.hardware.storage import SavedCluster, SavedGroups, SavedMesh, to_plain
from meshwright.hardware.torus import divisors, torus_shape
from meshwright.schema import Count, built, checked
from meshwright.units import Numeric

MOST_DEVICES = 2**20  # several times the largest machine; views of a mesh are counted by its divisors
CATALOGUE = "modelled: catalogue figures"
# Views of a cluster that are searched have at most so many axes; more are planned where the user gives them. A product
# has many thousands of strategies then, which takes several times as long.
_SEARCHED_AXES = 3


@dataclass(frozen=True)
class Mesh:
    """Devices seen as a grid of one to four axes, named x, y, z and w unless the user names them.

    Make one with `Cluster.mesh` or, for research without a machine, with `Mesh.abstract`.

    Attributes:
        sizes: Number of devices along each axis; the last axis is innermost.
        cluster: The machines behind it; None where the mesh is abstract.
        alpha: Fixed cost of a collective along each axis of an abstract mesh.
        beta: Cost per byte along each axis of an abstract mesh.
        limit_bytes: Memory per device of an abstract mesh; None where there is no limit.
        axis_names: The user's names of the axes; empty for x, y, z and w.
        explicit: Names of the axes that are of JAX's explicit type while the function is traced.

    Examples:
        >>> mesh = Mesh.abstract((2, 4), alpha=(1, 1), beta=(1, 0.1))
        >>> mesh.shape, mesh.num_devices
        ({'x': 2, 'y': 4}, 8)
    """

    sizes: tuple[int, ...]
    cluster: "Cluster | None" = None
    alpha: tuple[float, ...] = ()
    beta: tuple[float, ...] = ()
    limit_bytes: int | None = None
    axis_names: tuple[str, ...] = ()
    explicit: tuple[str, ...] = ()
    _ways: dict[tuple[str, tuple[int, ...]], tuple[Way, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not 1 <= len(self.sizes) <= len(AXIS_NAMES):
            raise ClusterError(
                f"a mesh has 1 to {len(AXIS_NAMES)} axes, not {len(self.sizes)} as in {self.sizes}: merge neighbouring "
                "ones, since several axes that split one dim are as good as their product."
            )
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in self.sizes):
            raise ClusterError(f"mesh sizes must be whole numbers of at least 1, not {self.sizes}: e.g. (4, 8).")
        if self.num_devices > MOST_DEVICES:
            raise ClusterError(
                f"mesh {self.sizes!s:.60} has more than {MOST_DEVICES:,} devices, which is the most that Meshwright "
                "plans for: choose smaller sizes."
            )
        check_names(self.axis_names, self.sizes)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.shape.items())
        return f"Mesh({sizes}; {self.cluster or 'abstract'})"

    @classmethod
    def abstract(
        cls,
        shape: Shape,
        alpha: Sequence[float] | float,
        beta: Sequence[float] | float,
        memory_bytes: int | None = None,
    ) -> "Mesh":
        """Makes a mesh that has costs but no machines: compute is free, memory may be limited.

        On an axis of n devices an all-gather or reduce-scatter of B bytes costs α + β(n-1)/n·B, an all-reduce
        α + 2β(n-1)/n·B, an all-to-all α + β(n-1)/n²·B and a permute α + β·B.

        Args:
            shape: Number of devices along each of one to four axes, as `Cluster.mesh` takes it.
            alpha: α of each axis, or one number for all.
            beta: β of each axis, or one number for all.
            memory_bytes: Memory of each device, or None for no limit.

        Examples:
            >>> Mesh.abstract((4, 1), alpha=(1, 1), beta=(1, 1)).collective_s("all_reduce", (0,), 100)
            151.0
        """
        sizes, *named = read_shape(shape)
        costs = (_per_axis("alpha", alpha, len(sizes)), _per_axis("beta", beta, len(sizes)))
        if memory_bytes is not None and not (isinstance(memory_bytes, Real) and memory_bytes > 0):
            raise ClusterError(f"memory_bytes must be above 0, not {memory_bytes!r}: leave it out for no limit.")
        return cls(sizes, None, *costs, None if memory_bytes is None else int(memory_bytes), *named)

    @property
    def names(self) -> tuple[str, ...]:
        return self.axis_names or AXIS_NAMES[: len(self.sizes)]

    @property
    def shape(self) -> dict[str, int]:
        """Sizes by axis name, e.g. ``{"x": 50, "y": 4}``."""
        return dict(zip(self.names, self.sizes, strict=True))

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_abstract(self) -> bool:
        return self.cluster is None

    @property
    def chip(self) -> "Chip | None":
        return None if self.cluster is None else self.cluster.chip

    @property
    def is_cpu(self) -> bool:
        """Whether XLA's CPU backend makes its programs; an abstract mesh stands for accelerators."""
        return self.chip is not None and "cpu" in self.chip.device_kinds

    @property
    def memory_bytes(self) -> int | None:
        """Usable bytes of each device; None where an abstract mesh has no limit."""
        return self.limit_bytes if self.cluster is None else self.cluster.memory_bytes

    def link_of(self, axis: int) -> str:
        """The links that an axis crosses, in words, e.g. ``"nvlink3 x 4, then infiniband x 2"``."""
        if self.cluster is None:
            return "abstract"
        group = group_of(self.cluster, self.sizes, (axis,))
        steps = ((self.cluster.intra.kind, group.inner.size), (self.cluster.inter.kind, group.num_domains))
        return ", then ".join(f"{kind} x {size}" for kind, size in steps if size > 1) or "none"

    def alternatives(self, kind: str, axes: Sequence[int]) -> tuple[Way, ...]:
        """The ways to do a collective: ``(seconds, seconds per byte)`` each; its time is the least of them.

        Args:
            kind: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``, ``"all_to_all"`` or ``"permute"``.
            axes: Indices of the axes it runs along.
        """
        key = (kind, tuple(axes))
        ways = self._ways.get(key)
        if ways is None:
            ways = self._ways[key] = self._find_ways(kind, key[1])
        return ways

    def collective_s(self, kind: str, axes: Sequence[int], num_bytes: Numeric, start: float = 1.0) -> Numeric:
        """Seconds (or the abstract mesh's units) of a collective; a number or an array, like ``num_bytes``.

        Args:
            kind: As in `alternatives`.
            axes: Indices of the axes it runs along.
            num_bytes: All-gather: bytes of the gathered result on one device. Reduce-scatter: of the full unreduced
                buffer on one device. All-reduce: of the buffer. All-to-all: of the whole tensor over the group (local
                part × number of devices). Permute: the bytes that each device sends.
            start: The part of the fixed time that counts, where a compiler combines several collectives into one.
        """
        return least_s([(start * alpha, beta) for alpha, beta in self.alternatives(kind, axes)], num_bytes)

    def _find_ways(self, kind: str, axes: tuple[int, ...]) -> tuple[Way, ...]:
        if kind not in KINDS:
            raise ClusterError(f"unknown collective {kind!r}: use one of {', '.join(KINDS)}.")
        if len(set(axes)) != len(axes) or any(not 0 <= axis < len(self.sizes) for axis in axes):
            raise ClusterError(f"axes {axes} are not distinct indices of a mesh of {len(self.sizes)} axes.")
        used = tuple(sorted(axis for axis in axes if self.sizes[axis] > 1))
        if not used:
            return ((0.0, 0.0),)
        if self.cluster is None:
            return abstract_ways(kind, [(self.sizes[i], self.alpha[i], self.beta[i]) for i in used])
        return ways(group_of(self.cluster, self.sizes, used), self.cluster.intra, self.cluster.inter, kind)

    def to_json(self) -> dict[str, Any]:
        """Plain data from which `from_json` makes the same mesh again."""
        named = {"axis_names": list(self.axis_names), "explicit": list(self.explicit)} if self.axis_names else {}
        if self.cluster is not None:
            return {"shape": list(self.sizes), **named, "cluster": self.cluster.to_json()}
        costs = {"alpha": list(self.alpha), "beta": list(self.beta), "memory_bytes": self.limit_bytes}
        return {"shape": list(self.sizes), **named, "abstract": costs}

    @classmethod
    def from_json(cls, data: Any, where: str = "mesh") -> "Mesh":
        """The inverse of `to_json`.

        Raises:
            ValueError: The data are not those of a mesh; the message says where, beginning with `where`.
        """
        saved = built(SavedMesh, data, where)
        if saved.abstract is not None:
            costs = saved.abstract
            mesh = cls.abstract(saved.shape, costs.alpha, costs.beta, costs.memory_bytes)
        else:
            cluster = Cluster.from_json(saved.cluster, f"{where}.cluster")
            mesh = cls(saved.shape, cluster) if cluster.mixed else cluster.mesh(saved.shape)
        return replace(mesh, axis_names=saved.axis_names, explicit=saved.explicit)


def _per_axis(name: str, values: Sequence[float] | float, num_axes: int) -> tuple[float, ...]:
    per_axis = (values,) * num_axes if isinstance(values, int | float) else tuple(values)
    if len(per_axis) != num_axes:
        raise ClusterError(f"{name} has {len(per_axis)} numbers for {num_axes} axes: give one per axis.")
    if any(not value >= 0 for value in per_axis):
        raise ClusterError(f"{name} must not be negative, but is {per_axis}: costs are at least 0.")
    return tuple(float(value) for value in per_axis)


@dataclass(frozen=True)
class Cluster:
    """Equal hosts of equal chips, or several groups of them.

    Attributes:
        name: How it was described.
        num_hosts: Number of hosts.
        host: Devices and links of each of them; of the first group where hosts are of several kinds.
        chip: The kind of each device; likewise.
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

    def mesh(self, shape: Shape) -> Mesh:
        """The logical view with the given sizes, the last axis innermost.

        Args:
            shape: Sizes of axes that are named x, y, z in order; or sizes by the axes' names; or a JAX mesh, of which
                the names, the sizes and the types of the axes are taken, and not the devices.

        Examples:
            >>> from meshwright.hardware import cluster
            >>> cluster("50x4 a100-40gb").mesh((50, 4)).shape
            {'x': 50, 'y': 4}
            >>> cluster("50x4 a100-40gb").mesh({"data": 50, "model": 4}).names
            ('data', 'model')
        """
        sizes, names, explicit = read_shape(shape)
        if self.mixed:
            raise ClusterError(
                f"cluster {self.name!r} has hosts of several kinds, which one mesh cannot hold: plan it in stages, "
                "each on hosts of one kind, with method=mw.Auto(pipeline=True), or give one group as the cluster."
            )
        mesh = Mesh(sizes, self, axis_names=names, explicit=explicit)
        if mesh.num_devices != self.num_devices:
            raise ClusterError(
                f"mesh {sizes} has {mesh.num_devices} devices but cluster {self.name!r} has {self.num_devices}: "
                f"choose sizes whose product is {self.num_devices}, e.g. ({self.num_hosts}, {self.devices_per_host})."
            )
        return mesh

    def meshes(self, max_axes: int = _SEARCHED_AXES) -> list[Mesh]:
        """All logical views with at most that many axes, fewest axes first; every axis is larger than 1."""
        if not 1 <= max_axes <= len(AXIS_NAMES):
            raise ClusterError(f"max_axes must be 1 to {len(AXIS_NAMES)}, not {max_axes!r}.")
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
    def from_json(cls, data: Any, where: str = "cluster") -> "Cluster":
        """The inverse of `to_json`.

        Raises:
            ValueError: The data are not those of a cluster; the message says where, beginning with `where`.
        """
        if "groups" in checked(data, dict[str, Any], where):
            several = built(SavedGroups, data, where)
            return mixed(several.name, [cls.from_json(g, f"{where}.groups[{n}]") for n, g in enumerate(several.groups)])
        one = built(SavedCluster, data, where)
        for name in ("intra", "inter"):
            complete(getattr(one, name), f"{where}.{name}")
            complete(getattr(one.chip, name), f"{where}.chip.{name}")
        host = Host(one.devices_per_host, one.intra, one.inter)
        return cls(one.name, one.hosts, host, one.chip, one.torus, one.known or CATALOGUE)


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
