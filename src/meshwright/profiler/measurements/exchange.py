"""Measurements as plain JSON, so that a colleague's can be used."""

import os
from pathlib import Path
from typing import Any

from meshwright.output import write_whole
from meshwright.profiler.measurements.database import VERSION, Database, DatabaseError
from meshwright.profiler.measurements.measurement import Key, Measurement
from meshwright.schema import parse_json

FORMAT = "meshwright measurements"


def to_json(database: Database, **wanted: str | None) -> dict[str, Any]:
    """The measurements as plain data; ``wanted`` as in `Database.rows`."""
    return {"format": FORMAT, "version": VERSION, "measurements": [m.to_json() for m in database.rows(**wanted)]}


def export_json(database: Database, path: str | os.PathLike[str], **wanted: str | None) -> int:
    """Writes the measurements to a file, and returns how many there are."""
    import json

    data = to_json(database, **wanted)
    write_whole(Path(path), json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return len(data["measurements"])


def import_json(database: Database, path: str | os.PathLike[str]) -> tuple[int, int]:
    """Adds the measurements of a file; of two for one key, the later one is kept.

    Returns:
        How many were added, and how many were left out because the database has later ones.

    Raises:
        DatabaseError: The file holds no measurements; nothing was added.
    """
    try:
        found = _measurements(parse_json(Path(path).read_bytes()))
    except ValueError as error:
        raise DatabaseError(f"{path} holds no measurements that can be used: {error}") from error
    known: dict[tuple[Key, str], Measurement] = {(m.key, m.kind): m for m in database.rows()}
    new = [m for m in found if _is_later(m, known.get((m.key, m.kind)))]
    database.put_all(new)
    return len(new), len(found) - len(new)


def _measurements(data: Any) -> list[Measurement]:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ValueError("it was not written by `meshwright profile export`")
    version, rows = data.get("version"), data.get("measurements")
    if version != VERSION or not isinstance(rows, list):
        raise ValueError(f"its version is {version!r} but this is version {VERSION}: use a matching Meshwright")
    return [Measurement.from_json(row) for row in rows]


def _is_later(one: Measurement, other: Measurement | None) -> bool:
    return other is None or one.measured_at > other.measured_at
