"""Finds chips in the catalogue by exact name or declared alias."""

import difflib
from functools import lru_cache
from importlib.resources import files

from meshwright.errors import ClusterError
from meshwright.hardware.catalogue_format import read_chip, read_link
from meshwright.hardware.chip import Chip, Figure
from meshwright.hardware.link import Link
from meshwright.hardware.tables import read_toml


def chips() -> list[Chip]:
    """Every chip of the catalogue, by vendor and name."""
    return sorted({chip.name: chip for chip in _chips_by_name().values()}.values(), key=lambda c: (c.vendor, c.name))


def find_chip(name: str) -> Chip:
    """The chip of an exact name or alias, whatever its case.

    >>> find_chip("h100").name
    'h100-sxm-80gb'
    """
    table = _chips_by_name()
    chip = table.get(name.strip().lower())
    if chip is None:
        near = difflib.get_close_matches(name.lower(), table, n=4, cutoff=0.4)
        hint = f"the nearest names are {', '.join(near)}" if near else f"known chips are {', '.join(sorted(table))}"
        raise ClusterError(
            f"unknown chip {name!r}: {hint}; `meshwright chips` lists all, and docs/inside/add-a-chip.md says how to "
            "add one."
        )
    return chip


def find_device_kind(kind: str) -> Chip | None:
    """The chip that JAX calls by a device kind, or None where the catalogue has none."""
    return next((chip for chip in chips() if kind in chip.device_kinds), None)


def find_link(kind: str) -> tuple[Link, tuple[Figure, ...]]:
    """A kind of link with unit bandwidth, and the sources of its figures."""
    table = _links()
    if kind not in table:
        near = difflib.get_close_matches(kind, table, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ClusterError(f"unknown link {kind!r}: {hint}known links are {', '.join(sorted(table))}.")
    return table[kind]


@lru_cache(maxsize=1)
def _chips_by_name() -> dict[str, Chip]:
    table: dict[str, Chip] = {}
    for path in files("meshwright.hardware").joinpath("catalogue").iterdir():
        if path.name.endswith(".toml"):
            chip = read_chip(read_toml(path), path.name, find_link)
            for name in (chip.name, *chip.aliases):
                if name in table:
                    raise ClusterError(f"{path.name}: the name {name!r} already belongs to {table[name].name!r}.")
                table[name] = chip
    return table


@lru_cache(maxsize=1)
def _links() -> dict[str, tuple[Link, tuple[Figure, ...]]]:
    folder = files("meshwright.hardware").joinpath("catalogue", "links")
    links = (read_link(read_toml(path), path.name) for path in folder.iterdir() if path.name.endswith(".toml"))
    return {link.kind: (link, figures) for link, figures in links}
