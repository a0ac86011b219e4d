"""Turns a catalogue file into a chip or a link, keeping the source of every figure."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshwright.errors import ClusterError
from meshwright.hardware.chip import SURENESS, Chip, Figure
from meshwright.hardware.link import TOPOLOGIES, Link, Protocol
from meshwright.hardware.tables import check_keys, quantity, required, subtable, text, whole

CHIP_FIGURES = (
    "memory",
    "memory_bandwidth",
    "memory_efficiency",
    "vector_flops",
    "launch_s",
    "special_s",
    "best_fraction",
    "half_flops",
    "host_bandwidth",
    "host_memory",
)
FLOPS_TYPES = ("bfloat16", "float16", "float32", "float64", "float8", "float4", "int8")
LINK_FIGURES = ("bandwidth", "copy_bandwidth", "shared_bandwidth", "exchange_efficiency")
LINK_SETTINGS = ("topology", "edges", "torus_dims", "wrap_multiple", "domain")
FRACTIONS = ("memory_efficiency", "best_fraction", "exchange_efficiency", "efficiency")
_CHIP_KEYS = ("name", "aliases", "vendor", "device_kinds", "compute_capability", "cores", "devices_per_host")
_PROTOCOL_KEYS = ("name", "base_s", "hop_s", "efficiency", "kinds", "min_size", "source", "sure")

FindLink = Callable[[str], tuple[Link, tuple[Figure, ...]]]


def read_chip(data: dict[str, Any], where: str, find_link: FindLink) -> Chip:
    """Makes a chip from the tables of its file."""
    check_keys(data, (*_CHIP_KEYS, "sources", "figures", "flops", "intra", "inter"), where)
    sources = subtable(data, "sources", where)
    figures = _figures(subtable(data, "figures", where), CHIP_FIGURES, sources, f"{where} [figures]")
    rates = _figures(subtable(data, "flops", where), FLOPS_TYPES, sources, f"{where} [flops]")
    intra, intra_figures = _chip_link(data, "intra", sources, where, find_link)
    inter, inter_figures = _chip_link(data, "inter", sources, where, find_link)
    values = {figure.name: figure.value for figure in figures}
    for key in ("memory", "memory_bandwidth", "vector_flops"):
        required(values, key, f"{where} [figures]")
    return Chip(
        name=text(required(data, "name", where), f"{where}: name"),
        vendor=text(required(data, "vendor", where), f"{where}: vendor"),
        aliases=tuple(data.get("aliases", ())),
        device_kinds=tuple(data.get("device_kinds", ())),
        compute_capability=_capability(data, where),
        cores=whole(data["cores"], f"{where}: cores") if "cores" in data else 0,
        devices_per_host=whole(data.get("devices_per_host", 8), f"{where}: devices_per_host"),
        memory_bytes=int(values.pop("memory")),
        host_memory_bytes=int(values.pop("host_memory", 0)),
        flops=tuple((figure.name, figure.value) for figure in rates),
        intra=intra,
        inter=inter,
        figures=(*figures, *(replace(f, name=f"flops.{f.name}") for f in rates), *intra_figures, *inter_figures),
        **values,  # type: ignore[arg-type]
    )


def _capability(data: dict[str, Any], where: str) -> str:
    """The compute capability of an NVIDIA chip; empty where none is given."""
    capability = (
        text(data["compute_capability"], f"{where}: compute_capability") if "compute_capability" in data else ""
    )
    if capability and not re.fullmatch(r"\d+\.\d+", capability):
        raise ClusterError(f'{where}: compute_capability is {capability!r:.60} but must be two numbers, such as "9.0".')
    return capability


def read_link(data: dict[str, Any], where: str) -> tuple[Link, tuple[Figure, ...]]:
    """Makes a link of unit bandwidth from the tables of its file."""
    check_keys(data, ("kind", "sources", "protocols", *LINK_FIGURES, *LINK_SETTINGS), where)
    sources = subtable(data, "sources", where)
    figures = _figures({k: v for k, v in data.items() if k in LINK_FIGURES}, LINK_FIGURES, sources, where)
    protocols, protocol_figures = [], []
    for entry in required(data, "protocols", where):
        check_keys(entry, _PROTOCOL_KEYS, f"{where} [[protocols]]")
        protocols.append(_protocol(entry, where))
        for key in ("base_s", "hop_s", "efficiency"):
            cited = {"value": entry[key], "source": entry.get("source"), "sure": entry.get("sure")}
            protocol_figures.append(_figure(f"{entry['name']}.{key}", cited, sources, where))
    link = Link(
        kind=text(required(data, "kind", where), f"{where}: kind"),
        protocols=tuple(protocols),
        **{"bandwidth": 1.0, **{f.name: f.value for f in figures}, **link_settings(data, where)},
    )
    return link, (*figures, *protocol_figures)


def link_settings(data: dict[str, Any], where: str) -> dict[str, Any]:
    """The settings of a link that are not measured figures."""
    settings: dict[str, Any] = {}
    if "topology" in data:
        settings["topology"] = data["topology"]
        if data["topology"] not in TOPOLOGIES:
            raise ClusterError(f"{where}: topology {data['topology']!r} is not one of {', '.join(TOPOLOGIES)}.")
    if "edges" in data:
        settings["edges"] = tuple(_edge(edge, where) for edge in data["edges"])
    for key in ("torus_dims", "wrap_multiple", "domain"):
        if key in data:
            settings[key] = whole(data[key], f"{where}: {key}")
    return settings


def _edge(edge: Any, where: str) -> tuple[int, int, int]:
    if not (isinstance(edge, list) and len(edge) == 3 and all(isinstance(n, int) and n >= 0 for n in edge)):
        raise ClusterError(f"{where}: edge {edge!r} must be [device, device, number of wires], e.g. [0, 1, 2].")
    return (edge[0], edge[1], edge[2])


def _chip_link(
    data: dict[str, Any], key: str, sources: dict[str, Any], where: str, find_link: FindLink
) -> tuple[Link, list[Figure]]:
    place = f"{where} [{key}]"
    table = subtable(data, key, where)
    check_keys(table, ("link", *LINK_FIGURES, *LINK_SETTINGS), place)
    base, base_figures = find_link(text(required(table, "link", place), f"{place}: link"))
    required(table, "bandwidth", place)
    changed = _figures({k: v for k, v in table.items() if k in LINK_FIGURES}, LINK_FIGURES, sources, place)
    changes: dict[str, Any] = {f.name: f.value for f in changed}
    link = replace(base, **changes, **link_settings(table, place))
    overridden = {f.name for f in changed}
    kept = [*changed, *(f for f in base_figures if f.name not in overridden)]
    return link, [replace(f, name=f"{key}.{f.name}") for f in kept]


def _protocol(entry: dict[str, Any], where: str) -> Protocol:
    place = f"{where} [[protocols]]"
    return Protocol(
        name=text(required(entry, "name", place), f"{place}: name"),
        base_s=quantity(required(entry, "base_s", place), f"{place}: base_s", zero=True),
        hop_s=quantity(required(entry, "hop_s", place), f"{place}: hop_s", zero=True),
        efficiency=quantity(required(entry, "efficiency", place), f"{place}: efficiency", most=1.5),
        kinds=tuple(entry.get("kinds", ())),
        min_size=whole(entry.get("min_size", 2), f"{place}: min_size"),
    )


def _figures(table: dict[str, Any], legal: tuple[str, ...], sources: dict[str, Any], where: str) -> list[Figure]:
    check_keys(table, legal, where)
    return [_figure(name, entry, sources, where) for name, entry in table.items()]


def _figure(name: str, entry: Any, sources: dict[str, Any], where: str) -> Figure:
    place = f"{where}: {name}"
    if not isinstance(entry, dict):
        raise ClusterError(f"{place} must say where it comes from: {{ value = …, source = '…', sure = 'vendor' }}.")
    check_keys(entry, ("value", "source", "sure"), place)
    value = quantity(required(entry, "value", place), place, zero=True, most=1.0 if name in FRACTIONS[:3] else None)
    source = entry.get("source")
    if source not in sources:
        raise ClusterError(f"{place}: source {source!r} is not in [sources]; add it there with 'what' and 'date'.")
    if entry.get("sure") not in SURENESS:
        raise ClusterError(f"{place}: sure is {entry.get('sure')!r} but must be one of {', '.join(SURENESS)}.")
    return Figure(name, value, sources[source]["what"], str(sources[source]["date"]), entry["sure"])
