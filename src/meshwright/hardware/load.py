"""Makes a cluster from a user's description: ``"50x4 a100-40gb"``, a TOML file, or ``"local"``."""

import re
from os import PathLike
from pathlib import Path

from meshwright.errors import ClusterError
from meshwright.hardware.chip import Chip
from meshwright.hardware.cluster_file import read_cluster
from meshwright.hardware.clusters import Cluster, mixed
from meshwright.hardware.link import Host
from meshwright.hardware.lookup import find_chip, find_device_kind

_SPEC = re.compile(r"(?:(\d+)\s*[xX×]\s*)?(\d+)\s+(\S+)")
_DIGITS = 18  # more make no larger a cluster: it is refused with fewer
_LEGAL = "write 'HOSTSxDEVICES CHIP' such as '50x4 a100-40gb', the path of a .toml file, or 'local'"


def cluster(description: "str | PathLike[str] | Cluster") -> Cluster:
    """Makes a cluster from its description, all figures from the catalogue: see `mw.cluster`, which measures, too.

    Args:
        description: ``"HOSTSxDEVICES CHIP"`` (``"50x4 a100-40gb"``), ``"DEVICES CHIP"`` for one host (``"8 h100"``),
            several of these joined by ``+`` for hosts of several kinds (``"4x8 h100 + 2x8 a100"``), the path of a TOML
            file (see ``examples/cluster.toml``), or ``"local"`` for the devices JAX sees here.

    >>> cluster("50x4 a100-40gb").num_devices
    200
    """
    if isinstance(description, Cluster):
        return description
    if not isinstance(description, str | PathLike):
        raise ClusterError(f"a cluster is described by text, not by {description!r}: {_LEGAL}.")
    spec = str(description).strip()
    if is_local(spec):
        return local_cluster()
    if isinstance(description, PathLike) or spec.lower().endswith(".toml"):
        return read_cluster(Path(spec))
    if "+" in spec:
        return mixed(spec, [cluster(part) for part in spec.split("+")])
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise ClusterError(f"cannot read cluster {spec!r:.60}: {_LEGAL}.")
    hosts, devices = (int(number[:_DIGITS]) for number in (match[1] or "1", match[2]))
    if hosts < 1 or devices < 1:
        raise ClusterError(f"cluster {spec!r} has no devices: hosts and devices per host must be at least 1; {_LEGAL}.")
    return uniform(spec, hosts, devices, find_chip(match[3]))


def is_local(description: object) -> bool:
    """Whether a description means the devices that JAX sees here."""
    return isinstance(description, str) and description.strip().lower() == "local"


def uniform(name: str, num_hosts: int, devices_per_host: int, chip: Chip) -> Cluster:
    """A cluster of equal hosts with the usual links of their chip."""
    return Cluster(name, num_hosts, Host(devices_per_host, chip.intra, chip.inter), chip)


def local_cluster() -> Cluster:
    """The devices that JAX sees by their data sheet; a kind that the catalogue does not know is priced as ``cpu``."""
    import jax  # reading a description must not load JAX; only this one needs it

    kind = jax.devices()[0].device_kind
    chip = find_device_kind(kind)
    name = "local" if chip else f"local (no chip for {kind!r} in the catalogue: priced as cpu)"
    return uniform(name, jax.process_count(), jax.local_device_count(), chip or find_chip("cpu"))
