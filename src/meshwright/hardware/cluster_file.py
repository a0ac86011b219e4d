"""Reads a cluster from a TOML file: the catalogue's figures with whatever the user knows better."""

import math
from dataclasses import replace
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
from meshwright.hardware.lookup import find_chip, find_link
from meshwright.hardware.tables import check_keys, quantity, read_toml, required, subtable, text, whole
from meshwright.schema import checked

_GROUP_KEYS = ("hosts", "devices_per_host", "chip", "torus", "intra", "inter", "chip_overrides")
_KEYS = ("name", *_GROUP_KEYS)
_LINK_KEYS = ("link", "latency_s", "efficiency", *LINK_FIGURES, *LINK_SETTINGS)


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
