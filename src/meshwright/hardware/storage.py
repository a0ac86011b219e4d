"""Turns chips and links into plain data and back, so that a plan can carry the machine it was made for."""

from dataclasses import asdict
from typing import Any

from meshwright.hardware.chip import Chip
from meshwright.hardware.link import Link, Protocol, Timing, complete


def to_plain(value: Chip | Link) -> dict[str, Any]:
    """Plain data of a chip or link; the sources of its figures stay in the catalogue."""
    data = _lists(asdict(value))
    data.pop("figures", None)
    for link in (data, data.get("intra", {}), data.get("inter", {})):
        if not link.get("timings", True):
            del link["timings"]  # files stay as they were for machines that were not measured
    return data


def link_from_json(data: dict[str, Any]) -> Link:
    protocols = tuple(Protocol(**{**p, "kinds": tuple(p["kinds"])}) for p in data["protocols"])
    edges = tuple(map(tuple, data["edges"]))
    timings = tuple(Timing(**timing) for timing in data.get("timings", ()))
    return complete(Link(**{**data, "protocols": protocols, "edges": edges, "timings": timings}), "link")


def chip_from_json(data: dict[str, Any]) -> Chip:
    tuples = {key: tuple(data[key]) for key in ("aliases", "device_kinds")}
    flops = tuple(map(tuple, data["flops"]))
    links = {key: link_from_json(data[key]) for key in ("intra", "inter")}
    return Chip(**{**data, **tuples, **links, "flops": flops})


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value
