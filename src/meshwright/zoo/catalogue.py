"""The catalogue of models: names looked up in the TOML files of `shapes/`, one file per family."""

import difflib
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from meshwright.errors import MeshwrightError


class ZooError(MeshwrightError, ValueError):
    """A model name or option that the zoo does not know."""


@dataclass(frozen=True)
class Entry:
    """One named model: where its shape was published and what it is.

    Attributes:
        family: The module of `meshwright.zoo` that implements it, e.g. `"llama"`.
        source: Where the shape was published.
        num_params: The published number of parameters, or None where nobody published one (the tiny models).
        batch: The global batch size used when none is asked for.
        seq: The sequence length used when none is asked for; None for models without one.
        shape: The fields of the family's `Config`.
    """

    name: str
    family: str
    description: str
    source: str
    num_params: int | None
    batch: int
    seq: int | None
    shape: dict[str, Any]


def names() -> list[str]:
    """Returns the name of every model, sorted within its family."""
    return list(_catalogue())


def entry(name: str) -> Entry:
    """Returns the catalogue's entry for one model; raises `ZooError` with the nearest names when there is none."""
    catalogue = _catalogue()
    if name in catalogue:
        return catalogue[name]
    near = difflib.get_close_matches(name, catalogue, n=4, cutoff=0.4)
    hint = f"Did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    raise ZooError(f"Unknown model {name!r}. {hint}`meshwright models` lists all {len(catalogue)}.")


@cache
def _catalogue() -> dict[str, Entry]:
    entries = {}
    folder = resources.files("meshwright.zoo").joinpath("shapes")
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        family = file.name.removesuffix(".toml")
        for name, fields in tomllib.loads(file.read_text(encoding="utf-8")).items():
            entries[name] = _entry(name, family, fields)
    return entries


def _entry(name: str, family: str, fields: dict[str, Any]) -> Entry:
    about = {key: fields.pop(key, None) for key in ("description", "source", "num_params", "batch", "seq")}
    shape = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    return Entry(name=name, family=family, shape=shape, **about)
