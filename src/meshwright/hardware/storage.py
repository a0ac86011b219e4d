"""Machines as plain data, so that a plan can carry the one it was made for; what files have of clusters and meshes."""

from dataclasses import asdict, dataclass
from typing import Any

from meshwright.hardware.chip import Chip
from meshwright.hardware.link import Link
from meshwright.schema import Amount, Count


def to_plain(value: Chip | Link) -> dict[str, Any]:
    """Plain data of a chip or link; the sources of its figures stay in the catalogue."""
    data = _lists(asdict(value))
    data.pop("figures", None)
    for link in (data, data.get("intra", {}), data.get("inter", {})):
        if not link.get("timings", True):
            del link["timings"]  # files stay as they were for machines that were not measured
    return data


def _lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value


@dataclass(frozen=True)
class SavedCluster:
    """What a file has of a cluster whose hosts are equal."""

    name: str
    hosts: Count
    devices_per_host: Count
    torus: tuple[Count, ...]
    chip: Chip
    intra: Link
    inter: Link
    known: str = ""


@dataclass(frozen=True)
class SavedGroups:
    """What a file has of a cluster of several kinds of hosts."""

    name: str
    groups: tuple[Any, ...]
    known: str = ""


@dataclass(frozen=True)
class AbstractCosts:
    """What a file has of an abstract mesh."""

    alpha: tuple[Amount, ...]
    beta: tuple[Amount, ...]
    memory_bytes: Count | None


@dataclass(frozen=True)
class SavedMesh:
    """What a file has of a mesh: one of a cluster, or an abstract one."""

    shape: tuple[Count, ...]
    axis_names: tuple[str, ...] = ()
    explicit: tuple[str, ...] = ()
    cluster: Any = None
    abstract: AbstractCosts | None = None
