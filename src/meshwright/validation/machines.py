"""Reads the description of machines in a published table: the chip, the devices per host, the network."""

import re
import tomllib
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from typing import Any

from meshwright.errors import ClusterError
from meshwright.hardware import Chip, Cluster, find_chip
from meshwright.hardware.link import Host

_POWER = re.compile(r"(\d{3,4})\s*W\b")
_MEMORY_RATE = re.compile(r"([\d.]+)\s*TB/s", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+)\s*GB(?![/p])", re.IGNORECASE)
_NETWORK = re.compile(r"([\d.]+)\s*([GT])b(?:ps|it/s|/s)?\b([^,;)]*)")
_PARTS = re.compile(r"(\d+)\s*JAX devices\s*(?:/|per)\s*chip", re.IGNORECASE)


def devices_per_chip(text: str) -> int:
    """How many devices a program sees for each chip that the table counts."""
    match = _PARTS.search(text)
    return int(match[1]) if match else 1


def machines(text: str, num_chips: int, notes: str = "") -> Cluster:
    """The cluster that a table describes, e.g. ``"A100-SXM-40GB (RoCE 1600Gbps/node)"``.

    Args:
        text: The table's name of the devices.
        num_chips: The number of chips.
        notes: Remarks that may name the network.
    """
    gpu = _find(text)
    chip = _chip(text, gpu)
    num_devices = num_chips * devices_per_chip(text)
    per_host = _per_host(text, chip, num_devices)
    intra, inter = chip.intra, chip.inter
    if "dgx-2" in text.lower():
        intra = replace(intra, topology="switch", edges=(), shared_bandwidth=0.0)  # sixteen behind one switch
    rate = _network(text, per_host) or _network(notes, per_host)
    if rate:
        inter = replace(inter, bandwidth=rate)
    return Cluster(f"{num_chips} {text}", num_devices // per_host, Host(per_host, intra, inter), chip)


def _find(text: str) -> dict[str, Any]:
    entry = next((gpu for gpu in _gpus() if all(word in text.lower() for word in gpu["words"])), None)
    if entry is None:
        chips = sorted({gpu["chip"] for gpu in _gpus()})
        raise ClusterError(f"gpu_type {text!r} names no device of the catalogue; it knows {', '.join(chips)}")
    return entry


def _chip(text: str, gpu: dict[str, Any]) -> Chip:
    """The catalogue's chip, with the table's deviations from it."""
    chip = find_chip(gpu["chip"])
    changes: dict[str, Any] = {}
    if (rate := _MEMORY_RATE.search(text)) is not None:
        changes["memory_bandwidth"] = float(rate[1]) * 1e12
    if (size := _MEMORY.search(text)) is not None and abs(int(size[1]) * 1e9 / chip.memory_bytes - 1) > 0.1:
        changes["memory_bytes"] = int(chip.memory_bytes + (int(size[1]) - _nominal_gb(chip)) * 1e9)
    if (power := _POWER.search(text)) is not None and "power_w" in gpu and int(power[1]) < gpu["power_w"]:
        # Dynamic power goes with the cube of the clock, since voltage follows it.
        changes["best_fraction"] = chip.best_fraction * (int(power[1]) / gpu["power_w"]) ** (1 / 3)
    return replace(chip, **changes)


def _nominal_gb(chip: Chip) -> int:
    match = re.search(r"(\d+)gb", chip.name)
    return int(match[1]) if match else round(chip.memory_bytes / 1e9)


def _per_host(text: str, chip: Chip, num_devices: int) -> int:
    usual = 16 if "dgx-2" in text.lower() else chip.devices_per_host
    if "single" in text.lower():
        usual = num_devices
    return next(size for size in range(min(usual, num_devices), 0, -1) if num_devices % size == 0)


def _network(text: str, per_host: int) -> float | None:
    """Bytes per second that one device may send to other hosts."""
    match = _NETWORK.search(text)
    if match is None:
        return None
    rate = float(match[1]) * (1e12 if match[2] == "T" else 1e9) / 8
    return rate if re.search(r"(?:per|/)\s*(?:gpu|chip|device)", match[3], re.IGNORECASE) else rate / per_host


@lru_cache(maxsize=1)
def _gpus() -> list[dict[str, Any]]:
    text = files("meshwright.validation").joinpath("gpus.toml").read_text(encoding="utf-8")
    return list(tomllib.loads(text)["gpu"])
