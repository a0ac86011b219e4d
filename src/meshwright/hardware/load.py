"""Makes a cluster from a user's description: ``"50x4 a100-40gb"``, a TOML file, or ``"local"``."""

import math
import re
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from meshwright.errors import ClusterError
from meshwright.hardware.catalogue_format import (
    CHIP_FIGURES,
    FLOPS_TYPES,
    LINK_FIGURES,
    LINK_SETTINGS,
    link_settings,
    read_chip,
)
from meshwright.hardware.chip import Chip
from meshwright.hardware.clusters import Cluster, mixed
from meshwright.hardware.link import Host, Link, complete
from meshwright.hardware.lookup import find_chip, find_device_kind, find_link
from meshwright.hardware.tables import check_keys, quantity, read_toml, required, subtable, text, whole
from meshwright.schema import checked

_SPEC = re.compile(r"(?:(\d+)\s*[xX×]\s*)?(\d+)\s+(\S+)")
_DIGITS = 18  # more make no larger a cluster: it is refused with fewer
_LEGAL = "write 'HOSTSxDEVICES CHIP' such as '50x4 a100-40gb', the path of a .toml file, or 'local'"
_GROUP_KEYS = ("hosts", "devices_per_host", "chip", "torus", "intra", "inter", "chip_overrides")
_KEYS = ("name", *_GROUP_KEYS)
_LINK_KEYS = ("link", "latency_s", "efficiency", *LINK_FIGURES, *LINK_SETTINGS)


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


def read_cluster(path: Path) -> Cluster:
    """Makes a cluster from a file like ``examples/cluster.toml``.

    Raises:
        ClusterError: The file cannot be read, or describes no machines.
    """
    try:
        return checked(_read(path), Cluster, path.name)
    except ClusterError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise ClusterError(f"{str(path)!r} cannot be understood ({type(error).__name__}: {error!s:.120}).") from error


def _read(path: Path) -> Cluster:
    data, where = read_toml(path), path.name
    name = text(data.get("name", path.stem), f"{where}: name")
    if "group" not in data:
        check_keys(data, _KEYS, where)
        return _group(data, path, where, name)
    check_keys(data, ("name", "group"), where)
    groups = data["group"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise ClusterError(f"{where}: write one [[group]] for each kind of host, each with its hosts and chip.")
    for number, group in enumerate(groups):
        check_keys(group, _GROUP_KEYS, f"{where} [[group]] {number + 1}")
    named = [(group, f"{where} [[group]] {number + 1}") for number, group in enumerate(groups)]
    return mixed(name, [_group(group, path, label, label) for group, label in named])


def _group(data: dict[str, Any], path: Path, where: str, name: str) -> Cluster:
    """Equal hosts of equal chips."""
    overrides = subtable(data, "chip_overrides", where)
    chip = _override_chip(_chip(data, path, where), overrides, f"{where} [chip_overrides]")
    per_host = whole(data.get("devices_per_host", chip.devices_per_host), f"{where}: devices_per_host")
    intra = _override_link(chip.intra, subtable(data, "intra", where), f"{where} [intra]")
    inter = _override_link(chip.inter, subtable(data, "inter", where), f"{where} [inter]")
    hosts = whole(required(data, "hosts", where), f"{where}: hosts")
    torus = _torus(data.get("torus", []), intra, hosts * per_host, where)
    return Cluster(name, hosts, Host(per_host, intra, inter), chip, torus)


def _chip(data: dict[str, Any], path: Path, where: str) -> Chip:
    name = text(required(data, "chip", where), f"{where}: chip")
    if not name.endswith(".toml"):
        return find_chip(name)
    chip_path = path.parent / name
    return read_chip(read_toml(chip_path), chip_path.name, find_link)


def _override_chip(chip: Chip, table: dict[str, Any], where: str) -> Chip:
    check_keys(table, (*CHIP_FIGURES, *FLOPS_TYPES), where)
    values = {key: quantity(value, f"{where}: {key}") for key, value in table.items()}
    flops = {**dict(chip.flops), **{key: values.pop(key) for key in FLOPS_TYPES if key in values}}
    changes: dict[str, Any] = {**values, "flops": tuple(flops.items())}
    for key in changes.keys() & {"memory", "host_memory"}:
        changes[f"{key}_bytes"] = int(changes.pop(key))
    return replace(chip, **changes)


def _override_link(link: Link, table: dict[str, Any], where: str) -> Link:
    check_keys(table, _LINK_KEYS, where)
    if "link" in table:
        base, _ = find_link(text(table["link"], f"{where}: link"))
        link = replace(base, bandwidth=link.bandwidth)
    figures: dict[str, Any] = {
        key: quantity(table[key], f"{where}: {key}", zero=key == "copy_bandwidth")
        for key in LINK_FIGURES
        if key in table
    }
    link = replace(link, **figures, **link_settings(table, where))
    if "latency_s" in table:
        link = _with_latency(link, quantity(table["latency_s"], f"{where}: latency_s"))
    if "efficiency" in table:
        link = _with_efficiency(link, quantity(table["efficiency"], f"{where}: efficiency", most=1.0))
    return complete(link, where)


def _with_latency(link: Link, latency_s: float) -> Link:
    """Sets the quickest protocol's hop to a measured latency and scales the others alike."""
    quickest = min(p.hop_s for p in link.protocols) or latency_s
    scaled = (replace(p, hop_s=(p.hop_s or quickest) * latency_s / quickest) for p in link.protocols)
    return replace(link, protocols=tuple(scaled))


def _with_efficiency(link: Link, efficiency: float) -> Link:
    """Sets the fastest protocol's efficiency to a measured one and scales the others alike."""
    fastest = max(p.efficiency for p in link.protocols)
    scaled = (replace(p, efficiency=p.efficiency * efficiency / fastest) for p in link.protocols)
    return replace(link, protocols=tuple(scaled))


def _torus(sizes: Any, intra: Link, num_devices: int, where: str) -> tuple[int, ...]:
    if not isinstance(sizes, list):
        raise ClusterError(f"{where}: torus is {sizes!r} but must be a list of sizes, e.g. [4, 4, 8].")
    shape = tuple(whole(size, f"{where}: torus") for size in sizes)
    if shape and intra.topology != "torus":
        raise ClusterError(f"{where}: torus is given but the devices are joined by {intra.kind!r}: remove it.")
    if shape and num_devices % math.prod(shape):
        raise ClusterError(f"{where}: torus {list(shape)} does not divide the {num_devices} devices of the cluster.")
    return shape
